"""What a conversion makes is whole or absent, whoever is killed, and is made anew if what it depends on has changed."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from test_convert import assert_same_weights, make, run

from megappo.convert import destination
from megappo.models.lora import FILE
from megappo.models.spec import ModelError


def test_a_killed_conversion_leaves_nothing_that_looks_whole(tmp_path: Path) -> None:
    folder, target = make(tmp_path / "model"), tmp_path / "checkpoint"
    script = (
        "import os, signal, sys\n"
        "from megappo.convert import to_megatron\n"
        "copy, calls = to_megatron.copy_block, []\n"
        "def copy_block(*a):\n"
        "    calls.append(a)\n"
        "    return os.kill(os.getpid(), signal.SIGKILL) if len(calls) == 9 else copy(*a)\n"
        "to_megatron.copy_block = copy_block\n"
        "from megappo.cli import main\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parent.parent)}
    command = [sys.executable, "-c", script, "convert", str(folder), str(target), "--processes"]
    # The process itself is killed: its folder stays partial, and the next conversion begins again.
    assert subprocess.run([*command, "1"], env=environment, check=False).returncode == -signal.SIGKILL
    assert not target.exists() and (tmp_path / "checkpoint.partial").is_dir()
    # One that shares the work is killed: an error, and nothing is left.
    done = subprocess.run([*command, "2"], env=environment, capture_output=True, text=True, check=False)
    words = "error: a process that shared the work died (exit status -9): out of memory? Give fewer --processes\n"
    assert done.returncode == 1 and done.stderr.endswith(words)
    assert not target.exists() and not (tmp_path / "checkpoint.partial").exists()
    run(folder, target)
    run(target, tmp_path / "back")
    assert_same_weights(folder, tmp_path / "back")


def test_what_is_there_is_kept_unless_told_otherwise(tmp_path: Path) -> None:
    folder, target = make(tmp_path / "model"), tmp_path / "checkpoint"
    run(folder, target)
    before = (target / ".metadata").stat().st_mtime_ns
    assert run(folder, target) == [f"{target}: is there already, made from the same: nothing to do"]
    with pytest.raises(
        ModelError, match="is there already, made from something else or changed since: choose another DST"
    ):
        run(folder, target, tp=2)
    assert (target / ".metadata").stat().st_mtime_ns == before
    run(folder, target, tp=2, overwrite=True)
    assert (target / "__1_0.distcp").is_file() and sorted(path.name for path in tmp_path.iterdir()) == [
        "checkpoint",
        "model",
    ]
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.tex").write_text("years")
    with pytest.raises(ModelError, match="is no model, so it is not overwritten"):
        run(folder, tmp_path / "home", overwrite=True)


def test_two_at_once(tmp_path: Path) -> None:
    target = tmp_path / "checkpoint"
    with destination.writing(target, {}), pytest.raises(ModelError, match="another process is writing it"):
        run(make(tmp_path / "model"), target)
    assert (target / destination.RECORD).is_file()


def test_where_there_are_no_locks_it_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(*_: Any) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    folder, target = make(tmp_path / "model"), tmp_path / "checkpoint"
    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(ModelError, match=r"checkpoint.partial: its file system gives no file locks \(No locks"):
        run(folder, target)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_second_one_cannot_begin_while_files_are_brought_to_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor in a folder that was moved to its place between the second's two looks at it."""
    folder, target = make(tmp_path / "model"), tmp_path / "checkpoint"
    sync, flock, seen = destination.sync_tree, fcntl.flock, []

    def slow_sync(path: Path) -> None:
        with pytest.raises(ModelError, match="another process is writing it"):
            run(folder, target)
        sync(path)

    def late_flock(*arguments: Any) -> None:
        (tmp_path / "other.partial").rename(tmp_path / "other")
        flock(*arguments)
        seen.append(arguments)

    monkeypatch.setattr(destination, "sync_tree", slow_sync)
    run(folder, target)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint", "model"]
    assert not (target / destination.LOCK).exists()
    monkeypatch.setattr(fcntl, "flock", late_flock)
    with pytest.raises(ModelError, match="another process is writing it"):
        run(folder, tmp_path / "other")
    assert seen and [path.name for path in (tmp_path / "other").iterdir()] == [destination.LOCK]


def test_what_a_kill_while_replacing_left(tmp_path: Path) -> None:
    """What was to be replaced is there again at once, or gone, and never in the way of the next."""
    folder, target = make(tmp_path / "model"), tmp_path / "checkpoint"
    aside = tmp_path / "checkpoint.partial.old"
    run(folder, target)
    shutil.copytree(target, aside)  # killed while the old one was being removed
    run(folder, target, tp=2, overwrite=True)
    assert (target / "__1_0.distcp").is_file() and not aside.exists()
    target.rename(aside)  # killed before the new one was in its place
    with pytest.raises(RuntimeError), destination.writing(target, {}):
        raise RuntimeError
    assert (target / "__1_0.distcp").is_file()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint", "model"]


def test_what_was_half_removed_is_not_put_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one before is removed at the end; killed in there, the new one may be gone too before the next begins."""
    folder, target = make(tmp_path / "model"), tmp_path / "checkpoint"
    run(folder, target)
    unlink = Path.unlink

    def die(path: Path, **options: Any) -> None:
        unlink(path, **options)
        if path.parent.name == "checkpoint.partial.old":
            raise KeyboardInterrupt

    monkeypatch.setattr(Path, "unlink", die)
    with pytest.raises(KeyboardInterrupt):
        run(folder, target, tp=2, overwrite=True)
    monkeypatch.undo()
    assert (tmp_path / "checkpoint.partial.old").is_dir()
    assert "nothing to do" in run(folder, target, tp=2)[0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint", "model"]  # the leftover is gone
    monkeypatch.setattr(Path, "unlink", die)
    with pytest.raises(KeyboardInterrupt):
        run(folder, target, overwrite=True)
    monkeypatch.undo()
    shutil.rmtree(target)
    with pytest.raises(RuntimeError), destination.writing(target, {}):
        raise RuntimeError
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_an_interruption_while_replacing_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, target = make(tmp_path / "model"), tmp_path / "checkpoint"
    run(folder, target)
    rename = Path.rename

    def interrupt(path: Path, to: Path) -> Path:
        if path.name == "checkpoint.partial":
            raise KeyboardInterrupt
        return rename(path, to)

    monkeypatch.setattr(Path, "rename", interrupt)
    with pytest.raises(KeyboardInterrupt):
        run(folder, target, tp=2, overwrite=True)
    assert "nothing to do" in run(folder, target)[0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint", "model"]


def test_all_that_the_result_depends_on_makes_it_another(tmp_path: Path) -> None:
    folder, target = make(tmp_path / "model"), tmp_path / "checkpoint"
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tools.jinja").touch()
    run(folder, target)
    for name in ("chat_template.jinja", "additional_chat_templates/tools.jinja", "config.json", FILE):
        assert "nothing to do" in run(folder, target)[0]
        with (folder / name).open("a") as file:
            file.write(" ")
        with pytest.raises(ModelError, match="made from something else"):
            run(folder, target)
        run(folder, target, overwrite=True)
