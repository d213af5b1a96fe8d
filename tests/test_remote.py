"""Runs at a URL: what goes up and when it counts, what comes down, and a remote side that fails, hangs or is taken."""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from small_project import Project, make_project
from small_run import CONFIG, make_tiny_model
from test_run_folder import config

from megappo import cli
from megappo.check.remote_folder import overlap
from megappo.checkpoints import Checkpoints
from megappo.data.arithmetic import write_arithmetic
from megappo.remote.down import bring_down, first_difference, local_folder
from megappo.remote.folder import RemoteError, RemoteFolder, complete_steps, superfluous, within
from megappo.remote.uploads import Uploads
from megappo.run import Run
from megappo.run_lock import RunLock


class FailingFileSystem(MemoryFileSystem):
    """Memory in which one may have uploads fail, or wait, by a part of their names."""

    protocol = ("failing",)
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    broken: ClassVar[set[str]] = set()
    put_names: ClassVar[list[str]] = []
    gate: ClassVar[threading.Event] = threading.Event()

    def put_file(self, lpath: str, rpath: str, *args: Any, **options: Any) -> None:
        self.put_names.append(rpath.partition("/run/")[2])
        if any(part in rpath for part in self.broken):
            super().put_file(lpath, rpath, *args, **options)
            self.store[rpath].truncate(1)  # what an upload that broke off may leave
            raise ConnectionResetError("the connection broke")
        if "slow" in Path(lpath).name:
            assert self.gate.wait(60)
        super().put_file(lpath, rpath, *args, **options)


fsspec.register_implementation("failing", FailingFileSystem)


@pytest.fixture(autouse=True)
def empty_memory() -> Iterator[None]:
    for kind in (MemoryFileSystem, FailingFileSystem):
        kind.store.clear()
        kind.pseudo_dirs[:] = [""]
    FailingFileSystem.broken.clear()
    FailingFileSystem.put_names.clear()
    FailingFileSystem.gate.clear()
    yield
    FailingFileSystem.gate.set()


def until(happened: Callable[[], Any], limit_s: float = 60) -> None:
    deadline = time.monotonic() + limit_s
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def line(step: int, by: str) -> str:
    """Of a log: no two runs have one that is the same, as it holds the time."""
    return json.dumps({"step": step, "time": by, "metrics": {}}) + "\n"


class Local:
    """A run's folder, written as a run writes it, and its uploads."""

    def __init__(self, folder: Path, url: str, keep: int = 2, every_s: float = 0.01) -> None:
        self.folder, self.warnings, self.said = folder, [], []
        folder.mkdir(parents=True, exist_ok=True)
        self.checkpoints = Checkpoints(folder / "checkpoints", keep)
        self.remote = RemoteFolder(url)
        self.came = bring_down(self.remote, self.checkpoints, self.said.append, self.warnings.append)
        self.uploads = Uploads(folder, self.remote, self.checkpoints, self.warnings.append, every_s)

    def step(self, step: int, best: int | None = None, file: str = "weights") -> None:
        with (self.folder / "log.jsonl").open("a") as log:
            log.write(line(step, self.folder.name))
        rollouts = self.folder / "rollouts"
        rollouts.mkdir(exist_ok=True)
        (rollouts / f"step_{step}.parquet").write_text(f"rows {step}")
        with self.checkpoints.writing(step, best) as folder:
            (folder / "actor").mkdir()
            (folder / "actor" / file).write_text(f"weights of {step}")
            self.checkpoints.write_state(folder, {"step": step})

    def close(self, limit_s: float = 60) -> None:
        self.uploads.close(limit_s, self.said.append)


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
    assert time.monotonic() - began < 10
    assert run.said == ["waiting up to 1.2 s until everything is up at failing://bucket/run (Ctrl-C: no longer)"]
    assert run.warnings[0].startswith("not up at failing://bucket/run: checkpoints/step_1; they are in ")


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


# --- runs ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_arithmetic(tmp_path / "data", train=20, validation=9, digits=1)
    make_tiny_model().make_tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "config.yaml").write_text(CONFIG)
    return tmp_path


def test_a_run_refuses_what_came_down_if_it_is_of_another(work: Path) -> None:
    url = "run.dir=memory://bucket/run"
    with Run(config(url)) as run:
        run.start_log(None)
        run.log(1, {"actor/lr": 1.0})
        with run.checkpoints.writing(1) as partial:
            run.checkpoints.write_state(partial, {"step": 1})
    assert run.folder == Path("runs/memory/bucket/run")
    for file in ("log.jsonl", "config.yaml", "versions.json", "checkpoints/step_1/trainer.json"):
        assert RemoteFolder("memory://bucket/run").read(file) == (run.folder / file).read_text()
    with Run(config(url, "run.work_dir=elsewhere")) as again:
        assert again.last_checkpoint == work / "elsewhere/checkpoints/step_1"
    with pytest.raises(ValueError, match=r"run.seed: 4 differs from 3, with which the run in other began"):
        Run(config(url, "run.work_dir=other", "run.seed=4"))
    RunLock(Path("other")).release()


def test_report_of_a_url(work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    remote = RemoteFolder("memory://bucket/run")
    remote.write("log.jsonl", '{"step": 1, "time": 0, "metrics": {"actor/lr": 1.0}}\n')
    remote.write("rollouts/step_1.parquet", "large")
    assert cli.main(["report", "memory://bucket/run"]) == 0
    assert capsys.readouterr().out == "runs/memory/bucket/run/report.html\n"
    assert not Path("runs/memory/bucket/run/rollouts").exists()
    assert cli.main(["report", "memory://bucket/none"]) == 2
    assert cli.main(["report", "--watch", "memory://bucket/run"]) == 2
    assert capsys.readouterr().err.splitlines() == [
        "error: memory://bucket/none: has no log.jsonl: give the folder of a run (run.dir)",
        "error: --watch: memory://bucket/run is a URL: give the folder in which the run works",
    ]
    with pytest.raises(RemoteError, match=r"memory://bucket/run: there is no complete checkpoint"):
        local_folder("memory://bucket/run", print, with_checkpoint=True)
    assert not Path("runs/memory/bucket/none").exists()


def test_a_report_sees_what_came_after_a_conversion(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = Local(tmp_path / "run", "memory://bucket/run")
    run.step(1)
    run.close()
    here = local_folder("memory://bucket/run", print, with_checkpoint=True)
    assert (here / "log.jsonl").read_text() == line(1, "run")
    again = Local(run.folder, "memory://bucket/run")
    again.step(2)
    again.close()
    assert local_folder("memory://bucket/run", print) == here
    assert (here / "log.jsonl").read_text() == line(1, "run") + line(2, "run")
    longer = (here / "log.jsonl").read_text() + line(3, "run")  # a run worked here, and is not up
    (here / "log.jsonl").write_text(longer)
    local_folder("memory://bucket/run", print)
    assert (here / "log.jsonl").read_text() == longer
    run.remote.write("log.jsonl", line(1, "other"))
    with pytest.raises(RemoteError, match=r"memory://bucket/run has another run than .*: they differ from step 1 on"):
        local_folder("memory://bucket/run", print)


def test_a_place_that_does_not_answer_is_not_an_empty_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    def refused(*args: Any, **options: Any) -> None:
        raise ConnectionRefusedError("no such host")

    monkeypatch.setattr(FailingFileSystem, "ls", refused)
    with pytest.raises(RemoteError, match=r"failing://a/b: cannot be read \(ConnectionRefusedError: no such host\)"):
        local_folder("failing://a/b", print, with_checkpoint=True)
    assert not Path("runs").exists()


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    monkeypatch.chdir(tmp_path)
    return make_project(tmp_path)


@pytest.mark.parametrize(
    ("overrides", "error"),
    [
        (["run.dir=s4://bucket/run"], "run.dir: s4:// is no protocol that fsspec knows: known are, among others, s3,"),
        (["run.dir=oss://b/run"], "run.dir: oss:// needs the package ossfs, which is not installed: pip install ossfs"),
        (["run.dir=s3://"], "run.dir: s3:// names no folder: give PROTOCOL://PATH, as s3://bucket/run"),
        (["run.dir=file:///a/../b"], "run.dir: file:///a/../b names no folder: give PROTOCOL://PATH"),
        (["run.work_dir=here"], "run.work_dir: here is for a run.dir that is a URL, and run is a folder"),
        (["run.dir=memory://a/b", "run.work_dir=score.py/x"], "run.work_dir: score.py/x: "),
        (["run.dir=memory://a/b", "run.work_dir=s3://c"], "run.work_dir: s3://c is a URL: give a folder here"),
        (["run.dir=https://a/b"], "run.dir: https:// cannot be written: give a folder here, or a URL of, for"),
        (["run.dir=zip://a/b"], "run.dir: zip:// cannot be written: "),
        (["run.dir=simplecache://a/b"], "run.dir: simplecache:// is no place of its own: "),
        (["run.dir=file:///proc/x"], "run.dir: /proc/x: /proc is not writable: choose another folder"),
        (["run.dir=s3:/bucket/x"], "run.dir: s3:/bucket/x is neither a URL nor a folder: did you mean s3://bucket/x?"),
        (["run.dir=file://here", "run.work_dir=here"], "run.dir: file://here: the working folder here is that place"),
        (["run.dir=file://here", "run.work_dir=here/a"], "run.dir: file://here: the working folder here/a lies in"),
    ],
)
def test_check(project: Project, overrides: list[str], error: str) -> None:
    (found,) = project.report(*overrides).errors
    assert found.startswith(error)
    memory = project.report("run.dir=memory://bucket/run", "run.work_dir=here")
    assert not memory.errors and memory.warnings == (
        "run.dir: memory://bucket/run is memory of this process, and vanishes with it: give a place that stays",
    )
