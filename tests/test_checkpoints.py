"""A checkpoint is complete or absent, whenever the writer is interrupted."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megappo.checkpoints import Checkpoints, DamagedCheckpoint, DiskFull, OldCheckpoint


def write(checkpoints: Checkpoints, step: int, text: str = "weights") -> None:
    with checkpoints.writing(step) as folder:
        (folder / "actor").mkdir()
        (folder / "actor" / "data").write_text(text)
        checkpoints.write_state(folder, {"step": step, "kl_controller": {"coef": 0.1 + 0.2}})


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_none_at_first(tmp_path: Path) -> None:
    assert Checkpoints(tmp_path / "checkpoints", 2).latest() is None


def test_state_comes_back_exactly(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, 2)
    write(checkpoints, 3)
    latest = checkpoints.latest()
    assert latest == tmp_path / "step_3"
    assert checkpoints.read_state(latest) == {"step": 3, "kl_controller": {"coef": 0.1 + 0.2}}
    with pytest.raises(OldCheckpoint, match=r"step_3: written by another version .*has no guards, position\)"):
        checkpoints.read_state(latest, {"step": 0, "position": 0, "guards": {}})
    assert (latest / "actor" / "data").read_text() == "weights"


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (
            lambda step: (step / "actor" / "data").write_text("wei"),
            r"step_3: actor/data has 3 of 7 bytes: remove \S*step_3",
        ),
        (lambda step: (step / "actor" / "data").unlink(), "step_3: actor/data is missing: remove "),
        (
            lambda step: (step / "trainer.json").write_text('{"step": 3'),
            r"trainer\.json: cannot be read \(.*\): remove ",
        ),
    ],
    ids=["cut short", "lost", "state cut short"],
)
def test_a_damaged_one_is_named_with_the_way_out(tmp_path: Path, spoil: Callable[[Path], Any], words: str) -> None:
    checkpoints = Checkpoints(tmp_path, 2)
    write(checkpoints, 3)
    spoil(tmp_path / "step_3")
    with pytest.raises(DamagedCheckpoint, match=words):
        checkpoints.read_state(tmp_path / "step_3")


def test_the_latest_is_by_number_and_the_oldest_go(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, 2)
    for step in (8, 9, 10):
        write(checkpoints, step)
    assert names(tmp_path) == ["step_10", "step_9"]
    assert checkpoints.latest() == tmp_path / "step_10"


def test_an_interrupted_one_is_not_there(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, 2)
    write(checkpoints, 1)
    with pytest.raises(KeyboardInterrupt), checkpoints.writing(2) as folder:
        (folder / "actor").mkdir()
        (folder / "actor" / "half").write_text("half")
        checkpoints.write_state(folder, {"step": 2})
        raise KeyboardInterrupt
    assert checkpoints.latest() == tmp_path / "step_1"
    write(checkpoints, 2)
    assert names(tmp_path) == ["step_1", "step_2"]
    assert not (tmp_path / "step_2" / "actor" / "half").exists()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_one_that_finds_no_room_leaves_nothing(tmp_path: Path, code: int) -> None:
    checkpoints = Checkpoints(tmp_path, 2)
    write(checkpoints, 1)
    with pytest.raises(DiskFull, match=r"the checkpoint of step 2 could not be written"), checkpoints.writing(2) as new:
        (new / "half").write_text("half")
        raise RuntimeError(f"actor rank 1: OSError: {os.strerror(code)}: 'x'")  # as the driver has it from a worker
    assert names(tmp_path) == ["step_1"]
    with pytest.raises(RuntimeError, match="something else"), checkpoints.writing(2):
        raise RuntimeError("something else")


def test_one_without_the_trainers_state_is_refused(tmp_path: Path) -> None:
    refused = pytest.raises(RuntimeError, match=r"step_4.partial: the checkpoint was not finished")
    with refused, Checkpoints(tmp_path, 2).writing(4):
        pass
    assert Checkpoints(tmp_path, 2).latest() is None


def test_killed_between_the_last_write_and_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints = Checkpoints(tmp_path, 1)
    write(checkpoints, 1)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", lambda self, target: (_ for _ in ()).throw(SystemExit))
        with pytest.raises(SystemExit):
            write(checkpoints, 2)
    assert names(tmp_path) == ["step_1", "step_2.partial"]  # the old one goes only after the new one has its name
    assert checkpoints.latest() == tmp_path / "step_1"


def test_killed_while_an_old_one_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints = Checkpoints(tmp_path, 1)
    write(checkpoints, 1)
    with monkeypatch.context() as patch:
        patch.setattr("shutil.rmtree", lambda path: (_ for _ in ()).throw(SystemExit))
        with pytest.raises(SystemExit):
            write(checkpoints, 2)
    assert checkpoints.latest() == tmp_path / "step_2"
    write(checkpoints, 3)
    assert names(tmp_path) == ["step_3"]


def test_writing_a_step_again_replaces_it(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, 2)
    write(checkpoints, 1, "old")
    write(checkpoints, 1, "new")
    assert (tmp_path / "step_1" / "actor" / "data").read_text() == "new"
    assert names(tmp_path) == ["step_1"]


def test_the_best_stays_beside_the_latest_and_has_a_link(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, 1)
    for step, best in ((1, None), (2, 2), (3, 2), (4, 2), (5, 5), (6, 5)):
        with checkpoints.writing(step, best) as folder:
            checkpoints.write_state(folder, {"step": step})
        if step == 4:
            assert names(tmp_path) == ["best", "step_2", "step_4"]
            assert checkpoints.read_state(tmp_path / "best") == {"step": 2}
            assert checkpoints.latest() == tmp_path / "step_4"
    assert names(tmp_path) == ["best", "step_5", "step_6"]
    assert (tmp_path / "best").resolve() == tmp_path / "step_5"
