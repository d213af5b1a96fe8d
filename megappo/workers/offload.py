"""Tensors that leave the device for pinned host memory between the turns of a role, and come back to the same objects.

Copies run on a stream of their own. What comes back is waited for part by part: the optimizer's state still travels
while the forward and backward passes compute. What leaves travels while the next role comes in, if the device has room
for both. Only what has to move moves: a part that has not changed since it last left is just dropped, and gradients,
which every step begins with zeros, never travel.

On the CPU the same happens without streams: memory is given up, and filled again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch

Tensors = Callable[[], Iterable[torch.Tensor]]
"""Asked whenever they leave, since an optimizer makes its state late."""
_leaving: list[Part] = []
"""Parts of any role in this process whose copies to the host are under way; they still hold their device memory."""
_streams: list[torch.cuda.Stream] = []
"""The stream of copies, once there is one."""


class Part:
    """Some tensors of a role that leave and come back together."""

    def __init__(self, tensors: Tensors, *, keep: bool = True) -> None:
        """Nothing moves yet.

        Args:
            tensors: the tensors as they are when they leave; views of one storage count once.
            keep: whether the values are wanted again; else what comes back is uninitialised.
        """
        self._tensors, self._keep = tensors, keep
        self._away: list[tuple[torch.UntypedStorage, int]] = []  # with the size that each had
        self._host: torch.Tensor | None = None
        self._done: torch.cuda.Event | None = None

    @property
    def is_here(self) -> bool:
        """Whether the tensors can be used, after :meth:`wait`."""
        return not self._away

    def leave(self, *, changed: bool = True) -> None:
        """Start to give up the device's memory; :func:`settle` ends it.

        Args:
            changed: whether the values may differ from those that left last.
        """
        if not self.is_here:
            return
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in self._tensors()}
        self._away = [(storage, storage.nbytes()) for storage in storages.values() if storage.nbytes()]
        size = sum(size for _, size in self._away)
        if size == 0:  # a role that does not train has no optimizer; nothing cannot be page-locked
            return
        fresh = self._keep and (self._host is None or self._host.nbytes != size)
        if fresh:
            _unpin(self._host)
            self._host = pinned(size, "what a role offloads", ", or set its offload to none")
        with _copying():
            if self._keep and (changed or fresh):
                for on_device, on_host in self._pairs():
                    on_host.copy_(on_device, non_blocking=True)
            self._done = _event()
        _leaving.append(self)

    def come_back(self) -> None:
        """Take device memory and start to fill it; :meth:`wait` before the tensors are used."""
        if self.is_here:
            return
        if self in _leaving:
            _leaving.remove(self)  # its memory was not given up yet
        else:
            if _leaving and sum(size for _, size in self._away) > _room():
                settle()
            for storage, size in self._away:
                storage.resize_(size)
            with _copying():
                for on_device, on_host in self._pairs():
                    on_device.copy_(on_host, non_blocking=True)
                self._done = _event()
        self._away = []

    def wait(self) -> None:
        """Let the current stream wait until the tensors are there."""
        if self._done is not None:
            torch.cuda.current_stream().wait_event(self._done)
            self._done = None

    def release(self) -> None:
        """Give up the memory of what leaves, once its copies are done."""
        if self._done is not None:
            self._done.synchronize()
            self._done = None
        for storage, _ in self._away:
            storage.resize_(0)

    def _pairs(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """(bytes on the device, their place on the host) of each storage; nothing if values are not kept."""
        if self._host is None:
            return
        begin = 0
        for storage, size in self._away:
            on_device = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
            yield on_device, self._host[begin : begin + size]
            begin += size


class Residence:
    """Which parts of a role are on the device: all while it works, what ``level`` leaves there while it rests.

    Args:
        level: "none", "optimizer" (gradients and optimizer state go) or "all" (weights too).
        weights, gradients, optimizer: the tensors; the last two are empty for a role that does not train.
        frozen: weights that stay what they are, and travel to the host but once.
    """

    def __init__(
        self, level: str, weights: Tensors, gradients: Tensors, optimizer: Tensors, frozen: Tensors | None = None
    ) -> None:
        self._level = level
        self._weights, self._optimizer = Part(weights), Part(optimizer)
        self._frozen = None if frozen is None else Part(frozen)
        self._gradients = Part(gradients, keep=False)
        self._changed = True  # since the weights and the optimizer's state left last

    def work(self, *, training: bool) -> None:
        """Bring what a turn needs: the weights at once, what only an optimizer step needs by :meth:`before_step`."""
        self._weights.come_back()
        if self._frozen:
            self._frozen.come_back()
        if training:
            self._changed = True
            self._gradients.come_back()
            self._optimizer.come_back()
        settle()  # activations may need the room of what left before
        self._weights.wait()
        if self._frozen:
            self._frozen.wait()
        self._gradients.wait()

    def before_step(self) -> None:
        """The optimizer's state is needed from here on."""
        self._optimizer.wait()

    def rest(self, *, keep_weights: bool = False) -> None:
        """Start to give up what the level says.

        Args:
            keep_weights: others are about to read them.
        """
        if self._level == "none":
            return
        self._gradients.leave()
        self._optimizer.leave(changed=self._changed)
        if self._level == "all" and not keep_weights:
            self._weights.leave(changed=self._changed)
            self._changed = False
            if self._frozen:
                self._frozen.leave(changed=False)


def settle() -> None:
    """Wait for everything that leaves, and free its memory."""
    while _leaving:
        _leaving.pop().release()


def _room() -> int:
    """Bytes that this process could allocate now."""
    if not torch.cuda.is_available():
        return 0
    free, _ = torch.cuda.mem_get_info()
    return free + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()


def pinned(size: int, what: str, way_out: str = "") -> torch.Tensor:
    """Page-locked host memory; torch's own allocator would round its size up to a power of two.

    Args:
        size: bytes.
        what: waits there, in words.
        way_out: beside a node that allows more.

    Raises:
        MemoryError: the system does not give it.
    """
    host = torch.empty(size, dtype=torch.uint8)
    if torch.cuda.is_available():
        status = torch.cuda.cudart().cudaHostRegister(host.data_ptr(), size, 0)
        if int(status) != 0:
            raise MemoryError(
                f"{what}: {size / 2**30:.1f} GiB of host memory could not be page-locked (CUDA error {int(status)}): "
                f"raise the node's limit on locked memory (ulimit -l){way_out}"
            )
    return host


def _unpin(host: torch.Tensor | None) -> None:
    if host is not None and torch.cuda.is_available():
        torch.cuda.cudart().cudaHostUnregister(host.data_ptr())


@contextmanager
def _copying() -> Iterator[None]:
    """Work in here goes to the stream of copies, after all that the current stream was given so far."""
    if not torch.cuda.is_available():
        yield
        return
    if not _streams:
        _streams.append(torch.cuda.Stream())
    _streams[0].wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(_streams[0]):
        yield


def _event() -> torch.cuda.Event | None:
    return torch.cuda.current_stream().record_event() if torch.cuda.is_available() else None
