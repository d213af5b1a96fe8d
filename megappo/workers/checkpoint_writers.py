"""The processes that write a rank's files of a checkpoint.

Megatron waits without end for one that was killed (when the host had no memory left, say), and of an error in one keeps
what torch's archive said of it, not what the disk did.
"""

from __future__ import annotations

import gc
import multiprocessing
import queue
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

from megappo.models import megatron_cpu

megatron_cpu.install()

from megatron.core.dist_checkpointing.strategies import filesystem_async  # noqa: E402


def install() -> None:
    """Have Megatron write its synchronous checkpoints with these processes. Repeatable."""
    # It starts a process only to own a queue, which imports torch anew: a plain queue serves synchronous saves.
    filesystem_async._get_write_results_queue = queue.Queue
    filesystem_async.FileSystemWriterAsync.write_preloaded_data_multiproc = staticmethod(write)


def write(
    transforms: Sequence[Any], use_msc: bool, rank: int, buckets: Sequence[Any], results: queue.Queue[Any]
) -> None:
    """Write each bucket to its file, all at once; in the place of Megatron's ``write_preloaded_data_multiproc``.

    Args:
        buckets: (path, name in the checkpoint, what is written) of each file.
        results: gets what was written where, by number of the bucket; or the first error, which names the file.
    """
    context, writing = multiprocessing.get_context("fork"), []
    for number, bucket in enumerate(buckets):
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_write, args=(transforms, number, bucket, theirs))
        process.start()
        theirs.close()  # so that it ends with the process
        writing.append((ours, process))
    outcomes = {}
    for number, (pipe, process) in enumerate(writing):
        try:
            outcomes[number] = pipe.recv()
        except EOFError:
            outcomes[number] = RuntimeError(
                f"{buckets[number][0]}: the process that wrote it died (killed, or out of memory?)"
            )
        process.join()
    errors = [outcome for outcome in outcomes.values() if isinstance(outcome, Exception)]
    results.put(errors[0] if errors else outcomes)


def _write(transforms: Sequence[Any], number: int, bucket: Any, pipe: Connection) -> None:
    gc.disable()  # it would free what the parent has on its device
    results: queue.Queue[Any] = queue.Queue()
    running: queue.Queue[Any] = queue.Queue()
    running.put(number)
    filesystem_async.FileSystemWriterAsync.write_preloaded_data(transforms, number, bucket, results, running, True)
    _, outcome = results.get()
    if isinstance(outcome, Exception):
        first: BaseException = outcome
        while first.__context__ is not None:
            first = first.__context__
        outcome = RuntimeError(f"{bucket[0]}: {first}")
    pipe.send(outcome)
