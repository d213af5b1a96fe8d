"""Runs at a URL: what goes up and when it counts, what comes down, and a remote side that fails, hangs or is taken."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from remote_side import FailingFileSystem, Local, empty_memory, line, until  # noqa: F401 (a fixture)

from megappo.check.remote_folder import overlap
from megappo.checkpoints import Checkpoints
from megappo.remote.down import bring_down, first_difference
from megappo.remote.folder import RemoteError, RemoteFolder, complete_steps, superfluous
from megappo.time_limit import within


@pytest.fixture(params=["memory", "file"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return "memory://bucket/run" if request.param == "memory" else f"file://{tmp_path}/bucket/run"


def test_everything_goes_up_and_the_newest_comes_down(tmp_path: Path, url: str) -> None:
    first = Local(tmp_path / "first", url, keep=1)
    assert not first.came
    (first.folder / "config.yaml").write_text("a: 1")
    (first.folder / ".lock").touch()
    (first.folder / "best.yaml").symlink_to("config.yaml")
    (first.folder / "tensorboard").mkdir()
    (first.folder / "tensorboard" / "events").write_bytes(bytes(range(256)))
    for step in (1, 2, 3):
        first.step(step, best=1)
        until(lambda step=step: complete_steps(first.remote.files()) == sorted({1, step}))
    first.close()
    assert first.warnings == []
    names = first.remote.files()
    data = [f"checkpoints/step_{step}/{name}" for step in (1, 3) for name in ("actor/weights", "trainer.json")]
    rollouts = [f"rollouts/step_{step}.parquet" for step in (1, 2, 3)]
    records = ["config.yaml", "log.jsonl", "tensorboard/events"]
    assert sorted(names) == sorted([".owner", "checkpoints/best", *data, *rollouts, *records])
    assert first.remote.read("checkpoints/best") == "step_1\n"

    second = Local(tmp_path / "second", url, keep=1)
    assert second.came and second.said == [f"the checkpoint of step 3 (0.0 GB) comes down from {url}"]
    found = [path.relative_to(second.folder).as_posix() for path in second.folder.rglob("*") if path.is_file()]
    assert sorted(found) == sorted([*records, *(name for name in data if "step_3" in name)])
    for name in found:
        assert (second.folder / name).read_bytes() == (first.folder / name).read_bytes()
    second.step(4)  # the best is the other machine's, and stays
    second.close()
    assert complete_steps(second.remote.files()) == [1, 4]
    log = "".join(line(step, "first" if step < 4 else "second") for step in (1, 2, 3, 4))
    assert (second.folder / "log.jsonl").read_text() == second.remote.read("log.jsonl") == log
    assert not Local(tmp_path / "second", url).came  # all of it is here


def test_half_an_upload_is_no_checkpoint(tmp_path: Path) -> None:
    """The connection breaks in the second checkpoint: the first counts, and nothing stops; then it goes up anew."""
    run = Local(tmp_path / "run", "failing://bucket/run")
    run.step(1)
    until(lambda: complete_steps(run.remote.files()) == [1])
    FailingFileSystem.broken.add("checkpoints/step_2/actor")
    run.step(2)
    until(lambda: run.uploads._news)
    run.uploads.tell()
    broke = "sending to failing://bucket/run failed (ConnectionResetError: the connection broke); it is tried again, "
    assert run.warnings == [f"{broke}and training goes on"]
    assert "checkpoints/step_2/actor/weights" in run.remote.files()
    assert complete_steps(run.remote.files()) == [1]
    fresh = Checkpoints(tmp_path / "fresh" / "checkpoints", 2)
    assert bring_down(run.remote, fresh, print, print) and fresh.complete() == [1]
    run.close(limit_s=0.2)
    assert run.warnings[1:] == [
        f"not up at failing://bucket/run: checkpoints/step_2; they are in {run.folder}, and the same command sends them"
    ]
    FailingFileSystem.broken.clear()
    again = Local(run.folder, "failing://bucket/run")
    again.close()
    assert again.warnings == []
    assert complete_steps(again.remote.files()) == [1, 2]
    last = [name for name in FailingFileSystem.put_names if "step_2" in name][-2:]
    assert last == ["checkpoints/step_2/actor/weights", "checkpoints/step_2/trainer.json"]
    assert again.remote.read("checkpoints/step_2/actor/weights") == "weights of 2"


def test_logs_are_up_before_the_checkpoint_that_needs_them(tmp_path: Path) -> None:
    FailingFileSystem.broken.add("log.jsonl")
    run = Local(tmp_path / "run", "failing://bucket/run")
    run.step(1)
    until(lambda: FailingFileSystem.put_names.count("log.jsonl.partial") > 2)
    assert complete_steps(run.remote.files()) == []
    FailingFileSystem.broken.clear()
    run.close()
    assert complete_steps(run.remote.files()) == [1]
    assert run.warnings[-1] == "failing://bucket/run has everything again"
    assert run.remote.read("log.jsonl") == line(1, "run")


def test_a_file_that_cannot_go_up_does_not_hold_up_checkpoints(tmp_path: Path) -> None:
    FailingFileSystem.broken.add("logs/odd")
    run = Local(tmp_path / "run", "failing://bucket/run")
    (run.folder / "logs").mkdir()
    (run.folder / "logs" / "odd.log").write_text("odd")
    run.step(1)
    until(lambda: complete_steps(run.remote.files()) == [1])
    run.close(limit_s=0.2)
    assert "not up at failing://bucket/run: logs/odd.log; they are in " in run.warnings[-1]


def test_a_checkpoint_on_its_way_stays_while_newer_ones_are_written(tmp_path: Path) -> None:
    run = Local(tmp_path / "run", "failing://bucket/run", keep=1)
    run.step(1, file="slow")
    until(lambda: "checkpoints/step_1/actor/slow" in FailingFileSystem.put_names)
    for step in (2, 3, 4):
        run.step(step)
    assert run.checkpoints.complete() == [1, 4]
    FailingFileSystem.gate.set()
    run.close()
    assert complete_steps(run.remote.files()) == [4]
    assert not [
        name for name in FailingFileSystem.put_names if name.startswith(("checkpoints/step_2", "checkpoints/step_3"))
    ]
    run.step(5)
    assert run.checkpoints.complete() == [5]


def test_the_end_waits_no_longer_than_it_may(tmp_path: Path) -> None:
    run = Local(tmp_path / "run", "failing://bucket/run")
    run.step(1, file="slow")
    until(lambda: "checkpoints/step_1/actor/slow" in FailingFileSystem.put_names)
    began = time.monotonic()
    run.close(limit_s=1.2)
    assert time.monotonic() - began < 10  # the upload would take 60 s
    assert run.said == ["waiting up to 1.2 s until everything is up at failing://bucket/run (Ctrl-C: no longer)"]
    assert run.warnings[0].startswith("not up at failing://bucket/run: checkpoints/step_1; they are in ")


def test_after_the_end_nothing_more_is_begun(tmp_path: Path) -> None:
    run = Local(tmp_path / "run", "failing://own/run")
    (run.folder / "slow").write_text("slow")
    until(lambda: "slow.partial" in FailingFileSystem.put_names)
    run.step(1)
    run.close(limit_s=0.1)
    FailingFileSystem.gate.set()
    until(lambda: not run.uploads._thread.is_alive())
    assert run.remote.files().keys() == {".owner", "slow"}


def test_who_waits_no_longer_for_the_end_leaves_no_thread(tmp_path: Path) -> None:
    FailingFileSystem.broken.add("log.jsonl")
    run = Local(tmp_path / "run", "failing://bucket/run")
    run.step(1)

    def interrupt(text: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run.uploads.close(60, interrupt)
    until(lambda: not run.uploads._thread.is_alive(), limit_s=10)


def test_another_machine_takes_over(tmp_path: Path) -> None:
    first = Local(tmp_path / "first", "memory://bucket/run")
    first.step(1)
    until(lambda: complete_steps(first.remote.files()) == [1])
    second = Local(tmp_path / "second", "memory://bucket/run")
    until(lambda: not first.uploads._thread.is_alive())
    first.step(2)
    second.step(3)
    second.close()
    first.close()
    assert "another run writes there now (host " in first.warnings[0] and "nothing more goes up" in first.warnings[0]
    left = "checkpoints/step_2, log.jsonl, rollouts/step_2.parquet"
    assert first.warnings[1] == f"not up at memory://bucket/run: {left}; they are in {first.folder}"
    assert complete_steps(first.remote.files()) == [1, 3]


def test_what_may_go() -> None:
    files = [f"checkpoints/step_{step}/trainer.json" for step in (2, 10, 9)]
    files += ["checkpoints/step_11/actor/weights", "checkpoints/best", "log.jsonl"]
    assert complete_steps(files) == [2, 9, 10]
    assert superfluous(files, [2, 9, 10], 1, "step_2") == ["step_11", "step_9"]
    assert superfluous(files, [2, 9], 1, "none") == ["step_10", "step_11", "step_2"]  # 10 lacks something


def test_a_place_that_hangs_or_refuses_is_named(tmp_path: Path) -> None:
    with pytest.raises(TimeoutError, match=r"no answer within 0.01 s"):
        within(0.01, threading.Event().wait)
    (tmp_path / "file").touch()
    with pytest.raises(RemoteError, match=r"run.dir: file://.*/file/run cannot be written \(\w+Error: .*\): look at"):
        RemoteFolder.reached(f"file://{tmp_path}/file/run")
    remote = RemoteFolder.reached("memory://bucket/run")
    assert remote.files() == {}


def test_a_working_folder_on_the_place_itself_is_refused(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "place")
    for folder, how in (("place", "is"), ("link", "is"), ("link/in", "lies in"), (".", "is around")):
        with pytest.raises(
            RemoteError, match=rf"run.dir: file://.*/place: the working folder .* {how} that place, and"
        ):
            Local(tmp_path / folder, f"file://{tmp_path}/place")
    assert not list((tmp_path / "place").rglob("*.owner"))
    assert not overlap(f"file://{tmp_path}/place", tmp_path / "place2")


def test_what_never_was_in_the_run_goes(tmp_path: Path, url: str) -> None:
    """One dies in step 2, another takes over there; the first comes back with its own rollouts of step 2 and log."""
    first = Local(tmp_path / "first", url, keep=5)
    first.step(1)
    first.close()
    stale = first.folder / "rollouts/step_2.parquet"
    stale.write_text("rows X")  # as long as what the other writes
    (first.folder / "log.jsonl").open("a").write(line(2, "first"))
    second = Local(tmp_path / "second", url)
    second.step(2)
    second.step(3)
    second.close()
    back = Local(first.folder, url, keep=5)
    assert back.came and back.checkpoints.complete() == [1, 3] and not stale.exists()
    back.close()
    assert back.remote.read("rollouts/step_2.parquet") == "rows 2"
    assert back.remote.read("log.jsonl") == line(1, "first") + line(2, "second") + line(3, "second")


def test_a_checkpoint_that_never_was_in_the_run_goes(tmp_path: Path) -> None:
    first = Local(tmp_path / "first", "failing://bucket/run", keep=5)
    first.step(1)
    first.close()
    away = Local(tmp_path / "away", "failing://bucket/run")
    FailingFileSystem.broken.add("step_2")
    away.step(2)
    away.close(limit_s=0.2)
    FailingFileSystem.broken.clear()
    second = Local(tmp_path / "second", "failing://bucket/run")
    for step in (2, 3):
        second.step(step)
    second.close()
    back = Local(away.folder, "failing://bucket/run")
    assert back.came and back.checkpoints.complete() == [1, 3]
    back.close()


def test_a_rollout_that_changed_here_goes_up_anew(tmp_path: Path, url: str) -> None:
    run = Local(tmp_path / "run", url)
    run.step(1)
    run.step(2)
    run.close()
    (run.folder / "rollouts/step_1.parquet").write_text("rows X")
    sent = run.remote._at("rollouts/step_2.parquet")
    run.remote.fs.pipe_file(sent, b"rows Y")  # of the same length: seen to be sent
    again = Local(run.folder, url)
    again.close()
    assert again.remote.read("rollouts/step_1.parquet") == "rows X"
    assert again.remote.read("rollouts/step_2.parquet") == "rows Y"


@pytest.mark.parametrize("ahead", [5, 2])
def test_another_run_in_the_working_folder_is_refused(tmp_path: Path, ahead: int) -> None:
    there = Local(tmp_path / "there", "memory://bucket/run")
    for step in (1, 3):
        there.step(step)
        until(lambda step=step: step in complete_steps(there.remote.files()))
    there.close()
    other = Local(tmp_path / "other", "memory://bucket/other")
    for step in (1, ahead):
        other.step(step)
    other.close()
    before = {path: path.read_bytes() for path in other.folder.rglob("*") if path.is_file()}
    with pytest.raises(
        RemoteError, match=r"memory://bucket/run has another run than .*/other: they differ from step 1"
    ):
        Local(other.folder, "memory://bucket/run")
    assert {path: path.read_bytes() for path in other.folder.rglob("*") if path.is_file()} == before
    assert complete_steps(there.remote.files()) == [1, 3]


def test_where_two_logs_part() -> None:
    ours, theirs = ("".join(line(step, by) for step, by in enumerate(bys)) for bys in ("aabb", "aacc"))
    assert [first_difference(ours, theirs, last) for last in (1, 2, 3)] == [None, 2, 2]
    assert first_difference(ours, "", 3) is None
    assert first_difference(line(5, "a"), theirs, 3) == 0
    assert first_difference(ours, theirs[:-9], 1) is None  # a torn line


def test_a_file_system_that_is_gone_for_a_while(tmp_path: Path) -> None:
    run = Local(tmp_path / "run", f"file://{tmp_path}/mount/run")
    run.step(1)
    until(lambda: complete_steps(run.remote.files()) == [1])
    (tmp_path / "mount").rename(tmp_path / "unmounted")
    (tmp_path / "mount").mkdir()
    until(lambda: run.uploads._news)
    run.step(2)
    shutil.rmtree(tmp_path / "mount")
    (tmp_path / "unmounted/run/rollouts/step_1.parquet").unlink()  # as if it had gone up when nothing was mounted
    (tmp_path / "unmounted").rename(tmp_path / "mount")
    run.close()
    assert run.remote.read("rollouts/step_1.parquet") == "rows 1"
    assert "failed (OwnerMissing: what was written there (.owner) is gone: mount it again; or" in run.warnings[0]
    assert run.warnings[1:] == [f"file://{tmp_path}/mount/run has everything again"]
    assert complete_steps(run.remote.files()) == [1, 2]


DAMAGES: dict[str, Callable[[Path], Any]] = {
    "trainer.json is empty or damaged": lambda folder: (folder / "trainer.json").write_text(""),
    "actor/weights is missing": lambda folder: (folder / "actor/weights").unlink(),
    "actor/weights has 4 bytes of 12": lambda folder: os.truncate(folder / "actor/weights", 4),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_checkpoint_that_is_not_whole_there_is_left_out(tmp_path: Path, damage: str) -> None:
    url, place = f"file://{tmp_path}/url", tmp_path / "url/checkpoints"
    first = Local(tmp_path / "first", url)
    for step in (1, 9):
        first.step(step)
        until(lambda step=step: step in complete_steps(first.remote.files()))
    first.close()
    DAMAGES[damage](place / "step_9")
    second = Local(tmp_path / "second", url, keep=1)
    assert second.came and second.checkpoints.complete() == [1]
    assert second.warnings == [f"{url}: the checkpoint of step 9 is not whole ({damage}), and is left out"]
    second.step(2)
    second.close()
    assert complete_steps(second.remote.files()) == [2]  # and not the other, which is of a later step
    DAMAGES[damage](place / "step_2")
    with pytest.raises(RemoteError, match=r"the checkpoint of step 2 is not whole \(.*\): bring back what is missing"):
        Local(tmp_path / "third", url)
    again = Local(second.folder, url)  # which has it
    again.close()
    assert not again.came and again.remote.whole_steps(again.remote.files()) == [2]
