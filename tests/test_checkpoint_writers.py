"""What becomes of a process that writes files of a checkpoint and fails."""

from __future__ import annotations

import os
import queue
import signal
from typing import Any

import pytest
import torch


def outcome(path: str, transforms: Any = None) -> Any:
    from torch.distributed.checkpoint.filesystem import _StorageWriterTransforms
    from torch.distributed.checkpoint.planner_helpers import _create_write_items

    from megappo.workers import checkpoint_writers, role_checkpoint  # noqa: F401 (which has Megatron use them)

    write = checkpoint_writers.filesystem_async.FileSystemWriterAsync.write_preloaded_data_multiproc
    tensor, results = torch.ones(100_000), queue.Queue[Any]()
    (item,) = _create_write_items("weight", tensor)
    bucket = (path, "__0_0.distcp", ([], [(item, tensor)]))
    write([transforms or _StorageWriterTransforms()], False, 0, [bucket], results)
    return results.get_nowait()


def test_a_full_disk_is_told_in_its_own_words() -> None:
    assert str(outcome("/dev/full")) == f"/dev/full: [Errno 28] {os.strerror(28)}"


def test_a_process_that_is_killed_is_not_waited_for(tmp_path: Any) -> None:
    class Killed:
        def transform_save_stream(self, *_: Any) -> Any:
            os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(RuntimeError, match=r"weights\.distcp: the process that wrote it died \(killed, or out"):
        raise outcome(str(tmp_path / "weights.distcp"), Killed())


def test_what_was_written_is_told_by_bucket(tmp_path: Any) -> None:
    found = outcome(str(tmp_path / "weights.distcp"))
    (entry,) = found[0]
    assert entry.storage_data.length == (tmp_path / "weights.distcp").stat().st_size
