"""How NCCL's communicators share a device: their channels, and the memory that they take there beside torch's.

Standard library only. Seen between two H200 of one host, NCCL with its defaults.
"""

from __future__ import annotations

from megappo.layout.mesh import Layout

MIB = 1 << 20

LIBRARY = 340 * MIB
"""NCCL's own code, in each process that uses it."""

GROUP = 870 * MIB
"""A group of ranks that reduce or gather together."""

NEIGHBOUR = 385 * MIB
"""What a pipeline stage exchanges with the next one takes beyond that (twice as much with two chunks a stage)."""

CHANNELS = 32
"""What NCCL takes between two GPUs of a host, if it may."""
SHARED = 64
"""Of one rank, over all its peers in the weight sync. Two peers at a time can have all that there are."""
LEAST = 2

PAIR, SENDING, RECEIVING = 4 * MIB, 8 * MIB, 16 * MIB
"""A communicator of two, and each of its channels, at either end (32, 16 and 8 channels: 260, 132 and 68 MiB to send,
516, 260 and 132 to receive)."""


def with_library(*processes: int) -> int:
    """Bytes on a device, of what its processes' communicators take: each that has any has NCCL's code as well."""
    return sum(LIBRARY + own for own in processes if own)


def pair_channels(peers: int) -> int:
    """Channels to each peer, so that a rank's communicators are bounded however many ranks it talks to: a receiver's
    take 0.5 GiB for one peer, 1 GiB for two to 32, and 36 MiB a peer beyond."""
    return max(min(CHANNELS, SHARED // max(peers, 1)), LEAST)


def pair_memory(peers: int, *, receives: bool) -> int:
    """Bytes of a rank's communicators in the weight sync."""
    return peers * (PAIR + pair_channels(peers) * (RECEIVING if receives else SENDING))


def group_memory(layout: Layout, *, trained: bool) -> int:
    """Bytes of a role's communicators on each of its devices.

    Seen at tp2, pp2 and pp2 with two chunks a stage: 874, 1,258 and 1,640 MiB.

    Args:
        trained: replicas talk about gradients, and all parts of a model about their norm.
    """
    split = (layout.tp > 1) + (layout.pp > 1)
    groups = split + trained * ((layout.dp * layout.cp > 1) + (split > 1))
    neighbours = min(layout.pp - 1, 2) * (1 + (layout.vpp > 1))
    return groups * GROUP + neighbours * NEIGHBOUR
