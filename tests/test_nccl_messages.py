"""Messages between GPUs with NCCL played on the CPU; tests/test_gpu_transports.py has the real one."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
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
    pair: Any, direct_bytes: int = 1024, rank: int = 0, limit_s: float = LIMIT_S, store: Any = None, peers: int = 1
) -> nccl.NcclTransport:
    """A rank's, with a played communicator to rank 1, if any."""
    gloo = SimpleNamespace(timeout_s=limit_s, describe="rank {}".format, rank=rank, store=store)
    made = nccl.NcclTransport(gloo, direct_bytes, torch.device("cpu"), peers)  # type: ignore[arg-type]
    if pair is not None:
        made._pairs |= {(1, "send"): pair, (1, "recv"): pair}
    return made


class Post:
    """A communicator of two whose messages arrive at once: what one end sends, its other end receives."""

    def __init__(self) -> None:
        self.connected = 0
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

    def synchronize(self) -> None: ...

    def wait(self) -> None: ...

    def is_completed(self) -> bool:
        return True

    def eager_connect_single_device(self, device: torch.device) -> None:
        self.connected += 1


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

    recv = synchronize = eager_connect_single_device = send

    def wait(self) -> None:
        raise AssertionError("waits on the host, without our limit")

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
        assert self.done
        raise torch.distributed.DistBackendError("remote process exited")


def test_a_failure_is_heard_before_others_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl, "time", Clock())
    failing, other = Failing(), Unending()
    end = transport(failing)
    end._pairs[2, "recv"] = other
    for peer in (1, 2):
        end.receive(Blocks([torch.zeros(8)]), peer).wait()
    with pytest.raises(TransferError, match="rank 1 sent nothing and is gone"):
        end.finish()
    end.abort()
    assert failing.aborted and other.aborted and not end.unfinished and not end._pairs


class Clinging(Failing):
    """As NCCL may: the communicator of what failed cannot be ended, and whoever asks what went wrong waits for that."""

    def wait(self) -> None:
        threading.Event().wait()


def test_a_failure_is_heard_though_its_communicator_cannot_be_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl, "ABORT_S", 0.1)
    end = transport(Clinging())
    end.receive(Blocks([torch.zeros(8)]), 1).wait()
    with pytest.raises(TransferError, match=r"rank 1 sent nothing and is gone \(.* within 0.1 s\)"):
        end.finish()


def test_between_gpus_a_receiver_is_heard_before_its_sender(monkeypatch: pytest.MonkeyPatch) -> None:
    """It knows who is late: with neither done, its error comes first, and both come in time. NCCL is played."""
    ended = {}
    for verb, failed in (("receive", "sent nothing"), ("send", "took nothing")):
        clock = Clock()
        monkeypatch.setattr(nccl, "time", clock)
        end = transport(Unending())
        getattr(end, verb)(Blocks([torch.zeros(8)]), 1).wait()
        with pytest.raises(TransferError, match=f"rank 1 {failed} within {LIMIT_S:g} s"):
            end.finish()
        ended[verb] = clock.now
    assert LIMIT_S <= ended["receive"] < 1.01 * LIMIT_S < ended["send"] < 1.1 * LIMIT_S


def test_the_host_does_not_run_so_far_ahead_that_a_launch_would_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl, "time", Clock())
    end = transport(Unending())
    for _ in range(nccl.AHEAD):
        end.send(Blocks([torch.zeros(8)]), 1).wait()
    with pytest.raises(TransferError, match=f"rank 1 took nothing within {LIMIT_S:g} s"):
        end.send(Blocks([torch.zeros(8)]), 1).wait()


def test_beside_other_transports_the_host_sees_each_message_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    """These wait for the stream, which a lost peer would hold up without a limit."""
    clock = Clock()
    monkeypatch.setattr(nccl, "time", clock)
    end = transport(Unending())
    end.ahead = 0
    with pytest.raises(TransferError, match="rank 1 sent nothing within 10 s"):
        end.receive(Blocks([torch.zeros(8)]), 1).wait()


class Breaking(Unending):
    """It takes no message, and notes whether what was opened is closed again."""

    opened = 0

    def _start_coalescing(self) -> None:
        self.opened += 1

    def _end_coalescing(self) -> Unending:
        self.opened -= 1
        return self

    def send(self, *_: Any) -> None:
        raise torch.distributed.DistBackendError("no such device")


def test_a_launch_that_fails_holds_nothing_else_back() -> None:
    pair = Breaking()
    with pytest.raises(TransferError, match=r"rank 1 took nothing and is gone \(no such device\)"):
        transport(pair).send(Blocks([torch.zeros(8)]), 1)
    assert pair.opened == 0


# --- meeting, with a real meeting point ------------------------------------------------------------------------------


Play = Callable[[Any], list[tuple[int, int, int | None]]]


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> Play:
    """Play the making of communicators: gives the rank, the size and the most channels of each that is made."""

    def play(pair: Any) -> list[tuple[int, int, int | None]]:
        made: list[tuple[int, int, int | None]] = []

        def make(store: Any, rank: int, world: int, options: Any) -> Any:
            assert os.environ["TORCH_NCCL_BLOCKING_WAIT"] == "1", "its watchdog would end the process"
            made.append((rank, world, options.config.max_ctas))
            return pair

        make.Options = lambda: SimpleNamespace(config=SimpleNamespace(max_ctas=None))  # type: ignore[attr-defined]
        monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", make, raising=False)
        return made

    return play


def test_a_peer_that_never_comes_is_named_in_time(played: Play) -> None:
    """Before a communicator is made, which waits without a limit."""
    post, point = Post(), host_store("127.0.0.1", 60)
    made = played(post)
    ends = [transport(None, rank=rank, limit_s=limit_s, store=point) for rank, limit_s in ((4, 0.2), (2, 60.0))]
    for verb, failed in (("receive", "sent nothing"), ("send", "took nothing")):
        with pytest.raises(TransferError, match=f"^rank 2 {failed} within 0.2 s$"):
            getattr(ends[0], verb)(Blocks([torch.ones(8)]), 2)
        assert not made
    found = Blocks([torch.zeros(8)])
    for _ in range(2):
        ends[1].send(Blocks([torch.ones(8)]), 4).wait()
        ends[0].receive(found, 2).wait()
    assert (
        found[0].tolist() == [1] * 8 and made == [(0, 2, None), (1, 2, None)] and post.connected == 2 and not post.mail
    )
    assert "TORCH_NCCL_BLOCKING_WAIT" not in os.environ


def test_both_ends_give_a_pair_the_channels_of_the_one_with_more_peers(played: Play) -> None:
    post, point = Post(), host_store("127.0.0.1", 60)
    made = played(post)
    ends = [transport(None, rank=rank, store=point, peers=peers) for rank, peers in ((2, 8), (4, 19))]
    point.set("megappo-nccl/2-4/here/4", "19")
    ends[0].send(Blocks([torch.ones(8)]), 4).wait()
    ends[1].receive(Blocks([torch.zeros(8)]), 2).wait()
    assert made == [(0, 2, 3), (1, 2, 3)]


def test_both_ways_between_two_ranks_are_one_communicator(played: Play) -> None:
    post, point = Post(), host_store("127.0.0.1", 60)
    made = played(post)
    ends = {rank: transport(None, rank=rank, store=point) for rank in (2, 4)}
    point.set("megappo-nccl/2-4/here/4", "1")
    for source, destination in ((2, 4), (4, 2)):
        found = Blocks([torch.zeros(8)])
        ends[source].send(Blocks([torch.ones(8)]), destination).wait()
        ends[destination].receive(found, source).wait()
        assert found[0].tolist() == [1] * 8
    assert len(made) == 2 and post.connected == 2


class Stuck(Unending):
    """Its other end has come, and stopped."""

    def eager_connect_single_device(self, device: torch.device) -> None:
        threading.Event().wait()

    def abort(self) -> None:
        threading.Event().wait()


def test_a_peer_that_stops_while_ranks_connect_is_named_in_time(played: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl, "ABORT_S", 0.1)
    point = host_store("127.0.0.1", 60)
    point.set("megappo-nccl/0-2/here/2", "1")
    played(Stuck())
    end = transport(Stuck(), limit_s=0.2, store=point)
    with pytest.raises(TransferError, match=r"^rank 2 took nothing within 0.2 s$"):
        end.send(Blocks([torch.ones(8)]), 2)
    other = Unending()
    end._pairs[7, "send"] = other
    end.abort()  # nor does it wait for what cannot be ended, which keeps no other
    assert other.aborted


def test_a_meeting_point_that_is_gone_is_named() -> None:
    point = host_store("127.0.0.1", 60)
    member = torch.distributed.TCPStore("127.0.0.1", point.port, is_master=False, wait_for_workers=False)
    end = transport(None, store=member)
    del point
    with pytest.raises(TransferError, match="rank 2 sent nothing, and the meeting point of all ranks is gone"):
        end.receive(Blocks([torch.ones(8)]), 2)
