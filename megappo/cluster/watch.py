"""What a process is doing, told by a thread of its own while a call runs or hangs; and the table of all of them.

The driver asks when a time limit expires. A process that is stopped, or whose node is gone, does not answer, which
tells as much. One that waits for others in a collective says so, so that the one they wait for stands out.
"""

from __future__ import annotations

import json
import linecache
import secrets
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

ANSWER_S = 1.0
"""How long an answer may take: the thread that gives it has nothing else to do."""
WAITING = (
    *("torch/distributed/", "megappo/time_limit.py"),
    *("megappo/reshard/gloo.py", "megappo/reshard/nccl.py", "megappo/reshard/shared_memory.py"),
)
"""Where a thread is that waits for other ranks, besides lines that say ``.wait(``."""
OWN = ("megappo/", "megatron/", "vllm/")


class Watch:
    """Answers for this process, as ``(port, token)``; only those who know the token are answered."""

    def __init__(self, log_file: str) -> None:
        """Start the thread.

        Args:
            log_file: of this process; what NCCL has recorded goes beside it.
        """
        self._record = Path(log_file).with_suffix(".nccl.json")
        self._calls: dict[int, tuple[str, float]] = {}  # by thread
        self._socket = socket.create_server(("", 0))
        self.port, self.token = self._socket.getsockname()[1], secrets.token_hex(16)
        threading.Thread(target=self._serve, name="watch", daemon=True).start()

    @contextmanager
    def doing(self, what: str) -> Iterator[None]:
        """This thread is at it while in here."""
        self._calls[threading.get_ident()] = what, time.time()
        try:
            yield
        finally:
            del self._calls[threading.get_ident()]

    def _serve(self) -> None:
        while True:
            peer, _ = self._socket.accept()
            try:
                with peer:
                    peer.settimeout(ANSWER_S)
                    if secrets.compare_digest(peer.recv(64), self.token.encode()):
                        peer.sendall(json.dumps(self._answer()).encode())
            except Exception:  # whatever it is, the next one who asks is to be answered
                traceback.print_exc()

    def _answer(self) -> dict[str, Any]:
        frames = sys._current_frames()
        calls = [(what, since, frames.get(thread)) for thread, (what, since) in list(self._calls.items())]
        if not calls:
            return {}
        what, since, frame = calls[0]
        out = {"what": what, "since": since, **(_where(frame) if frame else {})}
        if active := _nccl_record(self._record):
            out |= {"at": active, "waits": True}
        return out


def _where(frame: FrameType) -> dict[str, Any]:
    """The innermost function of this program or of a library that it is built on, and whether it waits for others."""
    stack: list[FrameType] = []
    at: FrameType | None = frame
    while at is not None:
        stack.append(at)
        at = at.f_back
    waits = any(
        any(sign in f.f_code.co_filename for sign in WAITING)
        or ".wait(" in linecache.getline(f.f_code.co_filename, f.f_lineno)
        for f in stack[:3]
    )
    inner = next((f for f in stack if any(sign in f.f_code.co_filename for sign in OWN)), stack[0])
    place = "/".join(Path(inner.f_code.co_filename).parts[-4:])
    deepest = stack[0].f_code.co_name if stack[0] is not inner else ""
    return {"at": f"{inner.f_code.co_name} ({place}:{inner.f_lineno})", "inner": deepest, "waits": waits}


def _nccl_record(file: Path) -> str:
    """Write what PyTorch's flight recorder has, if anything; returns the collectives that have not ended."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return ""
    text = torch._C._distributed_c10d._dump_nccl_trace_json(includeCollectives=True, onlyActive=False)
    file.write_bytes(text)
    running = _running(json.loads(text).get("entries", ()))
    words = ("profiling_name", "collective_seq_id", "process_group")
    return ", ".join(" ".join(str(entry.get(word, "?")) for word in words) for entry in running[:1])


def _running(entries: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The flight recorder's entries of what has not ended, oldest first.

    Only what torch's watchdog retires is known to go on while it is not. So it is not for:

    - the parts of what was launched as one, which have no events: an entry for the whole follows them;
    - groups without a name, which are the weight sync's pairs: their events are used again by others.
    """
    wholes = {_launch(entry) for entry in entries if entry["profiling_name"].endswith("coalesced")}
    return [
        entry
        for entry in entries
        if entry["state"] in ("scheduled", "started")
        and not entry["retired"]
        and entry["process_group"][0]
        and (entry["profiling_name"].endswith("coalesced") or _launch(entry) not in wholes)
    ]


def _launch(entry: Mapping[str, Any]) -> tuple[Any, ...]:
    """What an entry has in common with all others of the same launch, and with no others."""
    return entry["process_group"][0], entry["collective_seq_id"], entry["p2p_seq_id"]


@dataclass(frozen=True)
class Address:
    """Of a process's :class:`Watch`."""

    host: str
    port: int
    token: str

    def ask(self) -> dict[str, Any] | None:
        """What the process is doing; None if it does not answer."""
        try:
            with socket.create_connection((self.host, self.port), ANSWER_S) as peer:
                peer.settimeout(ANSWER_S)
                peer.sendall(self.token.encode())
                parts = []
                while part := peer.recv(65536):
                    parts.append(part)
            return json.loads(b"".join(parts))
        except (OSError, ValueError):
            return None

    def is_gone(self) -> bool:
        """Whether the process has ended, as far as its node tells."""
        try:
            socket.create_connection((self.host, self.port), ANSWER_S).close()
        except ConnectionRefusedError:
            return True
        except OSError:
            return False
        return False


def wait_until_gone(addresses: Sequence[Address], limit_s: float) -> None:
    """Return once these processes have ended, and with them what they had on their devices; or after the limit."""
    deadline, left = time.monotonic() + limit_s, list(addresses)
    while left and time.monotonic() < deadline:
        left = [address for address in left if not address.is_gone()]
        time.sleep(0.1 if left else 0)


@dataclass(frozen=True)
class Sight:
    """One line of the table."""

    name: str
    doing: str
    late: bool


def look(watches: Mapping[str, Address | None]) -> Sequence[Sight]:
    """Ask all at the same time.

    Args:
        watches: by the name of the process; None where it has not said where it is yet.
    """
    with ThreadPoolExecutor(min(len(watches), 64) or 1) as threads:
        answers = list(threads.map(lambda address: address and address.ask(), watches.values()))
    return [_sight(name, address, answer) for (name, address), answer in zip(watches.items(), answers, strict=True)]


def _sight(name: str, address: Address | None, answer: dict[str, Any] | None) -> Sight:
    if address is None:
        return Sight(name, "has not started", late=True)
    if answer is None:
        return Sight(name, "does not answer: stopped, stuck in native code, or its node is gone", late=True)
    if not answer:
        return Sight(name, "has nothing to do", late=False)
    verb = "waits for others in" if answer.get("waits") else "is in"
    inner = f" < {answer['inner']}" if answer.get("inner") else ""
    since = time.time() - answer["since"]
    return Sight(
        name, f"{answer['what']} for {since:.0f} s; {verb} {answer.get('at', '?')}{inner}", not answer["waits"]
    )
