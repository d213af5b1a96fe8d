"""Conversions that go wrong: damaged files, destinations that would fail late, other processes, signals."""

from __future__ import annotations

import io
import json
import os
import pickle
import random
import shutil
import signal
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from test_convert import assert_same_weights, make, problems, run, weights

from megappo.convert import destination, to_megatron
from megappo.convert.to_hugging_face import ToHuggingFace
from megappo.formats.archives import find_values
from megappo.formats.safetensors_files import find_tensors
from megappo.formats.torch_dist import read_chunks, write_metadata
from megappo.models.spec import ModelError

# --- damaged files --------------------------------------------------------------------------------------------------


def test_chunks_that_overlap_are_not_taken_for_the_whole(tmp_path: Path) -> None:
    """As many elements as there should be, but some twice and others not at all."""
    run(make(tmp_path / "model"), checkpoint := tmp_path / "checkpoint", tp=2)
    shapes, chunks = read_chunks(checkpoint)
    key = "decoder.layers.mlp.linear_fc2.weight"
    number, chunk = next(
        (number, chunk) for number, chunk in enumerate(chunks) if chunk.key == key and chunk.offset[-1]
    )
    for other in (replace(chunk, offset=(0, 0, 1)), replace(chunk, offset=(1000, 0, 0))):
        write_metadata(checkpoint, shapes, [*chunks[:number], other, *chunks[number + 1 :]], {})
        assert f"chunks of {key} overlap or lie outside of it" in problems(checkpoint, tmp_path / "back")
    near = chunk.place._replace(position=chunk.place.position - 1)
    for other in (replace(chunk, place=chunks[0].place), replace(chunk, place=near)):
        write_metadata(checkpoint, shapes, [*chunks[:number], other, *chunks[number + 1 :]], {})
        assert ".metadata: has several chunks at one place" in problems(checkpoint, tmp_path / "back")


def test_a_damaged_metadata_is_an_error_or_of_no_effect(tmp_path: Path) -> None:
    folder = make(tmp_path / "model")
    run(folder, checkpoint := tmp_path / "checkpoint", tp=2)

    def parts() -> list[Any]:
        found = ToHuggingFace(checkpoint, folder, None, 2**30, 2**20).parts
        return sorted((part.tensor.name, part.offset, part.size, part.index) for part in found)

    whole, expected = (checkpoint / ".metadata").read_bytes(), parts()
    random.seed(0)
    refused = 0
    for _ in range(200):
        content = bytearray(whole)
        changed = random.choice([place for place, byte in enumerate(whole) if byte])  # zeros would be huge numbers
        content[changed] = random.choice(b"\x00\x01\x40\x80\x95J(R.}")
        (checkpoint / ".metadata").write_bytes(content)
        try:
            assert parts() == expected
        except ModelError:
            refused += 1
    assert refused > 50


def test_nothing_in_a_pickle_is_run(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
            return os.system, (f"touch {tmp_path}/ran",)

    run(make(tmp_path / "model"), checkpoint := tmp_path / "checkpoint")
    (checkpoint / ".metadata").write_bytes(pickle.dumps(Evil()))
    assert ".metadata: cannot be read" in problems(checkpoint, tmp_path / "back")
    with zipfile.ZipFile(saved := io.BytesIO(), "w") as tensor:
        tensor.writestr("archive/data.pkl", pickle.dumps(Evil()))
        tensor.writestr("archive/data/0", b"\0" * 4)
    with pytest.raises(pickle.UnpicklingError, match="system in a tensor"):
        find_values(saved, 0, len(saved.getvalue()), (1,))
    assert not (tmp_path / "ran").exists()


def test_a_header_must_fit_its_file(tmp_path: Path) -> None:
    """Places that are not where they should be would be other weights."""
    path = make(tmp_path / "model") / "model.safetensors"
    whole = path.read_bytes()
    length = int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8 : 8 + length])
    name = "model.layers.0.mlp.up_proj.weight"
    begin, end = header[name]["data_offsets"]

    def said(**changes: Any) -> str:
        text = json.dumps({**header, name: {**header[name], **changes}}).encode()
        path.write_bytes(len(text).to_bytes(8, "little") + text + whole[8 + length :])
        return problems(path.parent, tmp_path / "checkpoint")

    assert f"tensor {name}: begins at {begin + 2} instead of {begin}" in said(data_offsets=[begin + 2, end + 2])
    assert f"tensor {name}: has {end - begin} bytes, not those of BF16 [96, 63]" in said(shape=[96, 63])
    assert f"tensor {name}: its shape is [-96, -64]" in said(shape=[-96, -64])
    path.write_bytes((2**62).to_bytes(8, "little") + whole[8:])
    assert "header of 4611686018427387904 bytes" in problems(path.parent, tmp_path / "checkpoint")
    path.write_bytes(whole)
    assert list(find_tensors(path.parent)) == [key for key in header if key != "__metadata__"]


# --- another dtype ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("processes", [1, 2])
def test_no_finite_value_becomes_infinite(tmp_path: Path, processes: int) -> None:
    """float16 ends at 65504; 65519 is rounded to that, and 65520 to infinity. What is infinite or NaN already stays."""
    name, options = "model.layers.1.mlp.up_proj.weight", {"dtype": "float16", "processes": processes}
    folder, target = make(tmp_path / "model"), tmp_path / "checkpoint"

    def put(**places: float) -> None:
        whole = {key: tensor.float() for key, tensor in weights(folder).items()}
        for place, value in places.items():
            whole[name][int(place[1:])][3] = value
        save_file(whole, folder / "model.safetensors", {"format": "pt"})

    put(r0=-65520.0, r90=70000.0, r91=torch.inf)
    words = "has values of up to 70000 (absolute), and float16 ends at 65504, so that they would become infinite: give"
    assert problems(folder, target, **options) == f"{folder}: tensor {name} {words} --dtype bfloat16 or float32"
    run(folder, target, tp=2, bucket_mb=1)
    assert problems(target, tmp_path / "back", **options) == (
        f"{target}: tensor {name} {words} --dtype bfloat16 or float32"
    )
    put(r0=3.4e38, r90=0.0, r91=0.0)  # bfloat16 ends at 3.39e38
    said = problems(folder, tmp_path / "other", dtype="bfloat16", processes=processes)
    assert "values of up to 3.4e+38 (absolute), and bfloat16 ends at 3.38953e+38" in said
    assert said.endswith("give --dtype float32")
    put(r0=65519.0, r1=-torch.inf, r90=torch.nan, r91=torch.inf)
    expected = weights(folder)[name].half()
    run(folder, target, overwrite=True, **options)
    run(target, tmp_path / "back")
    kept = weights(tmp_path / "back")[name]
    assert kept[0, 3] == 65504 and kept[1, 3] == -torch.inf and kept[90, 3].isnan() and kept[91, 3] == torch.inf
    assert torch.equal(kept.view(torch.int16), expected.view(torch.int16))


# --- permissions ----------------------------------------------------------------------------------------------------


def test_what_may_not_be_looked_at_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied", "model/config.json")

    for name in ("find_source", "ToMegatron"):
        monkeypatch.setattr(f"megappo.convert.command.{name}", refuse)
        assert problems(make(tmp_path / "model"), tmp_path / "checkpoint") == (
            "model/config.json: cannot be read (Permission denied): change its permissions, or copy it again"
        )
        monkeypatch.undo()


# --- the source changes ---------------------------------------------------------------------------------------------


def test_a_source_that_changes_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make(tmp_path / "model")
    weights = folder / "model.safetensors"
    for change, words in (
        (lambda: os.utime(weights), "model: was changed while it was read: give the same command again"),
        (lambda: os.truncate(weights, 5000), "model.safetensors: cannot be read (it ends before byte"),
        (weights.unlink, "model.safetensors: cannot be read ([Errno 2] No such file or directory"),
    ):
        monkeypatch.setattr(to_megatron, "prepare", lambda _, change=change: change())  # before the first byte is read
        assert words in problems(folder, tmp_path / "checkpoint")
        make(folder)


# --- the destination ------------------------------------------------------------------------------------------------


def test_destinations_that_would_fail_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make(tmp_path / "model")
    (tmp_path / "mine.partial").mkdir()
    (tmp_path / "mine.partial" / "thesis.tex").write_text("years")
    (tmp_path / "cwd").mkdir()
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "linked.partial").symlink_to("cwd")
    shutil.copytree(folder, tmp_path / "source.partial")
    monkeypatch.chdir(tmp_path / "cwd")
    monkeypatch.setattr(Path, "is_mount", lambda path: path.name == "disk")
    for source, target, words in (
        (folder, "s3://bucket/model", "s3://bucket/model: is a URL: give a folder here as DST"),
        (folder, ".", "is the current directory: name a folder in it"),
        (folder, tmp_path / "disk", "is where a disk is mounted"),
        (folder, "x" * 300, "File name too long"),
        (folder, tmp_path / "mine", "mine.partial: is in the way, and not from a conversion"),
        (tmp_path / "source.partial", tmp_path / "source", "source.partial: was not finished"),
        (folder, tmp_path / "new.partial", "new.partial: ends in .partial, as what is not finished does"),
        (folder, "/", "/: is the root of all folders: name a folder in it"),
        (folder, tmp_path / "loop" / "new", "cannot be a folder (Symlink loop"),
        (folder, tmp_path / "linked", "linked.partial: is in the way, and not from a conversion"),
    ):
        with pytest.raises(ModelError) as caught:
            run(source, target)
        assert words in str(caught.value)
    assert (tmp_path / "mine.partial" / "thesis.tex").is_file()
    assert (tmp_path / "source.partial" / "model.safetensors").is_file()
    run(folder, tmp_path / "checkpoint")
    for limit in (float("nan"), float("inf")):
        assert f"--shard-gb {limit}: must be positive" in problems(
            tmp_path / "checkpoint", tmp_path / "back", shard_gb=limit
        )


def test_a_link_is_followed(tmp_path: Path) -> None:
    """To a larger disk, say: the folder is made there."""
    (tmp_path / "there").mkdir()
    for name in ("there", "new"):
        (tmp_path / "link").symlink_to(tmp_path / name)
        run(make(tmp_path / "model"), tmp_path / "link")
        assert (tmp_path / name / ".metadata").is_file() and not (tmp_path / name).is_symlink()
        (tmp_path / "link").unlink()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "new", "there"]


def test_nothing_to_do_only_if_all_is_as_it_was(tmp_path: Path) -> None:
    folder, target = make(tmp_path / "model"), tmp_path / "checkpoint"
    run(folder, target)
    (file,) = target.glob("*.distcp")
    os.truncate(file, 100)
    with pytest.raises(ModelError, match="is there already, made from something else or changed since"):
        run(folder, target)
    # What a conversion that was killed just after its end had yet to remove.
    shutil.copytree(target, tmp_path / "checkpoint.partial.old")
    run(folder, target, overwrite=True)
    assert not (tmp_path / "checkpoint.partial.old").exists()
    run(target, tmp_path / "back")
    assert_same_weights(folder, tmp_path / "back")
    assert "nothing to do" in run(folder, target)[0]
    (folder / "chat_template.jinja").write_text("another")
    run(folder, target, overwrite=True)
    assert (target / "huggingface" / "chat_template.jinja").read_text() == "another"


def test_another_begins_while_the_first_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, target = make(tmp_path / "model"), tmp_path / "checkpoint"
    sync = destination.sync_tree

    def meanwhile(partial: Path) -> None:
        with pytest.raises(ModelError, match="another process is writing it"):
            run(folder, target)
        sync(partial)

    monkeypatch.setattr(destination, "sync_tree", meanwhile)
    run(folder, target)
    assert not (target / destination.LOCK).exists()
    monkeypatch.undo()
    run(target, tmp_path / "back")
    assert_same_weights(folder, tmp_path / "back")


@pytest.mark.parametrize("processes", ["1", "2"])
def test_a_terminated_conversion_leaves_nothing(tmp_path: Path, processes: str) -> None:
    script = (
        "import os, signal, sys\n"
        "from megappo.convert import to_megatron\n"
        "to_megatron.write_metadata = lambda *_: os.kill(os.getpid(), signal.SIGTERM)\n"
        "from megappo.cli import main\n"
        "sys.exit(main(['convert', *sys.argv[1:]]))\n"
    )
    folder = make(tmp_path / "model")
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parent.parent)}
    command = [sys.executable, "-c", script, str(folder), str(tmp_path / "out"), "--processes", processes]
    assert subprocess.run(command, env=environment, check=False).returncode == 130
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def run_to_the_end(script: str) -> subprocess.CompletedProcess[bytes]:
    """A process and those that it started: their output ends when the last of them does."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parent.parent)}
    return subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, timeout=20, check=False)


def test_nobody_waits_for_a_process_that_is_gone() -> None:
    """Those that shared its work end too, also with more to tell than a pipe takes: they hold the lock till then."""
    script = (
        "import os, signal, time\n"
        "from megappo.convert.share import shared\n"
        "def work(number):\n"
        "    time.sleep(0.5 * number)\n"
        "    if number == 0:\n"
        "        os.kill(os.getppid(), signal.SIGKILL)\n"
        "    return bytes(2**20)\n"
        "shared(work, [0, 1, 2], [1, 1, 1], 3)\n"
    )
    done = run_to_the_end(script)
    assert done.returncode == -signal.SIGKILL and done.stderr == b""


def test_an_interrupt_is_for_whoever_shared_the_work() -> None:
    """Ctrl-C reaches the others too, be it before they have begun: they say nothing of it, and are ended with it."""
    script = (
        "import os, signal\n"
        "from megappo.convert.share import shared\n"
        "os.register_at_fork(after_in_child=lambda: os.kill(os.getpid(), signal.SIGINT))\n"
        "assert shared(lambda number: number, [1, 2, 3], [1, 1, 1], 3) == [1, 2, 3]\n"
    )
    done = run_to_the_end(script)
    assert (done.returncode, done.stderr) == (0, b"")
