"""A role's weights and optimizer state in Megatron's ``torch_dist`` format, which loads at any layout.

Every rank writes a share, and reads what it needs into its own tensors: nothing is gathered, on devices or hosts.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megappo.models import megatron_cpu
from megappo.models.lora import FILE, Lora
from megappo.workers import checkpoint_writers
from megappo.workers.optimizer import distributed, make_state
from megappo.workers.optimizer_blocks import state_blocks

megatron_cpu.install()

from megatron.core import dist_checkpointing  # noqa: E402
from megatron.core.dist_checkpointing.serialization import get_default_save_sharded_strategy  # noqa: E402
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper  # noqa: E402

checkpoint_writers.install()

FORMAT = "fully_reshardable"
CONTENT = {
    "distrib_optim_sharding_type": FORMAT,
    "chained_optim_avoid_prefix": True,
    "singleton_local_shards": False,
}
"""What a checkpoint holds and how, as Megatron notes it there, and looks it up to load it."""


def save(
    folder: str | Path,
    model: Any,
    optimizer: Any,
    replicas: dist.ProcessGroup,
    only: Collection[str] | None = None,
    lora: Lora | None = None,
) -> None:
    """Write a checkpoint into a folder, made if need be. Collective over the role's ranks.

    Args:
        model: this rank's part of the model.
        optimizer: Megatron's distributed optimizer, or None.
        replicas: the data-parallel group.
        only: names of the parameters that are written; None: all.
        lora: the model's adapters, which are described in :data:`megappo.models.lora.FILE`.
    """
    Path(folder).mkdir(parents=True, exist_ok=True)
    if optimizer is not None:
        make_state(optimizer)
    state = _sharded_state(model, optimizer, replicas, only)
    if optimizer is not None:
        state["optimizer"] |= _common_state(optimizer)
    # Replicas have the same weights: each writes some of them.
    strategy = FullyParallelSaveStrategyWrapper(get_default_save_sharded_strategy(), replicas)
    dist_checkpointing.save(state, str(folder), sharded_strategy=strategy, content_metadata=CONTENT)
    if lora is not None and dist.get_rank() == 0:
        (Path(folder) / FILE).write_text(json.dumps(asdict(lora), indent=1))


def load(
    folder: str | Path,
    model: Any,
    optimizer: Any,
    replicas: dist.ProcessGroup,
    only: Collection[str] | None = None,
) -> None:
    """Read what :func:`save` wrote, at whatever layout, into a model and an optimizer."""
    if optimizer is not None:
        make_state(optimizer)
        common = dist_checkpointing.load_common_state_dict(str(folder))["optimizer"]
        distributed(optimizer).load_state_dict(
            {key: common[key] for key in common if not key.startswith("param_state")}
        )
    loaded = dist_checkpointing.load(_sharded_state(model, optimizer, replicas, only), str(folder))
    model.load_state_dict(loaded["model"], strict=only is None)


def _common_state(optimizer: Any) -> dict[str, Any]:
    """What no tensor of a model has: steps and hyper-parameters. Ranks that hold no parameter do not know the step."""
    of_first: list[Any] = [distributed(optimizer).state_dict() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(of_first, src=0)
    return {**of_first[0], "param_state_sharding_type": FORMAT}


def _sharded_state(
    model: Any, optimizer: Any, replicas: dist.ProcessGroup, only: Collection[str] | None
) -> dict[str, Any]:
    """Checkpoint entries, which are the tensors of the model and of the optimizer themselves."""
    weights = model.sharded_state_dict(metadata={**CONTENT, "dp_cp_group": replicas})
    state: dict[str, Any] = {"model": weights if only is None else {name: weights[name] for name in only}}
    if optimizer is not None:
        blocks = state_blocks(distributed(optimizer), state["model"])
        state["optimizer"] = {"param_state": blocks} if blocks else {}
    return state
