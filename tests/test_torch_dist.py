"""What is written in torch's formats without torch: the same as torch itself would have written."""

from __future__ import annotations

import io
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

from megappo.reshard.archives import archive, find_values, frame
from megappo.reshard.dtypes import DTYPES
from megappo.reshard.torch_dist import Chunk, Place, read_chunks, write_metadata

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
