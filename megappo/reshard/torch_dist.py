"""Megatron's checkpoint format ``torch_dist``, chunk by chunk, without Megatron and without process groups.

A folder holds ``__R_N.distcp`` files, each a row of ``torch.save`` archives, one a chunk; ``.metadata``, a pickle that
says which chunk of which tensor lies where (``torch.distributed.checkpoint``); ``common.pt`` and ``metadata.json``.

That pickle is read without torch's classes for it, whose import takes as long as a good part of a conversion; and so
nothing in it can run code.
"""

from __future__ import annotations

import io
import json
import pickle
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch

from megappo.models.spec import ModelError
from megappo.reshard.stored import Stored


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
    dtype: torch.dtype
    place: Place

    def stored(self, folder: Path) -> Stored:
        """Its values; only the archive's directory is read.

        Raises:
            ModelError: it is not a plain, contiguous tensor of this size, or the file is cut short.
        """
        path = folder / self.place.file
        try:
            with path.open("rb") as file, zipfile.ZipFile(_Window(file, self.place)) as archive:
                root = archive.namelist()[0].split("/")[0]
                header = _Header(archive.open(f"{root}/data.pkl")).load()
                record = archive.getinfo(f"{root}/data/0")
                begin = self.place.position + record.header_offset
                file.seek(begin + 26)
                name, extra = (int.from_bytes(file.read(2), "little") for _ in range(2))
        except (OSError, zipfile.BadZipFile, pickle.UnpicklingError, KeyError, IndexError, EOFError) as error:
            raise ModelError(
                [f"{path}: cannot be read at byte {self.place.position} ({error!r}): copy it again"]
            ) from None
        strides = tuple(prod(self.size[axis + 1 :]) for axis in range(len(self.size)))
        size = prod(self.size) * self.dtype.itemsize
        if header != (0, self.size, strides) or record.file_size != size or record.compress_type:
            raise ModelError(
                [f"{path}: holds {self.key} at {list(self.offset)} in a form that is not known: save it again"]
            )
        return Stored(path, begin + 30 + name + extra, self.dtype, self.size)


class _Header(pickle.Unpickler):
    """Reads (storage offset, size, strides) of a saved tensor, and makes nothing."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return lambda storage, offset, size, strides, *_: (offset, tuple(size), tuple(strides))
        if (module, name) == ("collections", "OrderedDict"):
            return dict
        if module == "torch" and name.endswith("Storage"):
            return name
        raise pickle.UnpicklingError(f"{module}.{name} in a tensor")

    def persistent_load(self, pid: Any) -> Any:
        return pid


class _Record:
    """Stands for an object of whatever class: its fields."""

    def __init__(self, *_: object) -> None:
        """Arguments of the other class are of no interest."""

    def __setstate__(self, state: Any) -> None:
        self.__dict__.update(state if isinstance(state, dict) else {"state": state})


class _Metadata(pickle.Unpickler):
    """Reads ``.metadata``: records instead of objects."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype | torch.layout):
            return found
        if (module, name) == ("torch", "Size"):
            return tuple
        if (module, name) == ("collections", "OrderedDict"):
            return dict
        if (module, name) == ("torch.serialization", "_get_layout"):
            return lambda name: name
        return type(name, (_Record,), {})


class _Window(io.RawIOBase):
    """A part of an open file, as a file."""

    def __init__(self, file: Any, place: Place) -> None:
        self.file, self.begin, self.length, self.at = file, place.position, place.length, 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self.at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self.at, io.SEEK_END: self.length}[whence]
        return self.at

    def readinto(self, buffer: Any) -> int:
        self.file.seek(self.begin + self.at)
        count = self.file.readinto(memoryview(buffer)[: max(self.length - self.at, 0)])
        self.at += count
        return count


def read_chunks(folder: Path) -> tuple[dict[str, tuple[int, ...]], list[Chunk]]:
    """Shapes of all tensors of a checkpoint, by key, and their chunks.

    Raises:
        ModelError: no complete checkpoint in this format.
    """
    try:
        backend = json.loads((folder / "metadata.json").read_text())["sharded_backend"]
    except (OSError, ValueError, KeyError, TypeError):
        backend = "torch_dist"  # what plain torch writes has no such file
    if backend != "torch_dist":
        raise ModelError([f"{folder}: is in the format {backend!r}: save it as torch_dist (Megatron's --ckpt-format)"])
    try:
        with (folder / ".metadata").open("rb") as file:
            metadata = _Metadata(file).load()
        entries = {key: entry for key, entry in metadata.state_dict_metadata.items() if hasattr(entry, "chunks")}
        stored = {(at.fqn, at.offset): info for at, info in metadata.storage_data.items() if at.fqn in entries}
        shapes = {key: tuple(entry.size) for key, entry in entries.items()}
        chunks = [
            Chunk(key, part.offsets, part.sizes, entry.properties.state[0], _place(stored[key, part.offsets]))
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
    files = {chunk.place.file for chunk in chunks}
    problems += [
        f"{folder}: lacks {name}: copy the checkpoint again" for name in files if not (folder / name).is_file()
    ]
    if problems:
        raise ModelError(sorted(set(problems)))
    return shapes, chunks


def _place(info: Any) -> Place:
    return Place(info.relative_path, info.offset, info.length)


class ChunkFile:
    """A ``.distcp`` file that is being laid out; a context manager."""

    def __init__(self, folder: Path, name: str) -> None:
        self.name = name
        self._file = (folder / name).open("wb")

    def __enter__(self) -> ChunkFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def reserve(self, key: str, offset: tuple[int, ...], size: tuple[int, ...], dtype: torch.dtype) -> Chunk:
        """Make room for a chunk: its archive, with zeros (a hole in the file) where :meth:`Chunk.stored` is."""
        with torch.serialization.skip_data():
            return Chunk(key, offset, size, dtype, self.append(torch.empty(size, dtype=dtype)))

    def append(self, value: Any) -> Place:
        """Write an object as one archive."""
        begin = self._file.tell()
        torch.save(value, self._file)
        return Place(self.name, begin, self._file.tell() - begin)


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
    from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
    from torch.distributed.checkpoint.metadata import (
        BytesStorageMetadata,
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        StorageMeta,
        TensorProperties,
        TensorStorageMetadata,
    )

    entries: dict[str, Any] = {key: BytesStorageMetadata() for key in objects}
    storage = {MetadataIndex(key): _StorageInfo(*place) for key, place in objects.items()}
    for chunk in chunks:
        properties = TensorProperties(dtype=chunk.dtype)
        entry = entries.setdefault(chunk.key, TensorStorageMetadata(properties, torch.Size(shapes[chunk.key]), []))
        entry.chunks.append(ChunkStorageMetadata(torch.Size(chunk.offset), torch.Size(chunk.size)))
        storage[MetadataIndex(chunk.key, torch.Size(chunk.offset))] = _StorageInfo(*chunk.place)
    metadata = Metadata(entries, storage_data=storage, storage_meta=StorageMeta(), version=CURRENT_DCP_VERSION)
    torch.save({"content_metadata": {}}, folder / "common.pt")
    backends = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
    (folder / "metadata.json").write_text(
        json.dumps({**backends, "common_backend": "torch", "common_backend_version": 1})
    )
    with (folder / ".metadata").open("wb") as file:
        pickle.dump(metadata, file)
