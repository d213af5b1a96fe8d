"""One vLLM engine: generation, and weights that are replaced while it lives."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from megappo.data import batch
from megappo.models.end_of_text import end_of_text_ids
from megappo.reshard.actor_to_rollout import Meeting, Probed, Receipt, TransferSpec, total_receipt
from megappo.reshard.agreement import Fingerprint
from megappo.workers.settings import EngineSettings, Sampling
from megappo.workers.vllm_environment import vllm_environment


class StaleWeightsError(RuntimeError):
    """The engine was asked to generate after a weight sync that did not complete."""


class RolloutEngine:
    """vLLM in this process (its tensor-parallel workers in others).

    ``weight_version`` is the version of the weights that it holds: 0 from disk; ``None`` from the begin of a sync to
    its complete end, when it refuses to generate.
    """

    def __init__(self, settings: EngineSettings) -> None:
        os.environ.update(vllm_environment(on_cuda=settings.on_cuda))
        from vllm import LLM

        self.settings = settings
        self.stop_ids = sorted({*end_of_text_ids(settings.folder), *settings.stop_token_ids})
        self.weight_version: int | None = 0
        self._updates = 0
        device_options: dict[str, Any] = (
            {"gpu_memory_utilization": settings.memory_fraction, "enable_sleep_mode": settings.sleep != "off"}
            if settings.on_cuda
            else {"enforce_eager": True, "kv_cache_memory_bytes": int(settings.kv_cache_gib * 2**30)}
        )
        self.engine: Any = LLM(
            settings.folder,
            skip_tokenizer_init=True,
            dtype=settings.dtype,
            tensor_parallel_size=settings.tp,
            # Inside a placement group vLLM would pick Ray, and ask it for bundles of its own.
            distributed_executor_backend="mp" if settings.tp > 1 else None,
            max_model_len=settings.max_tokens,
            max_num_seqs=settings.max_sequences,
            seed=settings.seed,
            logprobs_mode="processed_logprobs",
            worker_extension_cls="megappo.workers.vllm_extension.WeightReceiver",
            **device_options,
        )

    @property
    def is_broken(self) -> bool:
        """Whether one of vLLM's own worker processes died: the engine answers nothing any more."""
        executor = self.engine.llm_engine.engine_core.engine_core.model_executor
        return getattr(executor, "is_failed", False)  # with tensor parallelism 1 it is in this process

    def generate(self, requests: pa.Table, sampling: Sampling, seed: int, version: int) -> pa.Table:
        """Draw one response for each row.

        Args:
            requests: ``id``, ``prompt_ids``.
            sampling: for all rows.
            seed: of the sampler. The responses follow from it, the rows and the weights. (A seed for each row would
                too, but vLLM then samples row by row.)
            version: of the weights that the caller means to sample from.

        Returns:
            ``id``, ``response_ids`` (the token that ended it included), ``rollout_logprobs`` (float32, nats, of the
            distribution that was sampled from), ``finish_reason`` ("stop" or "length"), ``weight_version``.

        Raises:
            StaleWeightsError: the engine has other weights, or half of them.
        """
        self.require(version)
        prompts = [self.prompt(ids.tolist()) for ids in batch.split_rows(requests, "prompt_ids")]
        params = self.params(sampling)
        self.seed(seed)
        outputs = [o.outputs[0] for o in self.engine.generate(prompts, params, use_tqdm=False)] if prompts else []
        lengths = [len(output.token_ids) for output in outputs]
        tokens: list[int] = [token for output in outputs for token in output.token_ids]
        logprobs: list[float] = [value for output in outputs for value in output.logprobs.logprobs]
        return pa.table(
            {
                "id": requests.column("id"),
                "response_ids": batch.ragged(np.array(tokens, dtype=np.int32), lengths),
                "rollout_logprobs": batch.ragged(np.array(logprobs, dtype=np.float32), lengths),
                "finish_reason": pa.array([output.finish_reason for output in outputs], pa.string()),
                "weight_version": pa.array([self.weight_version] * len(outputs), pa.int64()),
            }
        )

    def require(self, version: int) -> None:
        """Refuse to sample from any weights but these.

        Raises:
            StaleWeightsError: the engine has other weights, or half of them.
        """
        if self.weight_version is None:
            raise StaleWeightsError("the last weight sync did not complete: the engine holds half-updated weights")
        if self.weight_version != version:
            raise StaleWeightsError(f"the engine holds weights of version {self.weight_version}, not {version}")

    def prompt(self, ids: list[int]) -> dict[str, Any]:
        """A prompt as vLLM takes it."""
        # vLLM finds cached keys and values by prompt and salt: those of older weights are never found.
        return {"prompt_token_ids": ids, "cache_salt": f"weights {self._updates}"}

    def params(self, sampling: Sampling, so_far: int | None = None) -> Any:
        """Sampling as vLLM takes it.

        Args:
            so_far: tokens of the response that are there, if its further ones shall come one by one.
        """
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        return SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            max_tokens=sampling.max_response - (so_far or 0),
            logprobs=0,
            flat_logprobs=True,
            detokenize=False,
            stop_token_ids=self.stop_ids,
            output_kind=RequestOutputKind.FINAL_ONLY if so_far is None else RequestOutputKind.DELTA,
        )

    def seed(self, seed: int) -> None:
        """Seed the sampler."""
        self.engine.collective_rpc("megappo_seed", args=(seed,))

    def join_transfer(self, transfer: TransferSpec, engine: int, meeting: Meeting) -> dict[int, Fingerprint]:
        """Join the transfer group with all workers; returns their fingerprints of the plan, by rank there."""
        return dict(self._ask("megappo_join", transfer, engine, meeting))

    def probe(self, transfer: TransferSpec) -> Probed:
        """Whether our table agrees with vLLM's loader, and which layers are staged; over all workers."""
        problems, staged = zip(*self._ask("megappo_probe", transfer), strict=True)
        return Probed(tuple(line for lines in problems for line in lines), staged[0])

    def receive_weights(self, version: int) -> Receipt:
        """Take part in a weight sync; returns what it did on all workers of this engine together.

        If there are mismatches, the engine stays as unusable as after a sync that did not complete.
        """
        return self._receive("megappo_receive", version)

    def open_shared(self, shared: Mapping[int, Any]) -> None:
        """Map the parameters of actor ranks that share this engine's devices."""
        self._ask("megappo_open", shared)

    def close_shared(self) -> None:
        """Let go of what :meth:`open_shared` mapped, so that its owner can move it."""
        self._ask("megappo_close")

    def receive_shared(self, version: int, sums: Mapping[int, Mapping[int, list[int]]]) -> Receipt:
        """Copy the actor's weights on the devices that both share; see :meth:`receive_weights`.

        Args:
            sums: by source rank and receiving rank, from :meth:`megappo.workers.weight_sender.WeightSender.sums`.
        """
        return self._receive("megappo_receive_shared", version, sums)

    def _receive(self, method: str, version: int, *args: Any) -> Receipt:
        self.weight_version = None
        self._updates += 1
        total = total_receipt(self._ask(method, version, *args))
        if not total.mismatches:
            self.weight_version = version
        return total

    def _ask(self, method: str, *args: Any) -> list[Any]:
        """Call a method of all workers; raises what any of them did, once all have answered."""
        answers = self.engine.collective_rpc(method, args=args)
        if failures := [answer.failure for answer in answers if answer.failure is not None]:
            raise RuntimeError("\n".join(failures))
        return [answer.value for answer in answers]

    def sleep(self) -> None:
        """Give the devices' memory to others: the key/value cache goes, weights go or move to the host."""
        self.engine.sleep(level=1 if self.settings.sleep == "offload" else 2)
        if self.settings.sleep == "drop":
            self.weight_version = None

    def wake(self, what: str) -> None:
        """Take back memory for "weights" (before a weight sync) or for the "kv_cache" (before generating)."""
        self.engine.wake_up(tags=[what])
