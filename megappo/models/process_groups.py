"""Process groups of one role, so that roles in the same processes can have different layouts."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

from megappo.layout.mesh import Layout
from megappo.models import megatron_cpu

megatron_cpu.install()

from megatron.core import parallel_state, tensor_parallel  # noqa: E402
from megatron.core.process_groups_config import ProcessGroupCollection  # noqa: E402


def device() -> torch.device:
    """Where this process computes: its CUDA device if it was given one, else the CPU."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def init_world(rank: int, world: int, host: str, port: int, timeout_s: float) -> None:
    """Join the process group of a pool (gloo on CPU, NCCL on CUDA) and set the few globals that Megatron still needs.

    Args:
        timeout_s: limit on any one collective, in seconds.
    """
    on_cuda = torch.cuda.is_available()
    dist.init_process_group(
        "nccl" if on_cuda else "gloo",
        init_method=f"tcp://{host}:{port}",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=timeout_s),
        device_id=device() if on_cuda else None,
    )
    # Sequence parallelism gathers into this buffer: the one piece of parallel_state that layers cannot do without.
    parallel_state._set_global_memory_buffer()


def seed_dropout(seed: int) -> None:
    """Give Megatron's random state tracker, one a process, its seed. No layer of ours draws from it while training."""
    tensor_parallel.model_parallel_cuda_manual_seed(seed, tp_rank=0, ep_rank=0, etp_rank=0)


def make_process_groups(layout: Layout) -> ProcessGroupCollection:
    """Create all groups of ``layout`` over the whole world. Collective: all ranks call it, roles in the same order.

    Raises:
        ValueError: the layout does not use exactly the ranks of this world.
    """
    if layout.world != dist.get_world_size():
        raise ValueError(f"layout {layout.describe()} has {layout.world} ranks, the pool has {dist.get_world_size()}")
    groups = ProcessGroupCollection()
    groups.tp = _group(layout, "tp")
    groups.cp = _group(layout, "cp")
    groups.dp = _group(layout, "dp")
    groups.pp = _group(layout, "pp")
    groups.mp = _group(layout, "tp", "pp")
    groups.dp_cp = _group(layout, "cp", "dp")
    groups.tp_cp = _group(layout, "tp", "cp")
    groups.tp_dp_cp = _group(layout, "tp", "cp", "dp")
    groups.intra_dp_cp = groups.dp_cp
    groups.intra_dist_opt = dist.group.WORLD
    groups.inter_dist_opt = None
    groups.embd = _first_and_last_stage(layout)
    groups.pos_embd = None
    # Dense models have no experts: Megatron still asks for their groups.
    groups.ep = groups.expt_tp = _group(layout)
    groups.tp_ep, groups.tp_ep_pp = groups.tp, groups.mp
    groups.expt_dp = groups.intra_expt_dp = groups.dp_cp
    return groups


def _group(layout: Layout, *axes: str) -> dist.ProcessGroup:
    """The group of this rank that spans ``axes``; without axes, this rank alone."""
    return dist.new_subgroups_by_enumeration(list(layout.groups(*axes)))[0]


def _first_and_last_stage(layout: Layout) -> dist.ProcessGroup | None:
    """The group that sums the gradients of a tied embedding: first and last pipeline stage."""
    ends = [ranks if len(ranks) == 1 else [ranks[0], ranks[-1]] for ranks in layout.groups("pp")]
    own = None
    for ranks in ends:
        group = dist.new_group(ranks)
        if dist.get_rank() in ranks:
            own = group
    return own
