"""What is written in torch's formats without torch: the same as torch itself would have written."""

from __future__ import annotations

import io
import os
import pickle
import zipfile
from pathlib import Path
from zlib import crc32

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from megappo.formats.archives import archive, find_values, frame
from megappo.formats.dtypes import DTYPES
from megappo.formats.torch_dist import Chunk, Place, read_chunks, write_metadata
from megappo.models.spec import ModelError

FLOATS = st.sampled_from(["float32", "float16", "bfloat16"])


@given(FLOATS, st.lists(st.integers(1, 9), min_size=1, max_size=4).map(tuple), st.binary(max_size=70))
def test_torch_loads_an_archive(name: str, size: tuple[int, ...], before: bytes) -> None:
    tensor = torch.randn(size).to(DTYPES[name].torch)
    values, around = tensor.view(-1).view(torch.uint8).numpy().tobytes(), frame(DTYPES[name], size)
    content = around.front + values + around.back(crc32(values))
    assert len(content) == around.length and len(around.front) % 64 == 0
    for weights_only in (True, False):
        loaded = torch.load(io.BytesIO(content), weights_only=weights_only)
        assert loaded.dtype == tensor.dtype and torch.equal(loaded, tensor)
    assert zipfile.ZipFile(io.BytesIO(content)).testzip() is None  # which reads every record and its checksum
    ours = find_values(io.BytesIO(before + content + before), len(before), len(content), size)
    assert ours == (len(before) + len(around.front), len(values), crc32(values))
    torch.save(tensor, saved := io.BytesIO())
    theirs = find_values(saved, 0, len(saved.getvalue()), size)
    assert theirs.checksum == crc32(values)
    assert saved.getvalue()[theirs.position :][: theirs.num_bytes] == values


def test_strides_of_single_rows_say_nothing() -> None:
    """As torch.save writes them after ``clone()`` of a row of a larger tensor."""
    tensor = torch.arange(8.0).view(1, 8)[:, :4].clone(memory_format=torch.preserve_format).as_strided((1, 4), (8, 1))
    torch.save(tensor, saved := io.BytesIO())
    found = find_values(saved, 0, len(saved.getvalue()), (1, 4))
    assert saved.getvalue()[found.position :][: found.num_bytes] == tensor.numpy().tobytes()
    for other in (torch.zeros(4, 2).T, torch.zeros(4, 4)[:, :2], torch.zeros(2, 5)[:, :4]):
        torch.save(other, saved := io.BytesIO())
        with pytest.raises(ValueError, match="no plain tensor"):
            find_values(saved, 0, len(saved.getvalue()), tuple(other.shape))


@pytest.mark.parametrize("by_torch", [True, False])
@pytest.mark.parametrize("mask", [0xFF, 0x01, 0x40])
def test_any_damaged_byte_around_the_values_is_said(tmp_path: Path, by_torch: bool, mask: int) -> None:
    """Or is of no matter, or leaves another checksum than that of the values, which is compared where they are read."""
    tensor = torch.arange(6, dtype=torch.float32).view(2, 3) + 0.1
    values = tensor.numpy().tobytes()
    around = frame(DTYPES["float32"], (2, 3))
    torch.save(tensor, saved := io.BytesIO())
    whole = saved.getvalue() if by_torch else around.front + values + around.back(crc32(values))
    path, before = tmp_path / "__0_0.distcp", b"before"
    chunk = Chunk("a.weight", (0, 0), (2, 3), DTYPES["float32"], Place(path.name, len(before), len(whole)))
    path.write_bytes(before + whole + b"behind")
    right = chunk.stored(tmp_path)
    assert right[1] == crc32(values)
    said = 0
    with path.open("rb+", buffering=0) as file:
        for at in range(len(before), len(before) + len(whole)):
            if right[0].position <= at < right[0].position + len(values):
                continue
            os.pwrite(file.fileno(), bytes([whole[at - len(before)] ^ mask]), at)
            try:
                stored, checksum = chunk.stored(tmp_path)
                read = os.pread(file.fileno(), len(values), stored.position)
                assert read == values or checksum not in (0, crc32(read))
            except ModelError as error:
                assert str(error).startswith(f"{path}: ")
                said += 1
            os.pwrite(file.fileno(), whole[at - len(before) :][:1], at)
    assert chunk.stored(tmp_path) == right and said > 100


@pytest.mark.parametrize("value", [[None], {"content_metadata": {}}])
def test_torch_loads_an_object(value: object) -> None:
    assert torch.load(io.BytesIO(archive(value))) == value


def test_torch_reads_the_metadata(tmp_path: Path) -> None:
    """Its own classes, with the very fields that they would have."""
    chunks = [
        Chunk("a.weight", (row, 0), (2, 3), DTYPES["bfloat16"], Place("__0_0.distcp", 100 * row, 90)) for row in (0, 2)
    ]
    write_metadata(tmp_path, {"a.weight": (4, 3)}, chunks, {"a._extra_state/shard_0_1": Place("__0_0.distcp", 400, 9)})
    with (tmp_path / ".metadata").open("rb") as file:
        found = pickle.load(file)
    parts = [ChunkStorageMetadata(torch.Size([row, 0]), torch.Size([2, 3])) for row in (0, 2)]
    tensor = TensorStorageMetadata(TensorProperties(torch.bfloat16), torch.Size([4, 3]), parts)
    places = {
        MetadataIndex("a.weight", torch.Size([row, 0])): _StorageInfo("__0_0.distcp", 100 * row, 90) for row in (0, 2)
    }
    expected = Metadata(
        {"a.weight": tensor, "a._extra_state/shard_0_1": BytesStorageMetadata()},
        storage_data={MetadataIndex("a._extra_state/shard_0_1"): _StorageInfo("__0_0.distcp", 400, 9), **places},
        storage_meta=StorageMeta(),
        version="1.0.0",
    )
    assert found == expected
    assert vars(found.storage_data[MetadataIndex("a.weight", torch.Size([2, 0]))]) == {
        "relative_path": "__0_0.distcp",
        "offset": 200,
        "length": 90,
    }
    assert type(found.state_dict_metadata["a.weight"].size) is torch.Size
    (tmp_path / "__0_0.distcp").touch()
    assert read_chunks(tmp_path) == ({"a.weight": (4, 3)}, chunks)


@pytest.mark.parametrize("place", [Place("a", -1, 9), Place("a", 0, -9), Place([], 0, 9), Place("a", "b", 9)])  # type: ignore[arg-type]
def test_a_place_that_is_none_is_said(tmp_path: Path, place: Place) -> None:
    write_metadata(tmp_path, {"a": (2,)}, [Chunk("a", (0,), (2,), DTYPES["bfloat16"], place)], {})
    (tmp_path / "a").touch()
    with pytest.raises(ModelError, match=r"\.metadata: cannot be read \("):
        read_chunks(tmp_path)


def test_a_damaged_metadata_is_said(tmp_path: Path) -> None:
    """Whatever a wrong byte makes of the pickle: a size of 10^18 bytes, say."""
    (tmp_path / ".metadata").write_bytes(pickle.PROTO + b"\4" + pickle.BINBYTES8 + (2**63).to_bytes(8, "little"))
    with pytest.raises(ModelError, match=r"\.metadata: cannot be read \(.*OverflowError"):
        read_chunks(tmp_path)
