"""Point-to-point messages over gloo, in a group of its own that leaves every other process group alone."""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist


def host_store(host: str, timeout_s: float) -> dist.TCPStore:
    """Open a meeting point for process groups on this host, at a free port (``.port``)."""
    return dist.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout_s))


class GlooTransport:
    """Sends and receives of byte tensors on the CPU between the ranks of one transfer group.

    Creating it is collective: it returns once all ``world`` ranks have come.
    """

    def __init__(self, host: str, port: int, rank: int, world: int, timeout_s: float) -> None:
        """Join.

        Args:
            host, port: of a :func:`host_store`.
            rank, world: in the transfer group.
            timeout_s: limit on joining and on each message, in seconds.
        """
        timeout = timedelta(seconds=timeout_s)
        store = dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)
        self.rank = rank
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._timeout = timeout
        # Left to itself gloo binds to what the host's own name resolves to, which on many machines is the loopback.
        options._devices = [gloo.create_device(hostname=_own_address(host, port))]
        self.group: Any = gloo(dist.PrefixStore("megappo-transfer", store), rank, world, options)

    def send(self, data: torch.Tensor, to: int) -> Any:
        """Start sending a contiguous CPU tensor; ``.wait()`` on what comes back before reusing it."""
        return self.group.send([data.view(-1).view(torch.uint8)], to, 0)

    def receive(self, data: torch.Tensor, source: int) -> Any:
        """Start receiving into a contiguous CPU tensor; ``.wait()`` on what comes back before reading it."""
        return self.group.recv([data.view(-1).view(torch.uint8)], source, 0)


def _own_address(host: str, port: int) -> str:
    """The address of this machine on the way to another."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))  # sends nothing
        return probe.getsockname()[0]
