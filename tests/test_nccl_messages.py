"""Messages between GPUs with NCCL played on the CPU; tests/test_gpu_transports.py has the real one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megappo.reshard import nccl
from megappo.reshard.copies import Copy
from megappo.reshard.gloo import host_store
from megappo.reshard.messages import Message
from megappo.reshard.transfer import KeptBlocks
from megappo.reshard.transport import Blocks, TransferError

LIMIT_S = 10.0


def transport(
    pair: Any, direct_bytes: int = 1024, rank: int = 0, limit_s: float = LIMIT_S, store: Any = None
) -> nccl.NcclTransport:
    """A rank's, with a played communicator to rank 1, if any."""
    gloo = SimpleNamespace(timeout_s=limit_s, describe="rank {}".format, rank=rank, store=store)
    made = nccl.NcclTransport(gloo, direct_bytes, torch.device("cpu"))  # type: ignore[arg-type]
    if pair is not None:
        made._pairs[1] = pair
    return made


class Post:
    """A communicator of two whose messages arrive at once: what one end sends, its other end receives."""

    def __init__(self) -> None:
        self.mail: list[torch.Tensor] = []
        self.pieces: list[torch.Tensor] = []

    def _start_coalescing(self) -> None:
        self.pieces.clear()

    def _end_coalescing(self) -> Post:
        return self

    def send(self, pieces: list[torch.Tensor], *_: int) -> None:
        self.pieces += pieces
        self.mail += [piece.clone() for piece in pieces]

    def recv(self, pieces: list[torch.Tensor], *_: int) -> None:
        self.pieces += pieces
        for piece in pieces:
            piece.copy_(self.mail.pop(0))

    def wait(self) -> None: ...

    def is_completed(self) -> bool:
        return True


def carry(pair: Post, sender: nccl.NcclTransport, sent: Blocks, receiver: nccl.NcclTransport, found: Blocks) -> None:
    sender.send(sent, 1).wait()
    receiver.receive(found, 1).wait()
    for end in (sender, receiver):
        end.finish()
        assert not end.unfinished
    assert not pair.mail


def strided(rows: int, columns: int) -> torch.Tensor:
    """A block that does not lie in one piece."""
    return torch.zeros(columns, rows).T


def test_blocks_arrive_however_they_lie() -> None:
    """Small ones, large ones in one piece, and large ones that lie so at one end only; later syncs as the first."""
    pair = Post()
    ends = transport(pair, 256), transport(pair, 256)
    sent = Blocks([torch.zeros(3), torch.zeros(2, 5), torch.zeros(16, 8), strided(9, 8), torch.zeros(8, 16)])
    found = Blocks([torch.zeros(3), strided(2, 5), strided(16, 8), torch.zeros(9, 8), torch.zeros(8, 16)])
    for _ in range(3):
        for block in sent:
            block.normal_()
        carry(pair, ends[0], sent, ends[1], found)
        for wanted, block in zip(sent, found, strict=True):
            torch.testing.assert_close(block, wanted, rtol=0, atol=0)
        assert [piece.nbytes for piece in pair.pieces] == [4 * (3 + 10), 4 * 128, 4 * 72, 4 * 128]
        assert pair.pieces[-1].data_ptr() == found[4].data_ptr()  # straight into the parameter
    assert len(ends[0]._packings) == 1
    del sent
    assert not ends[0]._packings


def test_blocks_are_kept_as_long_as_parameters_keep_their_storage() -> None:
    message = Message(0, 1, (Copy(0, "w", (1,), 1, "v", (0,), (2,), "w"),))
    params, kept = {"w": torch.arange(4.0)}, KeptBlocks(0, [message])
    blocks = kept.of(params)(message)
    assert blocks[0].tolist() == [1, 2]
    storage = params["w"].untyped_storage()
    storage.resize_(0)  # it leaves the device, and comes back
    storage.resize_(16)
    params["w"].fill_(7)
    assert kept.of(params)(message) is blocks and blocks[0].tolist() == [7, 7]
    for moved in (torch.arange(4.0), torch.arange(8.0)[:4], torch.arange(8.0)[::2]):
        params["w"] = moved
        assert kept.of(params)(message)[0].tolist() == moved[1:3].tolist()
    further = torch.arange(8.0)
    for params["w"] in (further[:4], further[4:]):
        assert kept.of(params)(message)[0].tolist() == params["w"][1:3].tolist()


class Clock:
    """Time that passes by sleeping only."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class Unending:
    """A communicator of two, and the work that it gives: launched, and never done."""

    aborted = False

    def _start_coalescing(self) -> None: ...

    def _end_coalescing(self) -> Unending:
        return self

    def send(self, *_: Any) -> None: ...

    recv = wait = send

    def is_completed(self) -> bool:
        return False

    def abort(self) -> None:
        self.aborted = True


class Failing(Unending):
    """As NCCL: that its work failed is known once that is done with."""

    done = False

    def is_completed(self) -> bool:
        self.done = True
        return True

    def wait(self) -> None:
        if self.done:
            raise torch.distributed.DistBackendError("remote process exited")


def test_a_failure_is_heard_before_others_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl, "time", Clock())
    end = transport(Failing())
    end._pairs[2] = Unending()
    for peer in (1, 2):
        end.receive(Blocks([torch.zeros(8)]), peer).wait()
    with pytest.raises(TransferError, match="rank 1 sent nothing and is gone"):
        end.finish()


def test_between_gpus_a_receiver_is_heard_before_its_sender(monkeypatch: pytest.MonkeyPatch) -> None:
    """It knows who is late: with neither done, its error comes first, and both come in time. NCCL is played."""
    ended = {}
    for verb, failed in (("receive", "sent nothing"), ("send", "took nothing")):
        clock, pair = Clock(), Unending()
        monkeypatch.setattr(nccl, "time", clock)
        end = transport(pair)
        getattr(end, verb)(Blocks([torch.zeros(8)]), 1).wait()
        with pytest.raises(TransferError, match=f"rank 1 {failed} within {LIMIT_S:g} s"):
            end.finish()
        assert pair.aborted
        ended[verb] = clock.now
    assert LIMIT_S <= ended["receive"] < 1.01 * LIMIT_S < ended["send"] < 1.1 * LIMIT_S


def test_a_peer_that_never_comes_is_named_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a communicator is made, which waits without a limit. The meeting point is real."""
    made: list[tuple[int, int]] = []

    def make(store: Any, rank: int, world: int, options: Any) -> Post:
        made.append((rank, world))
        return post

    make.Options = SimpleNamespace  # type: ignore[attr-defined]
    monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", make, raising=False)
    post, point = Post(), host_store("127.0.0.1", 60)
    ends = [transport(None, rank=rank, limit_s=limit_s, store=point) for rank, limit_s in ((4, 0.2), (2, 60.0))]
    for verb, failed in (("receive", "sent nothing"), ("send", "took nothing")):
        with pytest.raises(TransferError, match=f"^rank 2 {failed} within 0.2 s$"):
            getattr(ends[0], verb)(Blocks([torch.ones(8)]), 2)
        assert not made
    found = Blocks([torch.zeros(8)])
    ends[1].send(Blocks([torch.ones(8)]), 4).wait()
    ends[0].receive(found, 2).wait()
    assert found[0].tolist() == [1] * 8 and made == [(0, 2), (1, 2)]


def test_a_meeting_point_that_is_gone_is_named() -> None:
    point = host_store("127.0.0.1", 60)
    member = torch.distributed.TCPStore("127.0.0.1", point.port, is_master=False, wait_for_workers=False)
    end = transport(None, store=member)
    del point
    with pytest.raises(TransferError, match="rank 2 sent nothing, and the meeting point of all ranks is gone"):
        end.receive(Blocks([torch.ones(8)]), 2)
