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
        host, port: of a ``TCPStore`` that is already open (:func:`megappo.reshard.gloo.host_store`).
        timeout_s: limit on any one collective of the world, in seconds.
    """
    on_cuda, timeout = torch.cuda.is_available(), timedelta(seconds=timeout_s)
    dist.init_process_group(
        "nccl" if on_cuda else "gloo",
        store=dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout),
        rank=rank,
        world_size=world,
        timeout=timeout,
        device_id=device() if on_cuda else None,
    )
    # Sequence parallelism gathers into this buffer: the one piece of parallel_state that layers cannot do without.
    parallel_state._set_global_memory_buffer()


def leave_world() -> None:
    """Undo :func:`init_world`, so that this process may join another world."""
    dist.destroy_process_group()
    parallel_state.destroy_global_memory_buffer()


def seed_dropout(seed: int) -> None:
    """Give Megatron's random state tracker, one a process, its seed. No layer of ours draws from it while training."""
    tensor_parallel.model_parallel_cuda_manual_seed(seed, tp_rank=0, ep_rank=0, etp_rank=0)


def make_process_groups(layout: Layout, timeout_s: float) -> ProcessGroupCollection:
    """Create all groups of ``layout`` over the whole world. Collective: all ranks call it, roles in the same order.

    Args:
        timeout_s: limit on any one collective, in seconds.

    Raises:
        ValueError: the layout does not use exactly the ranks of this world.
    """
    if layout.world != dist.get_world_size():
        raise ValueError(f"layout {layout.describe()} has {layout.world} ranks, the pool has {dist.get_world_size()}")
    made: dict[tuple[tuple[int, ...], ...], dist.ProcessGroup | None] = {}

    def group(*axes: str, of: tuple[int, ...] | None = None) -> dist.ProcessGroup | None:
        """This rank's group over ``axes``, or of some positions in it; equal groups are made once."""
        ranks = [tuple(found) for found in layout.groups(*axes)]
        chosen = tuple(tuple(sorted({found[at] for at in of})) if of else found for found in ranks)
        if chosen not in made:
            timeout = timedelta(seconds=timeout_s)
            groups = [(found, dist.new_group(list(found), timeout=timeout)) for found in chosen]
            made[chosen] = next((one for found, one in groups if dist.get_rank() in found), None)
        return made[chosen]

    groups = ProcessGroupCollection()
    for name in ("tp", "cp", "dp", "pp"):
        setattr(groups, name, group(name))
    groups.mp = group("tp", "pp")
    groups.dp_cp = groups.intra_dp_cp = group("cp", "dp")
    groups.tp_cp = group("tp", "cp")
    groups.tp_dp_cp = group("tp", "cp", "dp")
    groups.intra_dist_opt = dist.group.WORLD
    groups.inter_dist_opt = None
    groups.embd = group("pp", of=(0, -1))  # sums the gradients of a tied embedding: first and last stage
    groups.pos_embd = None
    # Dense models have no experts: Megatron still asks for their groups.
    groups.ep = groups.expt_tp = group()
    groups.tp_ep, groups.tp_ep_pp = groups.tp, groups.mp
    groups.expt_dp = groups.intra_expt_dp = groups.dp_cp
    return groups
