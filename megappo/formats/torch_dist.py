"""Megatron's checkpoint format ``torch_dist``, chunk by chunk, without Megatron and without process groups.

A folder holds ``__R_N.distcp`` files, each a row of ``torch.save`` archives, one a chunk; ``.metadata``, a pickle that
says which chunk of which tensor lies where (``torch.distributed.checkpoint``); ``common.pt`` and ``metadata.json``.

All are read and written without torch, whose import takes as long as a good part of a conversion; and so nothing in
the pickles can run code.
"""

from __future__ import annotations

import json
import pickle
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from megappo.formats import pickles
from megappo.formats.archives import Frame, archive, find_values, frame
from megappo.formats.dtypes import DTYPES, Dtype
from megappo.formats.stored import Stored
from megappo.models.spec import ModelError


class Place(NamedTuple):
    """Where an archive lies."""

    file: str
    position: int
    length: int


@dataclass(frozen=True)
class Chunk:
    """A block of a tensor of the checkpoint, as one archive."""

    key: str
    offset: tuple[int, ...]
    size: tuple[int, ...]
    dtype: Dtype
    place: Place

    def stored(self, folder: Path) -> tuple[Stored, int]:
        """Its values, and their CRC-32 (0 where it was not saved); only the archive's directory is read.

        Raises:
            ModelError: it is not a plain, contiguous tensor of this size, or the file is cut short.
        """
        path = folder / self.place.file
        try:
            with path.open("rb") as file:
                values = find_values(file, self.place.position, self.place.length, self.size)
            stored = Stored(path, values.position, self.dtype, self.size)
            if values.num_bytes != stored.num_bytes:
                raise ValueError(f"{values.num_bytes} bytes")
        except ValueError:
            raise ModelError(
                [f"{path}: holds {self.key} at {list(self.offset)} in a form that is not known: save it again"]
            ) from None
        except (OSError, zipfile.BadZipFile, pickle.UnpicklingError, LookupError, EOFError) as error:
            raise ModelError(
                [f"{path}: cannot be read at byte {self.place.position} ({error!r}): copy it again"]
            ) from None
        return stored, values.checksum

    @property
    def frame(self) -> Frame:
        """What is around the values of one that we write."""
        return frame(self.dtype, self.size)


class _Metadata(pickle.Unpickler):
    """Reads ``.metadata``: records instead of objects."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch", "Size"):
            return tuple
        if (module, name) == ("collections", "OrderedDict"):
            return dict
        if (module, name) == ("torch.serialization", "_get_layout"):
            return lambda name: name
        if module == "torch" and name in DTYPES:
            return DTYPES[name]
        return type(name, (pickles.Record,), {})


def read_chunks(folder: Path) -> tuple[dict[str, tuple[int, ...]], list[Chunk]]:
    """Shapes of all tensors of a checkpoint, by key, and their chunks.

    Raises:
        ModelError: no complete checkpoint in this format.
    """
    try:
        backend = json.loads((folder / "metadata.json").read_text())["sharded_backend"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        backend = "torch_dist"  # what plain torch writes has no such file
    if backend != "torch_dist":
        raise ModelError([f"{folder}: is in the format {backend!r}: save it as torch_dist (Megatron's --ckpt-format)"])
    try:
        with (folder / ".metadata").open("rb") as file:
            metadata = pickles.load(_Metadata(file))
        entries = {key: entry for key, entry in metadata.state_dict_metadata.items() if hasattr(entry, "chunks")}
        stored = {(at.fqn, at.offset): info for at, info in metadata.storage_data.items() if at.fqn in entries}
        shapes = {key: tuple(entry.size) for key, entry in entries.items()}
        chunks = [
            _chunk(key, part, entry.properties.state[0], stored[key, part.offsets])
            for key, entry in entries.items()
            for part in entry.chunks
        ]
    except FileNotFoundError:
        raise ModelError([f"{folder}: has no .metadata, so it is no complete checkpoint: give another"]) from None
    except (OSError, EOFError, pickle.UnpicklingError, LookupError, AttributeError, TypeError, ValueError) as error:
        raise ModelError([f"{folder}/.metadata: cannot be read ({error!r}): copy the checkpoint again"]) from None
    problems = [
        f"{folder}: tensor {key} is stored through {info.transform_descriptors}: save it plainly"
        for (key, _), info in stored.items()
        if getattr(info, "transform_descriptors", None)
    ]
    places = sorted(chunk.place for chunk in chunks)
    if any(a.file == b.file and a.position + a.length > b.position for a, b in pairwise(places)):
        problems.append(f"{folder}/.metadata: has several chunks at one place: copy the checkpoint again")
    files = {chunk.place.file for chunk in chunks}
    problems += [
        f"{folder}: lacks {name}: copy the checkpoint again" for name in files if not (folder / name).is_file()
    ]
    if problems:
        raise ModelError(sorted(set(problems)))
    return shapes, chunks


def _chunk(key: str, part: Any, dtype: Dtype, info: Any) -> Chunk:
    """A chunk as the metadata has it; its parts may be of any type.

    Raises:
        TypeError, AttributeError: they are of another.
    """
    place = Place(info.relative_path, info.offset, info.length)
    numbers = (*part.offsets, *part.sizes, place.position, place.length)
    if not all(type(number) is int and number >= 0 for number in numbers) or not isinstance(place.file, str):
        raise TypeError(f"{key} at {part.offsets} in {place}")
    return Chunk(key, part.offsets, part.sizes, dtype, place)


class ChunkFile:
    """A ``.distcp`` file that is being laid out."""

    def __init__(self, name: str) -> None:
        self.name, self.length = name, 0

    def reserve(self, key: str, offset: tuple[int, ...], size: tuple[int, ...], dtype: Dtype) -> Chunk:
        """Lay out a chunk, whose frame and values are to be written."""
        return Chunk(key, offset, size, dtype, self.append(frame(dtype, size).length))

    def append(self, length: int) -> Place:
        """Lay out an archive."""
        place = Place(self.name, self.length, length)
        self.length += length
        return place


NOTHING = archive([None])
"""The archive of an empty extra state."""

_METADATA = "torch.distributed.checkpoint.metadata"


def write_metadata(
    folder: Path,
    shapes: dict[str, tuple[int, ...]],
    chunks: Iterable[Chunk],
    objects: dict[str, Place],
) -> None:
    """Make a folder a checkpoint, once all of its chunks are in their files.

    Args:
        shapes: of the tensors, by key.
        objects: what is no tensor, by key with its place among its like (``.../shard_0_4``).
    """
    parts: dict[str, list[Any]] = {key: [] for key in shapes}
    entries: dict[str, Any] = {key: _instance(f"{_METADATA}.BytesStorageMetadata") for key in objects}
    storage = {_index(key, None): _info(place) for key, place in objects.items()}
    for chunk in chunks:
        if not parts[chunk.key]:
            entries[chunk.key] = _instance(
                f"{_METADATA}.TensorStorageMetadata",
                properties=_properties(chunk.dtype),
                size=_size(shapes[chunk.key]),
                chunks=parts[chunk.key],
            )
        offset = _size(chunk.offset)
        parts[chunk.key].append(_instance(f"{_METADATA}.ChunkStorageMetadata", offsets=offset, sizes=_size(chunk.size)))
        storage[_index(chunk.key, offset)] = _info(chunk.place)
    metadata = _instance(
        f"{_METADATA}.Metadata",
        state_dict_metadata=entries,
        planner_data=None,
        storage_data=storage,
        storage_meta=_instance(f"{_METADATA}.StorageMeta", checkpoint_id=None, save_id=None, load_id=None, modules=[]),
        version="1.0.0",
    )
    (folder / "common.pt").write_bytes(archive({"content_metadata": {}}))
    backends = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
    (folder / "metadata.json").write_text(
        json.dumps({**backends, "common_backend": "torch", "common_backend_version": 1})
    )
    (folder / ".metadata").write_bytes(pickles.dumps(metadata))


def _instance(path: str, **fields: Any) -> Any:
    return pickles.named(path)(fields or None)


def _size(numbers: tuple[int, ...]) -> pickles.Call:
    return pickles.Call("torch.Size", numbers)


def _index(key: str, offset: pickles.Call | None) -> Any:
    return _instance(f"{_METADATA}.MetadataIndex", fqn=key, offset=offset, index=None)


def _info(place: Place) -> Any:
    fields = {"relative_path": place.file, "offset": place.position, "length": place.length}
    return _instance("torch.distributed.checkpoint.filesystem._StorageInfo", **fields)


def _properties(dtype: Dtype) -> Any:
    layout = pickles.Call("torch.serialization._get_layout", "torch.strided")
    memory_format = pickles.Call(f"{_METADATA}._MEM_FORMAT_ENCODING", 0)
    state = (pickles.named(f"torch.{dtype}"), layout, False, memory_format, False)
    return pickles.named(f"{_METADATA}.TensorProperties")(state)
