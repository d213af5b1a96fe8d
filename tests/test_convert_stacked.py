"""Checkpoints as plain torch saves them, with all layers in one chunk: shared, bounded and proven part by part."""

from __future__ import annotations

import multiprocessing
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
import torch
from test_convert import assert_same_weights, make, peak_mib, problems, run

from megappo.convert import from_checkpoint, share
from megappo.formats.checksums import joined
from megappo.formats.torch_dist import read_chunks

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def load_whole(checkpoint: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint in bfloat16, by key."""
    import torch.distributed.checkpoint as dcp

    shapes, _ = read_chunks(checkpoint)
    whole = {key: torch.empty(shape, dtype=torch.bfloat16) for key, shape in shapes.items()}
    dcp.load(whole, checkpoint_id=checkpoint, no_dist=True)
    return whole


def save_whole(tensors: dict[str, torch.Tensor], folder: Path) -> Path:
    """A checkpoint with one chunk a tensor; returns its folder."""
    import torch.distributed.checkpoint as dcp

    dcp.save(tensors, checkpoint_id=folder, no_dist=True)
    return folder


def save_plainly(checkpoint: Path, target: Path) -> Path:
    """The same tensors, each as one chunk."""
    return save_whole(load_whole(checkpoint), target)


def test_a_checksum_of_parts_is_that_of_the_whole() -> None:
    rng = random.Random(0)
    for _ in range(100):
        parts = [rng.randbytes(rng.choice([0, 1, 3, 100, 70_000])) for _ in range(rng.randrange(6))]
        assert joined((crc32(part), len(part)) for part in parts) == crc32(b"".join(parts))


def test_work_is_shared_by_parameters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not by chunks, of which one may be half of the model."""
    folder = make(tmp_path / "model", num_hidden_layers=4)
    run(folder, tmp_path / "checkpoint", tp=2)
    seen: list[int] = []

    def shared(work: Callable[[Any], Any], items: Sequence[Any], sizes: Sequence[int], *rest: Any, **more: Any) -> Any:
        seen.extend(sizes)
        return share.shared(work, items, sizes, *rest, **more)

    monkeypatch.setattr(from_checkpoint, "shared", shared)
    plain = save_plainly(tmp_path / "checkpoint", tmp_path / "plain")
    run(plain, tmp_path / "back", model=str(folder), processes=3)
    assert_same_weights(folder, tmp_path / "back")
    assert max(seen) == 2 * 96 * 64 * 2  # up and gate projection of one layer


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("layer", [0, 2])
def test_damage_to_any_layer_is_seen(tmp_path: Path, layer: int, processes: int) -> None:
    folder = make(tmp_path / "model", num_hidden_layers=3)
    run(folder, tmp_path / "checkpoint")
    plain = save_plainly(tmp_path / "checkpoint", tmp_path / "plain")
    chunk = next(one for one in read_chunks(plain)[1] if one.key == "decoder.layers.mlp.linear_fc2.weight")
    stored, saved = chunk.stored(plain)
    assert saved and chunk.size[0] == 3
    with stored.path.open("rb+") as file:
        file.seek(stored.position + layer * stored.num_bytes // 3 + 100)
        file.write(b"\x01\x02")
    names = ", ".join(f"model.layers.{number}.mlp.down_proj.weight" for number in range(3))
    said = problems(plain, tmp_path / "back", model=str(folder), processes=processes)
    assert said == f"{stored.path}: {names}: is damaged (other bytes than were saved): copy the checkpoint again"


def test_memory_does_not_grow_with_a_chunk(tmp_path: Path) -> None:
    """One of 50 MB."""
    folder = make(tmp_path / "model", num_hidden_layers=12, hidden_size=256, intermediate_size=4096)
    run(folder, tmp_path / "checkpoint")
    plain = save_plainly(tmp_path / "checkpoint", tmp_path / "plain")
    largest = max(read_chunks(plain)[1], key=lambda chunk: chunk.place.length)
    assert largest.place.length > 50 * 10**6
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    options = {"dtype": "float32", "model": str(folder)}
    process = context.Process(target=peak_mib, args=(plain, tmp_path / "back", options, theirs), daemon=True)
    process.start()
    theirs.close()
    assert ours.recv() < 30
    process.join()
