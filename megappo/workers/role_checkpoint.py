"""A role's weights and optimizer state in Megatron's ``torch_dist`` format, which loads at any layout."""

from __future__ import annotations

import json
import queue
from collections.abc import Collection
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megappo.models import megatron_cpu
from megappo.models.lora import FILE, Lora

megatron_cpu.install()

from megatron.core import dist_checkpointing  # noqa: E402
from megatron.core.dist_checkpointing.strategies import filesystem_async  # noqa: E402

# Megatron starts a process only to own a queue, which imports torch anew: a plain queue serves synchronous saves.
filesystem_async._get_write_results_queue = queue.Queue


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
    metadata = _metadata(replicas)
    dist_checkpointing.save(
        _sharded_state(model, optimizer, metadata, only, is_loading=False),
        str(folder),
        sharded_strategy=("torch_dist", 1),
        content_metadata={key: value for key, value in metadata.items() if key != "dp_cp_group"},
    )
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
    wanted = _sharded_state(model, optimizer, _metadata(replicas), only, is_loading=True)
    state = dist_checkpointing.load(wanted, str(folder))
    model.load_state_dict(state["model"], strict=only is None)
    if optimizer is not None:
        optimizer.load_state_dict(state["optimizer"])


def _metadata(replicas: dist.ProcessGroup) -> dict[str, Any]:
    return {
        "distrib_optim_sharding_type": "fully_reshardable",
        "chained_optim_avoid_prefix": True,
        "singleton_local_shards": False,
        "dp_cp_group": replicas,
    }


def _sharded_state(
    model: Any, optimizer: Any, metadata: dict[str, Any], only: Collection[str] | None, *, is_loading: bool
) -> dict[str, Any]:
    weights = model.sharded_state_dict(metadata=metadata)
    state: dict[str, Any] = {"model": weights if only is None else {name: weights[name] for name in only}}
    if optimizer is not None:
        state["optimizer"] = optimizer.sharded_state_dict(state, is_loading=is_loading, metadata=metadata)
    return state
