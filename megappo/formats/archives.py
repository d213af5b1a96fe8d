"""Archives of one tensor or small object as ``torch.save`` writes them, made and opened without torch.

An archive is a zip file of plain records: a pickle that says what the tensor is, and its values, with their CRC-32.
"""

from __future__ import annotations

import io
import pickle
import struct
import zipfile
from functools import cache
from math import prod
from typing import Any, BinaryIO, NamedTuple
from zlib import crc32

from megappo.formats import pickles
from megappo.formats.dtypes import FLOATS, Dtype
from megappo.formats.stored import strides

ALIGNMENT = 64
"""Of each record's content in the archive, as torch has it."""

LIMIT = 2**31
"""Bytes of values from which on a zip file would need a longer form."""

_HEADER = struct.Struct("<4s5H3I2H")
_DESCRIPTOR = struct.Struct("<4s3I")
_ENTRY = struct.Struct("<4s6H3I5H2I")
_END = struct.Struct("<4s4H2IH")
_SIZES_FOLLOW = 0x8
"""Checksum and sizes of a record are behind its content, so that it is written in one go."""


class _Record(NamedTuple):
    name: bytes
    begin: int
    checksum: int
    size: int

    def header(self) -> bytes:
        padding = -(self.begin + _HEADER.size + len(self.name) + 4) % ALIGNMENT
        extra = struct.pack("<2sH", b"FB", padding) + bytes(padding)
        head = _HEADER.pack(b"PK\3\4", 0, _SIZES_FOLLOW, 0, 0, 0, 0, 0, 0, len(self.name), len(extra))
        return head + self.name + extra

    def descriptor(self) -> bytes:
        return _DESCRIPTOR.pack(b"PK\7\10", self.checksum, self.size, self.size)

    def entry(self) -> bytes:
        numbers = (0, 0, _SIZES_FOLLOW, 0, 0, 0, self.checksum, self.size, self.size, len(self.name), 0, 0, 0, 0, 0)
        return _ENTRY.pack(b"PK\1\2", *numbers, self.begin) + self.name


class Frame(NamedTuple):
    """What an archive has around a tensor's values.

    Attributes:
        front: what comes before them.
        records: those in it.
        num_bytes: of the values.
    """

    front: bytes
    records: tuple[_Record, ...]
    num_bytes: int

    def back(self, checksum: int) -> bytes:
        """What comes behind values with this CRC-32."""
        *before, values = self.records
        values = values._replace(checksum=checksum)
        return _close([*before, values], values.descriptor(), len(self.front) + self.num_bytes)

    @property
    def length(self) -> int:
        """Of the whole archive."""
        return len(self.front) + self.num_bytes + len(self.back(0))


@cache
def frame(dtype: Dtype, size: tuple[int, ...]) -> Frame:
    """The frame of a contiguous tensor of 16- or 32-bit floats."""
    storage = pickles.Persistent(("storage", pickles.named(f"torch.{FLOATS[dtype]}"), "0", "cpu", prod(size)))
    nothing = pickles.Call("collections.OrderedDict")
    content = pickles.dumps(
        pickles.Call("torch._utils._rebuild_tensor_v2", storage, 0, size, strides(size), False, nothing)
    )
    records, front = _open(content)
    values = _Record(b"archive/data/0", len(front), 0, prod(size) * dtype.itemsize)
    return Frame(front + values.header(), (*records, values), values.size)


def archive(value: Any) -> bytes:
    """The whole archive of a small object that is no tensor."""
    records, front = _open(pickles.dumps(value))
    return front + _close(records, b"", len(front))


def _open(content: bytes) -> tuple[list[_Record], bytes]:
    records: list[_Record] = []
    out = _append(records, "data.pkl", content, 0)
    return records, out + _append(records, "byteorder", b"little", len(out))


def _append(records: list[_Record], name: str, content: bytes, begin: int) -> bytes:
    record = _Record(f"archive/{name}".encode(), begin, crc32(content), len(content))
    records.append(record)
    return record.header() + content + record.descriptor()


def _close(records: list[_Record], out: bytes, begin: int) -> bytes:
    """The end of an archive, of which there are ``begin`` bytes before ``out``."""
    records = records.copy()
    out += _append(records, "version", b"3\n", begin + len(out))
    directory = b"".join(record.entry() for record in records)
    count = len(records)
    return out + directory + _END.pack(b"PK\5\6", 0, 0, count, count, len(directory), begin + len(out), 0)


class Values(NamedTuple):
    """Where the values of a tensor are in a file.

    Attributes:
        checksum: their CRC-32; 0 where whoever wrote them left it out.
    """

    position: int
    num_bytes: int
    checksum: int


def find_values(file: BinaryIO, position: int, length: int, size: tuple[int, ...]) -> Values:
    """Open the archive of a contiguous tensor; its values are not read.

    Raises:
        OSError, EOFError, LookupError, zipfile.BadZipFile, pickle.UnpicklingError: it cannot be read.
        ValueError: it holds something else, or compressed.
    """
    try:
        with zipfile.ZipFile(_Window(file, position, length)) as directory:
            root = directory.namelist()[0].split("/")[0]
            header, values = (directory.getinfo(f"{root}/{name}") for name in ("data.pkl", "data/0"))
        file.seek(_content(file, position, header))
        content = file.read(min(header.file_size, length))
        if header.CRC not in (0, crc32(content)):
            raise zipfile.BadZipFile("other bytes than were saved")
        tensor = pickles.load(_Tensor(io.BytesIO(content)))
        begin = _content(file, position, values)
    except _DAMAGED as error:
        raise zipfile.BadZipFile(repr(error)) from None
    if not _is_plain(tensor, size) or header.compress_type or values.compress_type:
        raise ValueError("no plain tensor of this size")
    return Values(begin, values.file_size, values.CRC)


_DAMAGED = (struct.error, TypeError, NotImplementedError, MemoryError, OverflowError, UnicodeError)
"""What zipfile raises, too, of bytes that nobody wrote."""


def _is_plain(tensor: Any, size: tuple[int, ...]) -> bool:
    """Whether what was unpickled is a contiguous tensor; how far it is to the next of a single row says nothing."""
    if not isinstance(tensor, tuple) or tensor[:2] != (0, size):
        return False
    return all(a == b for a, b, extent in zip(tensor[2], strides(size), size, strict=True) if extent != 1)


def _content(file: BinaryIO, position: int, record: zipfile.ZipInfo) -> int:
    """Where a record's content begins in the file."""
    begin = position + record.header_offset
    file.seek(begin + 26)
    name, extra = struct.unpack("<2H", file.read(4))
    return begin + _HEADER.size + int(name) + int(extra)


class _Tensor(pickle.Unpickler):
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


class _Window(io.RawIOBase):
    """A part of an open file, as a file."""

    def __init__(self, file: BinaryIO, begin: int, length: int) -> None:
        self.file, self.begin, self.length, self.at = file, begin, length, 0

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
        data = self.file.read(min(len(buffer), max(self.length - self.at, 0)))
        buffer[: len(data)] = data
        self.at += len(data)
        return len(data)
