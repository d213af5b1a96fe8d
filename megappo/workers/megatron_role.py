"""One Megatron role in one process: its model, its process groups and, where it trains, its optimizer."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
import torch.distributed as dist

from megappo.data import batch
from megappo.data.sequences import ending_rows
from megappo.layout.legality import fp8_multiple
from megappo.models.adapters import adapters_off, freeze
from megappo.models.build import build_model, chunks_of
from megappo.models.language_head import LanguageHead
from megappo.models.lora import is_adapter, is_trained
from megappo.models.process_groups import device, make_process_groups
from megappo.models.spec import read_model_spec, with_lora
from megappo.reshard.boxes import Box, megatron_boxes
from megappo.reshard.load_weights import load_weights
from megappo.reshard.merge import initialise
from megappo.rewards.reading import make_reader
from megappo.workers.micro_batch import MicroBatch, make_micro_batches
from megappo.workers.objectives import Objective
from megappo.workers.offload import Residence
from megappo.workers.optimizer import (
    gradient_buffers,
    make_trainable,
    set_hyper_parameters,
    set_learning_rate,
    state_tensors,
)
from megappo.workers.pipeline import Evaluate, through_pipeline
from megappo.workers.role_checkpoint import load, save
from megappo.workers.settings import MiniBatch, RoleSettings, Totals


class MegatronRole:
    """Actor, critic, reference or reward model: all are a GPT that is run over packed micro-batches.

    Every method is collective over the ranks of the role. Per-token results come back from the last pipeline stage's
    first tensor-parallel rank of each data-parallel rank; the others return ``None``.
    """

    def __init__(self, settings: RoleSettings) -> None:
        self.settings = settings
        self.spec = with_lora(read_model_spec(settings.folder), settings.lora)
        self.dtype = getattr(torch, settings.dtype)
        self.groups = make_process_groups(settings.layout, settings.timeout_s)
        self.model = build_model(
            self.spec,
            settings.layout,
            self.groups,
            self.dtype,
            scalar_head=settings.scalar_head,
            recompute=settings.recompute,
            fp8=settings.fp8,
        )
        self.params = {name: param.data for name, param in self.model.named_parameters()}
        base = [box for box in self.boxes() if not is_adapter(box.name)]
        load_weights(settings.folder, self.spec.base, base, self.params, scalar_head=settings.scalar_head)
        if self.spec.lora is not None:
            initialise(self.spec, self.params, self.boxes(), settings.seed)
            freeze(self.model, scalar_head=settings.scalar_head)
        self.chunks = chunks_of(self.model)
        self.config = self.chunks[0].config
        self.trained: list[Any] = [*self.chunks]
        self.optimizer: Any = None
        if settings.optimizer is not None:
            self.trained, self.optimizer = make_trainable(self.chunks, self.groups, self.dtype, settings.optimizer)
            self.params = {name: param.data for name, param in self.model.named_parameters()}  # moved into buffers
        else:
            self.model.requires_grad_(False)
        self.residence = Residence(
            settings.offload,
            weights=lambda: [self.params[name] for name in self._stored or self.params],
            gradients=lambda: gradient_buffers(self.trained),
            optimizer=lambda: state_tensors(self.optimizer, self.params.values()),
            frozen=self._frozen if self.spec.lora else None,
        )

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank computes the model's output."""
        return self.groups.pp.rank() == self.groups.pp.size() - 1

    @property
    def reports(self) -> bool:
        """Whether this rank returns its data-parallel rank's results."""
        return self.is_last_stage and self.groups.tp.rank() == 0

    @property
    def head(self) -> LanguageHead:
        """The language-model head; on the last stage only."""
        return LanguageHead(self.chunks[-1].head_weight, self.spec.vocab_size, self.groups.tp)

    def boxes(self) -> list[Box]:
        """What this rank holds of the model."""
        return megatron_boxes(
            self.spec,
            self.settings.layout,
            dist.get_rank(),
            scalar_head=self.settings.scalar_head,
            fused_norms=torch.cuda.is_available(),
        )

    # --- scoring -------------------------------------------------------------------------------------------------

    def logprobs(
        self,
        rows: pa.Table,
        *,
        column: str,
        temperature: float,
        with_entropy: bool = False,
        without_adapters: bool = False,
    ) -> pa.Table | None:
        """Log-probability (nats) of each response token, and the entropy of its distribution if asked for.

        Args:
            rows: this data-parallel rank's rows: ``id``, ``prompt_ids``, ``response_ids``.
            column: name of the result column.
            without_adapters: score by the model that the adapters belong to.

        Returns:
            ``id``, ``column`` and, if asked for, ``entropies``, ragged float32; ``None`` on ranks that do not report.
        """

        def evaluate(output_th: torch.Tensor, micro: MicroBatch) -> dict[str, torch.Tensor]:
            logprobs_n, entropies_n = self.head.logprobs(
                output_th[micro.rows_n], micro.targets_n, temperature=temperature, with_entropy=with_entropy
            )
            return {column: logprobs_n, **({"entropies": entropies_n} if with_entropy else {})}

        with adapters_off(self.model) if without_adapters else nullcontext():
            return self._score(rows, evaluate)

    def values(self, rows: pa.Table) -> pa.Table | None:
        """The scalar head's value before each response token: ``id``, ``values`` (ragged float32)."""
        return self._score(rows, lambda output_t1, micro: {"values": output_t1[micro.rows_n, 0]})

    def scores(self, rows: pa.Table, *, tokenizer: str) -> pa.Table | None:
        """The scalar head's value at the last token of each row's prompt and response.

        Args:
            rows: ``id`` and :data:`megappo.rewards.reading.COLUMNS`.
            tokenizer: folder of the tokenizer of the rows; they are encoded again where the role's own is another.

        Returns:
            ``id``, ``score_model`` float32, and ``failure_model``: empty, or why a row could not be scored.
        """
        sequences = make_reader(tokenizer, self.settings.folder).sequences(rows)
        longest = min(self.settings.micro_batch_tokens, self.spec.max_positions)
        ids, fits = batch.column(rows, "id"), np.array([len(one) <= longest for one in sequences], dtype=bool)
        ending = ending_rows(ids[fits], [one for one, fit in zip(sequences, fits, strict=True) if fit])
        scored = self._score(ending, lambda output_t1, micro: {"score_model": output_t1[micro.rows_n, 0]})
        if scored is None:
            return None
        scores = np.full(len(ids), np.nan, np.float32)
        scores[fits] = batch.flat(batch.take_ids(scored, ids[fits]), "score_model")
        why = [
            "" if fit else f"{len(one)} of the reward model's tokens, more than {longest}"
            for one, fit in zip(sequences, fits, strict=True)
        ]
        return pa.table({"id": rows.column("id"), "score_model": scores, "failure_model": pa.array(why, pa.string())})

    def _score(
        self, rows: pa.Table, evaluate: Callable[[torch.Tensor, MicroBatch], dict[str, torch.Tensor]]
    ) -> pa.Table | None:
        self.residence.work(training=False)
        micros = self._micro_batches(rows, ())
        self.model.eval()
        with torch.no_grad():
            results = self._pass(
                micros, lambda output, micro: (output.new_zeros(()), evaluate(output, micro)), forward_only=True
            )
        if not self.reports:
            return None
        tables = [
            pa.table(
                {
                    "id": pa.array(micro.ids, pa.int64()),
                    **{
                        name: batch.ragged(values_n.float().cpu().numpy(), micro.lengths_b.cpu().numpy())
                        for name, values_n in result.items()
                    },
                }
            )
            for micro, result in zip(micros, results, strict=True)
        ]
        return pa.concat_tables(tables).combine_chunks()

    # --- training ------------------------------------------------------------------------------------------------

    def update(
        self, rows: pa.Table, mini_batches: Sequence[MiniBatch], objective: Objective, learning_rate: float
    ) -> dict[str, float] | None:
        """Take one optimizer step per mini-batch.

        Args:
            rows: this data-parallel rank's rows with the columns that the objective reads.
            mini_batches: the steps to take, in order.
            learning_rate: for all of them.

        Returns:
            Statistics averaged over the mini-batches (over all ranks), with the first mini-batch's ``ppo_kl`` apart;
            ``None`` on ranks that do not report.

        Raises:
            FloatingPointError: the gradient is not finite; the weights cannot be used any more.
        """
        self.residence.work(training=True)
        self.model.train()
        set_learning_rate(self.optimizer, learning_rate)
        history = [self._step(batch.take_ids(rows, mini.ids), mini.totals, objective) for mini in mini_batches]
        memory = self._peak_memory() if torch.cuda.is_available() else {}
        if not self.reports:
            return None
        means = {name: float(np.mean([stats[name] for stats in history])) for name in history[0]}
        if "actor/ppo_kl" in means:
            means["actor/ppo_kl_first"] = history[0]["actor/ppo_kl"]
        return {**means, **memory}

    def _peak_memory(self) -> dict[str, float]:
        """Most memory allocated since the last call, in GiB, on any rank."""
        torch.cuda.synchronize()  # also: an engine on this device may read the weights as soon as an update returns
        peak = torch.tensor(torch.cuda.max_memory_allocated() / 2**30, device=device())
        torch.cuda.reset_peak_memory_stats()
        dist.all_reduce(peak, op=dist.ReduceOp.MAX)
        return {f"perf/max_memory_allocated_gb/{self._name}": float(peak)}

    @property
    def _name(self) -> str:
        return "critic" if self.settings.scalar_head else "actor"

    def _step(self, rows: pa.Table, totals: Totals, objective: Objective) -> dict[str, float]:
        micros = self._micro_batches(rows, objective.columns, objective.unit)
        for chunk in self.trained:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        results = self._pass(micros, lambda output, micro: objective(output, micro, totals, self), forward_only=False)
        stats = self._sum_over_data_parallel(results) if self.is_last_stage else {}
        self.residence.before_step()
        stepped, grad_norm, _ = self.optimizer.step()
        if not stepped or not np.isfinite(float(grad_norm)):
            raise FloatingPointError(
                f"the gradient norm is {float(grad_norm)}: lower the learning rate, or look for broken rewards"
            )
        return {**stats, f"{self._name}/grad_norm": float(grad_norm)}

    def _sum_over_data_parallel(self, results: list[dict[str, torch.Tensor]]) -> dict[str, float]:
        names = sorted(results[0])
        sums = torch.stack([torch.stack([result[name].float() for result in results]).sum() for name in names])
        dist.all_reduce(sums, group=self.groups.dp_cp)
        return dict(zip(names, sums.tolist(), strict=True))

    def _micro_batches(self, rows: pa.Table, columns: Sequence[str], unit: int = 1) -> list[MicroBatch]:
        config = self.config
        split = config.tensor_model_parallel_size if config.sequence_parallel else 1
        return make_micro_batches(
            rows,
            token_budget=self.settings.micro_batch_tokens,
            multiple=split * fp8_multiple(self.settings.fp8, config.sequence_parallel),
            columns=columns,
            device=device(),
            unit=unit,
            # Megatron's interleaved schedule passes groups of as many micro-batches as stages from chunk to chunk.
            count_multiple=self.groups.pp.size() if len(self.chunks) > 1 else 1,
        )

    def _pass(
        self, micros: Sequence[MicroBatch], evaluate: Evaluate, *, forward_only: bool
    ) -> list[dict[str, torch.Tensor]]:
        return through_pipeline(self.trained, self.config, self.groups, micros, evaluate, forward_only=forward_only)

    # --- checkpoints ---------------------------------------------------------------------------------------------

    def save(self, folder: str | Path) -> None:
        """Write weights and optimizer state into a folder, made if need be; any layout can load them."""
        self._bring_all()
        save(folder, self.model, self.optimizer, self.groups.dp_cp, self._stored, self.spec.lora)

    def load(self, folder: str | Path) -> None:
        """Read what :meth:`save` wrote, at this or any other layout."""
        self._bring_all()
        load(folder, self.model, self.optimizer, self.groups.dp_cp, self._stored)
        if self.settings.optimizer is not None:
            # The checkpoint's hyper-parameters came along; those of the configuration count.
            set_hyper_parameters(self.optimizer, self.settings.optimizer)

    @property
    def _stored(self) -> Collection[str] | None:
        """Parameters that a checkpoint holds: not those that stay as the model's folder has them. None: all."""
        if self.spec.lora is None:
            return None
        return [name for name in self.params if is_trained(name, scalar_head=self.settings.scalar_head)]

    def _frozen(self) -> list[torch.Tensor]:
        stored = set(self._stored or self.params)
        return [param for name, param in self.params.items() if name not in stored]

    def _bring_all(self) -> None:
        self.residence.work(training=self.optimizer is not None)
        self.residence.before_step()
