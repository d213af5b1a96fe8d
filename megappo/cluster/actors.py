"""The Ray actors: thin shells around :mod:`megappo.workers` that fetch their rows and leave results in the store."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import ray

from megappo.cluster.calls import Timed
from megappo.cluster.dataflow import Selection, TableRef, put_table
from megappo.cluster.watch import Address, Watch
from megappo.fit.devices import Device
from megappo.host_memory import host_memory
from megappo.stack import Wanted, problems
from megappo.workers.lifetime import end_with_parent


def timed(method: Callable[..., Any]) -> Callable[..., Timed]:
    """Return when the method ran beside its value, or beside its own traceback, free of Ray's frames."""

    @functools.wraps(method)
    def run(*args: Any, **kwargs: Any) -> Timed:
        began = time.time()
        role = next((f" {arg}" for arg in args[1:2] if isinstance(arg, str)), "")  # or the method of an engine
        try:
            with args[0].watch.doing(f"{method.__name__}{role}"):
                value = method(*args, **kwargs)
            return Timed(value, began, time.time(), device_memory_gib=_device_memory_gib())
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException:  # torch's checkpoint errors are no Exceptions
            text = traceback.format_exc()
            print(text, file=sys.stderr, flush=True)
            return Timed(None, began, time.time(), failure=text)

    return run


def apart(method: Callable[..., tuple[pa.Table, Any]]) -> Callable[..., tuple[pa.Table | None, Timed]]:
    """Return the table that the method gives by itself, beside all else as :func:`timed` has it.

    It stays in this node's store, but is the caller's: it outlives this process, which one that it puts there does not.
    """
    watched = timed(ray.method(num_returns=2)(method))

    @functools.wraps(method)
    def run(*args: Any, **kwargs: Any) -> tuple[pa.Table | None, Timed]:
        done = watched(*args, **kwargs)
        table, rest = done.value or (None, None)
        return table, replace(done, value=rest)

    return run


def _device_memory_gib() -> float | None:
    """What all processes together have taken of this process's first device; None where it computes on none."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return None
    free, total = torch.cuda.mem_get_info()
    return (total - free) / 2**30


def _node() -> tuple[str, int]:
    """This node in words, and bytes of its memory."""
    return f"node {ray.util.get_node_ip_address()}", host_memory()


class LoggedProcess:
    """A process whose chatter, and that of the libraries in it, goes to a file of its own."""

    def __init__(self, log_file: str) -> None:
        end_with_parent()
        Path(log_file).parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
            os.dup2(descriptor, stream.fileno())
        self.watch = Watch(log_file)

    @timed
    def whereabouts(self) -> tuple[Address, str]:
        """(where this process tells what it is doing, the device indices that it was given)."""
        address = Address(ray.util.get_node_ip_address(), self.watch.port, self.watch.token)
        return address, os.environ.get("CUDA_VISIBLE_DEVICES", "")

    @timed
    def stack_problems(self, wanted: Sequence[Wanted]) -> list[str]:
        """What this process's environment lacks of packages that it is about to import."""
        return problems(wanted)


class MegatronProcess(LoggedProcess):
    """One device of a pool, hosting every Megatron role of the pool."""

    def __init__(self, log_file: str) -> None:
        super().__init__(log_file)
        self.roles: dict[str, Any] = {}
        self.senders: dict[str, Any] = {}
        self.stores: list[Any] = []

    @timed
    def host_store(self, timeout_s: float) -> tuple[str, int]:
        """Open a meeting point for process groups here.

        The first, the world's, lives as long as this process; another, until there is one in its place.
        """
        from megappo.reshard.gloo import host_store

        host = ray.util.get_node_ip_address()
        self.stores = [*self.stores[:1], host_store(host, timeout_s)]
        return host, self.stores[-1].port

    @timed
    def join(self, rank: int, world: int, host: str, port: int, timeout_s: float, seed: int) -> Device:
        """Join the pool's process group; returns this device."""
        import torch

        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        from megappo.models.process_groups import init_world, seed_dropout

        init_world(rank, world, host, port, timeout_s)
        seed_dropout(seed)
        if not torch.cuda.is_available():
            return Device("cpu")
        free, total = torch.cuda.mem_get_info()
        return Device(torch.cuda.get_device_name(), total, free, *_node())

    @timed
    def build(self, role: str, settings: Any) -> None:
        """Build a role and load its weights."""
        from megappo.workers.megatron_role import MegatronRole

        self.roles[role] = MegatronRole(settings)
        self._rest(role)
        self._settle()

    @timed
    def score(self, role: str, method: str, rows: Selection, options: Mapping[str, Any]) -> TableRef | None:
        """Run one of the role's per-token methods on this rank's rows."""
        table = getattr(self.roles[role], method)(rows.read(), **options)
        self._rest(role)
        return None if table is None else put_table(table)

    @timed
    def update(
        self, role: str, rows: Selection, mini_batches: Sequence[Any], objective: Any, learning_rate: float
    ) -> dict[str, float] | None:
        """Train the role on this rank's part of each mini-batch."""
        metrics = self.roles[role].update(rows.read(), mini_batches, objective, learning_rate)
        self._rest(role, keep_weights=role in self.senders)
        return metrics

    @timed
    def save(self, role: str, folder: str) -> None:
        """Write the role's part of a checkpoint."""
        self.roles[role].save(folder)
        self._rest(role)

    @timed
    def load(self, role: str, folder: str) -> None:
        """Read the role's part of a checkpoint."""
        self.roles[role].load(folder)
        self._rest(role, keep_weights=role in self.senders)

    @timed
    def rest(self, role: str) -> None:
        """Move to the host what the role leaves there, weights included, and wait until the devices have room again."""
        self._rest(role)
        self._settle()

    @timed
    def settle(self) -> None:
        """Wait until what roles moved to the host is there, and leave its room to other processes."""
        self._settle()

    def _rest(self, role: str, *, keep_weights: bool = False) -> None:
        self.roles[role].residence.rest(keep_weights=keep_weights)

    def _settle(self) -> None:
        import torch

        from megappo.workers.offload import settle

        settle()
        if torch.cuda.is_available():
            torch.cuda.ipc_collect()  # memory that engines had mapped
            torch.cuda.empty_cache()

    @timed
    def join_transfer(self, role: str, transfer: Any, meeting: Any) -> tuple[int, Any]:
        """Join the transfer group as a sender; returns the rank there and its fingerprint of the plan."""
        from megappo.workers.weight_sender import WeightSender

        self.senders[role] = WeightSender(self.roles[role], transfer, meeting)
        endpoint = self.senders[role].endpoint
        return endpoint.rank, endpoint.fingerprint

    @timed
    def share_weights(self, role: str) -> Any:
        """The weights for engines on this device to map."""
        return self.senders[role].share()

    @timed
    def weight_sums(self, role: str, version: int) -> Any:
        """Checksums that engines should find in mapped weights."""
        return self.senders[role].sums(version)

    @timed
    def send_weights(self, role: str, version: int) -> int:
        """Take part in a weight sync; returns the bytes sent."""
        return self.senders[role].send(version)


CONTROL = "control"
"""Ray's name of the threads beside the one that draws."""

_DEVICES = """
import json, torch
for index in range(torch.cuda.device_count()):
    free, total = torch.cuda.mem_get_info(index)
    print(json.dumps([torch.cuda.get_device_name(index), total, free]))
"""


class RolloutProcess(LoggedProcess):
    """One vLLM engine."""

    def __init__(self, log_file: str) -> None:
        super().__init__(log_file)
        self.engine: Any = None

    @timed
    def devices(self) -> list[Device]:
        """This engine's devices, asked for in a process that ends: vLLM wants to be the first to use them here."""
        lines = subprocess.run([sys.executable, "-c", _DEVICES], stdout=subprocess.PIPE, text=True, check=True).stdout
        return [Device(name, total, free, *_node()) for name, total, free in map(json.loads, lines.splitlines())]

    @timed
    def build(self, settings: Any) -> None:
        """Start the engine."""
        from megappo.workers.rollout_engine import RolloutEngine

        self.engine = RolloutEngine(settings)

    @apart
    def generate(
        self, rows: Selection, sampling: Any, seed: int, version: int
    ) -> tuple[pa.Table, tuple[Sequence[str], np.ndarray]]:
        """Generate for some rows: the results, in their order; and the results' columns, and each response's length."""
        from megappo.data import batch

        with self._dying_whole():
            table = self.engine.generate(rows.read(), sampling, seed, version)
        return table, (tuple(table.column_names), batch.lengths(table, "response_ids"))

    @timed
    def call(self, method: str, *args: Any) -> Any:
        """Any other method of the engine."""
        with self._dying_whole():
            return getattr(self.engine, method)(*args)

    @contextmanager
    def _dying_whole(self) -> Iterator[None]:
        """When one of vLLM's processes has died, die too: the driver then sees a dead engine, and replaces it."""
        try:
            yield
        except Exception:
            if self.engine is not None and self.engine.is_broken:
                traceback.print_exc()
                sys.stderr.flush()
                os._exit(1)
            raise


class StreamingProcess(RolloutProcess):
    """An engine that is asked for responses, and told to stop, while it draws.

    ``wait`` and ``stop`` are to be called in the concurrency group :data:`CONTROL`: they run beside what draws.
    """

    concurrency_groups: ClassVar[dict[str, int]] = {CONTROL: 2}

    @timed
    def build(self, settings: Any) -> None:
        """Start the engine."""
        from megappo.workers.rollout_engine import RolloutEngine
        from megappo.workers.stream import Stream

        self.engine = RolloutEngine(settings)
        self.turns = Stream(self.engine)

    @timed
    def stream(self, turn: int, rows: Selection, sampling: Any, seed: int, version: int) -> pa.Table:
        """See :meth:`megappo.workers.stream.Stream.run`."""
        with self._dying_whole():
            return self.turns.run(turn, rows.read(), sampling, seed, version)

    @timed
    def wait(self, turn: int, ids: Sequence[int]) -> pa.Table:
        """See :meth:`megappo.workers.stream.Stream.wait`."""
        return self.turns.wait(turn, ids)

    @timed
    def stop(self, turn: int) -> None:
        """See :meth:`megappo.workers.stream.Stream.stop`."""
        self.turns.stop(turn)


class RewardProcess(LoggedProcess):
    """Decodes responses and has the reward functions run, in processes of their own."""

    def __init__(self, log_file: str) -> None:
        super().__init__(log_file)
        self.log_file = log_file

    @timed
    def build(self, tokenizer_folder: str, settings: Any, sources: Sequence[str]) -> None:
        """Resolve the reward functions; every data source must have a reward."""
        from megappo.rewards.functions import FunctionScorer

        self.scorer = FunctionScorer(tokenizer_folder, settings, sources, self.log_file)

    @timed
    def run_functions(self, rows: Selection) -> TableRef:
        """Score responses; see :meth:`megappo.rewards.functions.FunctionScorer.score`."""
        return put_table(self.scorer.score(rows.read()))
