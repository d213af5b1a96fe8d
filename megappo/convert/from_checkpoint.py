"""What a Megatron checkpoint of any layout holds of a model, and whether that is all of it."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from math import prod
from pathlib import Path
from typing import NamedTuple
from zlib import crc32

from megappo.convert.companions import Head, said_head
from megappo.convert.cover import check_cover
from megappo.convert.share import shared
from megappo.convert.write_back import start_writing_back
from megappo.formats.casts import OutOfRange
from megappo.formats.checksums import joined
from megappo.formats.dtypes import Dtype
from megappo.formats.safetensors_files import Form
from megappo.formats.stored import Files, Stored, copy_block, largest, pieces, prepare
from megappo.formats.torch_dist import Chunk, read_chunks
from megappo.models.parameters import LM_HEAD, Split
from megappo.models.spec import ModelError, ModelSpec, read_model_spec
from megappo.reshard.megatron_tensors import MegatronTensor, megatron_tensors, stacked_shapes

MODEL = ("embedding.", "decoder.", "output_layer.")
"""How the keys of weights begin; all others (optimizer state, random states, ...) are not the model's."""


@dataclass(frozen=True)
class Part:
    """A block of one parameter, as it lies in a chunk.

    Attributes:
        index: which of the parameters in the chunk, on its axes of layers and experts, as far as it has them.
    """

    tensor: MegatronTensor
    offset: tuple[int, ...]
    size: tuple[int, ...]
    chunk: Chunk
    index: tuple[int, ...]

    def within(self, stored: Stored) -> Stored:
        """Where it lies, in its chunk."""
        for place in self.index:
            one = replace(stored, shape=stored.shape[1:])
            stored = replace(one, position=one.position + place * one.num_bytes)
        return stored

    @property
    def num_bytes(self) -> int:
        """Size of the block."""
        return prod(self.size) * self.chunk.dtype.itemsize


class FromCheckpoint(ABC):
    """A conversion of a checkpoint that is known to be possible, and has yet to be done.

    Args:
        folder: a ``torch_dist`` checkpoint.
        model_folder: the config and tokenizer that belong to it.
        dtype: of the result; the checkpoint's own by default.
        shard_bytes: limit of a shard.
        bucket_bytes: limit of a piece of work in memory, where there is more to do than to copy.
        role: whose weights they are, if that is known: a reward model's head scores whole sequences.

    Attributes:
        spec: the model of the checkpoint.
        scalar_head: whether it ends in one number a token.
        parts: what is in the files, cut by parameter.
        held_forms: dtype and shape of each tensor of the checkpoint, by Hugging Face name.
        forms: those of the result.
        unproven: in words, how many chunks were saved without a checksum, if any: known once they were copied.

    Raises:
        ModelError: the checkpoint cannot be used, or does not fit ``config.json``; every reason is listed.
    """

    def __init__(
        self,
        folder: Path,
        model_folder: Path,
        dtype: Dtype | None,
        shard_bytes: int,
        bucket_bytes: int,
        *,
        role: str | None = None,
    ) -> None:
        self.folder, self.model_folder, self.role = folder, model_folder, role
        self.shard_bytes, self.bucket_bytes = shard_bytes, bucket_bytes
        self.unproven = ""
        self.spec = self.read_spec()
        shapes, chunks = read_chunks(folder)
        shapes = {key: shape for key, shape in shapes.items() if key.startswith(MODEL)}
        self.scalar_head = shapes.get(LM_HEAD.megatron) == (1, self.spec.hidden_size)
        tensors = self.held(megatron_tensors(self.spec, scalar_head=self.scalar_head))
        _check_shapes(folder, model_folder, tensors, shapes)
        chunks = [chunk for chunk in chunks if chunk.key in shapes]
        check_cover(folder, chunks, shapes)
        kinds: defaultdict[str, dict[tuple[int, ...], MegatronTensor]] = defaultdict(dict)
        for tensor in tensors.values():
            kinds[tensor.key][tensor.index] = tensor
        self.parts = [part for chunk in chunks for part in _parts(chunk, kinds)]
        dtypes = {box.name: part.chunk.dtype for part in self.parts for box in part.tensor.boxes}
        every = self.spec.hf_shapes(scalar_head=self.scalar_head)
        self.held_forms: dict[str, Form] = {name: (dtypes[name], every[name]) for name in every if name in dtypes}
        self.forms = {name: (dtype or own, shape) for name, (own, shape) in self.held_forms.items()}

    def read_spec(self) -> ModelSpec:
        """The model whose parameters the checkpoint holds."""
        return read_model_spec(self.model_folder)

    def held(self, tensors: Mapping[str, MegatronTensor]) -> Mapping[str, MegatronTensor]:
        """Those of the model's parameters that are in the checkpoint."""
        return tensors

    @property
    def num_bytes(self) -> int:
        """Size of the result."""
        return sum(prod(shape) * dtype.itemsize for dtype, shape in self.forms.values())

    @property
    def head(self) -> Head:
        """What the weights end in."""
        if not self.scalar_head:
            return "language-model"
        if self.role in ("critic", "reward"):
            return "score" if self.role == "reward" else "value"
        return "score" if said_head(self.model_folder) == "score" else "value"

    @abstractmethod
    def write(self, destination: Path, processes: int) -> None:
        """Write the result into an empty folder."""

    def fill(self, places: Mapping[str, Stored], processes: int) -> None:
        """Copy all that is in the checkpoint to where it belongs.

        Raises:
            ModelError: values are beyond the range of the wanted dtype, or not those that were saved.
        """
        # Part by part, since a chunk may have those of all layers: that is how plain torch saves them.
        items = sorted(self.parts, key=lambda part: _first(part, places))
        sizes = [part.num_bytes for part in items]
        dtypes = {part.chunk.dtype for part in items}
        prepare({*dtypes, *(place.dtype for place in places.values())})
        with Files() as files:
            copy = partial(_copy, files, self.folder, places)
            (folder,) = {place.path.parent for place in places.values()}
            often = partial(start_writing_back, folder)
            try:
                copied = shared(copy, items, sizes, processes, often=often)
            except OutOfRange as error:
                raise error.refusal(self.folder, largest(self._blocks(error.name))) from None
        self._check_copied(items, copied)

    def _check_copied(self, items: Sequence[Part], copied: Sequence[_Copied]) -> None:
        """Whether the parts of each chunk, as they lie in it, are together what was saved."""
        chunks: defaultdict[Chunk, list[tuple[Part, _Copied]]] = defaultdict(list)
        for part, one in zip(items, copied, strict=True):
            chunks[part.chunk].append((part, one))
        problems, bare = [], 0
        for chunk, pairs in chunks.items():
            pairs.sort(key=lambda pair: pair[0].index)
            saved = pairs[0][1].saved
            found = joined((one.checksum, part.num_bytes) for part, one in pairs)
            bare += saved == 0 != found
            if saved not in (0, found):
                names = [name for part, _ in pairs for name, _, _ in part.tensor.overlaps(part.offset, part.size)]
                what = ", ".join(dict.fromkeys(names)) or f"padding of {chunk.key}"
                path = self.folder / chunk.place.file
                problems.append(f"{path}: {what}: is damaged (other bytes than were saved): copy the checkpoint again")
        if problems:
            raise ModelError(sorted(problems))
        if bare:
            self.unproven = f"{bare} of {len(chunks)} chunks"

    def _blocks(self, name: str) -> Iterator[tuple[Stored, Sequence[int], Sequence[int]]]:
        """Where the checkpoint has a tensor, with the offset and the size of each block."""
        for part in self.parts:
            for box, (_, size), here in part.tensor.overlaps(part.offset, part.size):
                if box == name:
                    yield part.within(part.chunk.stored(self.folder)[0]), here, size


def _parts(chunk: Chunk, kinds: Mapping[str, Mapping[tuple[int, ...], MegatronTensor]]) -> Iterator[Part]:
    """What a chunk holds of each parameter; these are given by key and index."""
    key, layer = _layer_apart(chunk.key)
    front = len(next(iter(kinds[key]))) - len(layer)
    for index in product(*map(range, chunk.size[:front])):
        place = (*layer, *(first + i for first, i in zip(chunk.offset, index, strict=False)))
        yield Part(kinds[key][place], chunk.offset[front:], chunk.size[front:], chunk, index)


def _layer_apart(key: str) -> tuple[str, tuple[int, ...]]:
    """The key for all layers, and which one it is where the checkpoint has a key for each."""
    match = re.match(r"decoder\.layers\.(0|[1-9][0-9]*)\.", key)
    return (f"decoder.layers.{key[match.end() :]}", (int(match[1]),)) if match else (key, ())


def _first(part: Part, places: Mapping[str, Stored]) -> tuple[Path, int]:
    """Where about a part belongs."""
    place = places[part.tensor.boxes[0].name]
    return place.path, place.position


class _Copied(NamedTuple):
    """CRC-32 of a part, and of its whole chunk as it was saved (0: it was not)."""

    checksum: int
    saved: int


def _copy(files: Files, folder: Path, places: Mapping[str, Stored], part: Part) -> _Copied:
    """Copy a part of a chunk to where its tensors belong, in the order of its bytes."""
    stored, saved = part.chunk.stored(folder)
    source, checksum, row = part.within(stored), 0, 0
    for name, (there, size), here in part.tensor.overlaps(part.offset, part.size):
        for read, _ in copy_block(files, source, here, places[name], there, size, name):
            checksum = crc32(read, checksum)
        row = here[0] + size[0]
    padding = [row, *(0 for _ in part.size[1:])], [part.size[0] - row, *part.size[1:]]
    for _, _, read in pieces(files, source, *padding):
        checksum = crc32(read, checksum)
    return _Copied(checksum, saved)


def _check_shapes(
    folder: Path,
    model_folder: Path,
    tensors: Mapping[str, MegatronTensor],
    shapes: Mapping[str, tuple[int, ...]],
) -> None:
    """Compare the checkpoint with what the family expects, kind of parameter by kind of parameter."""
    found = _stacked(shapes)
    expected = stacked_shapes(tensors.values())
    padded = {tensor.key for tensor in tensors.values() if tensor.split is Split.VOCABULARY}
    config = model_folder / "config.json"
    problems = [f"{folder}: tensor {key} {list(expected[key])} is missing" for key in expected.keys() - found.keys()]
    problems += [
        f"{folder}: tensor {key} is not part of the model in {config}" for key in found.keys() - expected.keys()
    ]
    for key in found.keys() & expected.keys():
        least = key in padded and len(found[key]) == 2
        if (least and found[key][0] < expected[key][0]) or found[key][least:] != expected[key][least:]:
            at_least = " (rows: at least)" if least else ""
            problems.append(
                f"{folder}: tensor {key} has shape {list(found[key])}, {config} says {list(expected[key])}{at_least}"
            )
    for key, shape in shapes.items():
        stacked, layer = _layer_apart(key)
        count, *one = expected.get(stacked, (0,))
        if layer and stacked in expected and (layer[0] >= count or list(shape) != one):
            problems.append(f"{folder}: tensor {key} has shape {list(shape)}, {config} says {count} layers of {one}")
    if problems:
        raise ModelError([*sorted(problems), f"{folder}: give the config that the checkpoint belongs to with --model"])


def _stacked(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Shapes with one key for all layers, also where the checkpoint has one a layer."""
    out: dict[str, tuple[int, ...]] = {}
    for key, shape in shapes.items():
        stacked, layer = _layer_apart(key)
        out[stacked] = (out.get(stacked, (0,))[0] + 1, *shape) if layer else shape
    return out
