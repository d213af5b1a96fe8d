"""Commands and whole runs at a URL: what is refused, what comes down, what a report sees."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from remote_side import FailingFileSystem, Local, empty_memory, line  # noqa: F401 (a fixture)
from small_project import Project, make_project
from test_run_folder import config, folder  # noqa: F401 (a fixture)

from megappo import cli
from megappo.data.prompts import DataError
from megappo.remote.down import local_folder
from megappo.remote.folder import RemoteError, RemoteFolder
from megappo.run import Run
from megappo.run_lock import RunLock


def test_a_run_refuses_what_came_down_if_it_is_of_another(folder: Path) -> None:  # noqa: F811 (the fixture)
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
        assert again.last_checkpoint == folder / "elsewhere/checkpoints/step_1"
        assert again._changes == ["run.work_dir: None -> elsewhere"]
    with pytest.raises(ValueError, match=r"run.seed: 4 differs from 3, with which the run in other began"):
        Run(config(url, "run.work_dir=other", "run.seed=4"))
    RunLock(Path("other")).release()


def test_a_run_that_is_refused_leaves_the_url_as_it_is(folder: Path) -> None:  # noqa: F811
    url = config("run.dir=memory://bucket/run", "run.work_dir=here")
    with Run(url) as run, run.checkpoints.writing(1) as partial:
        run.checkpoints.write_state(partial, {"step": 1, "data": "other"})
    owner, before = RemoteFolder("memory://bucket/run").read(".owner"), threading.enumerate()
    with pytest.raises(DataError, match=r"data.train: "):
        Run(url)
    assert threading.enumerate() == before and RemoteFolder("memory://bucket/run").read(".owner") == owner
    RunLock(Path("here")).release()


def test_a_run_that_is_interrupted_while_it_ends_leaves_no_thread(folder: Path) -> None:  # noqa: F811
    def interrupt(*, failed: bool) -> None:
        raise KeyboardInterrupt

    before = threading.enumerate()
    with pytest.raises(KeyboardInterrupt), Run(config("run.dir=memory://bucket/run", "run.work_dir=here")) as run:
        run._trackers = SimpleNamespace(close=interrupt)  # type: ignore[assignment]
    assert threading.enumerate() == before
    RunLock(Path("here")).release()


def test_report_of_a_url(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:  # noqa: F811
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
