"""From a Hugging Face folder to a Megatron checkpoint: the files are laid out, then filled from the shards."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import product
from math import prod
from pathlib import Path
from zlib import crc32

from megappo.convert.companions import copy_companions, says_scalar_head
from megappo.convert.share import shared
from megappo.convert.source import COMPANIONS
from megappo.convert.write_back import start_writing_back
from megappo.formats.archives import LIMIT
from megappo.formats.casts import OutOfRange
from megappo.formats.dtypes import Dtype
from megappo.formats.safetensors_files import check_tensors, check_tied_head, find_tensors, no_weights
from megappo.formats.stored import Files, Stored, copy_block, largest, prepare, row_blocks
from megappo.formats.torch_dist import NOTHING, Chunk, ChunkFile, Place, write_metadata
from megappo.layout.legality import expert_problems, megatron_model_problems
from megappo.layout.mesh import Layout, model_chunks
from megappo.models.spec import ModelError, ModelSpec, read_model_spec
from megappo.reshard.megatron_tensors import MegatronTensor, megatron_tensors, stacked_shapes

FILE_BYTES = 512 * 2**20
"""About the size of a checkpoint's files, so that several processes can write (and read) one rank's part."""

LAYER_STATES = (
    "self_attention.linear_qkv",
    "self_attention.linear_proj",
    "self_attention.core_attention",
    "self_attention.q_layernorm",
    "self_attention.k_layernorm",
)
DENSE_STATES = ("mlp.linear_fc1", "mlp.linear_fc2")
MIXTURE_STATES = ("pre_mlp_layernorm",)
EXPERT_STATES = ("mlp.experts.experts.linear_fc1", "mlp.experts.experts.linear_fc2")
"""Modules whose extra state (of 8-bit training) Megatron wants to find, empty, in a checkpoint: those of every layer,
of dense ones, of mixtures, and of each expert."""


@dataclass(frozen=True)
class Part:
    """A block of one parameter, to be a chunk of one file."""

    file: str
    tensor: MegatronTensor
    offset: tuple[int, ...]
    size: tuple[int, ...]
    num_bytes: int


class ToMegatron:
    """A conversion that is known to be possible, and has yet to be done.

    Args:
        folder: a Hugging Face folder.
        dtype: of the checkpoint; the tensors' own by default.
        layout: whose ranks' parts the files will be; any other layout can load them, at the price of more reading.
        bucket_bytes: limit of a chunk.

    Raises:
        ModelError: the folder or the layout cannot be used; every reason is listed.
    """

    def __init__(self, folder: Path, dtype: Dtype | None, layout: Layout, bucket_bytes: int) -> None:
        self.folder = folder
        self.spec = read_model_spec(folder)
        self.found = find_tensors(folder)
        self.scalar_head = "score.weight" in self.found or says_scalar_head(folder)
        expected = self.spec.hf_shapes(scalar_head=self.scalar_head)
        check_tensors(folder, {name: stored.shape for name, stored in self.found.items()}, expected)
        if self.spec.tied_embeddings and not self.scalar_head:
            check_tied_head(folder, self.found)
        problems = [f"--{text}" for text in megatron_model_problems(self.spec, layout.tp, layout.pp, layout.vpp)]
        if layout.vpp > 1 == layout.pp:
            problems.append(f"--vpp {layout.vpp}: chunks are of several pipeline stages: leave it out, or raise --pp")
        if self.spec.num_experts:
            problems += [f"--{text}" for text in expert_problems(self.spec, layout.ep, layout.expert_tp)]
        elif layout.ep > 1 or layout.etp:
            problems.append(f"--ep, --etp: {self.spec.family} has no experts: leave them out")
        if problems:
            raise ModelError(problems)
        self.tensors = megatron_tensors(self.spec, layout.tp, scalar_head=self.scalar_head)
        self.dtypes = _dtypes(folder, self.tensors, self.found, dtype)
        self.parts = list(self._parts(layout, min(bucket_bytes, LIMIT)))
        self.num_bytes = sum(part.num_bytes for part in self.parts)

    def write(self, destination: Path, processes: int) -> None:
        """Write the checkpoint into an empty folder.

        Raises:
            ModelError: values are beyond the range of the wanted dtype.
        """
        chunks, objects = self._make_room(destination)
        shapes = stacked_shapes(self.tensors.values())
        prepare({*self.dtypes.values(), *(stored.dtype for stored in self.found.values())})
        with Files() as files:
            try:
                shared(
                    partial(_fill, files, self.found, destination),
                    list(zip(self.parts, chunks, strict=True)),
                    [part.num_bytes for part in self.parts],
                    processes,
                    meanwhile=lambda: write_metadata(destination, shapes, chunks, objects),
                    often=lambda: start_writing_back(destination),
                )
            except OutOfRange as error:
                whole = self.found[error.name]
                raise error.refusal(self.folder, largest([(whole, [0] * len(whole.shape), whole.shape)])) from None
        copy_companions(self.folder, destination / COMPANIONS)

    def _parts(self, layout: Layout, bucket_bytes: int) -> Iterator[Part]:
        """The parameters, cut for the ranks of the layout and to the size of a bucket."""
        stages = model_chunks(self.spec.num_layers, layout.pp, layout.vpp)
        stage_of = {layer: stage for stage, chunks in enumerate(stages) for layers in chunks for layer in layers}
        filled: Counter[int] = Counter()
        for tensor in self.tensors.values():
            outside = 0 if tensor.name.startswith("embedding.") else layout.pp - 1
            stage = outside if tensor.layer is None else stage_of[tensor.layer]
            item = self.dtypes[tensor.key].itemsize
            tp = layout.tp if tensor.expert is None else layout.expert_tp
            for number, (offset, size) in enumerate(tensor.cuts(tp)):
                rank = self._writer(layout, stage, number % tp, tensor.expert)
                for begin, extent in row_blocks(offset, size, bucket_bytes // item):
                    count = prod(extent) * item
                    yield Part(f"__{rank}_{filled[rank] // FILE_BYTES}.distcp", tensor, begin, extent, count)
                    filled[rank] += count

    def _writer(self, layout: Layout, stage: int, place: int, expert: int | None) -> int:
        """The first of the ranks that hold a tensor-parallel place's part of a stage, or of an expert there."""
        if expert is None:
            return layout.rank(tp=place, pp=stage)
        ep = expert * layout.ep // self.spec.num_experts
        return layout.expert_replicas(etp=place, ep=ep, pp=stage)[0]

    def _make_room(self, destination: Path) -> tuple[list[Chunk], dict[str, Place]]:
        """Lay out the files, all but chunks. Returns the parts' chunks, and the places of what is no tensor."""
        files = {name: ChunkFile(name) for name in dict.fromkeys(part.file for part in self.parts)}
        chunks = []
        for part in self.parts:
            front, dtype = part.tensor.index, self.dtypes[part.tensor.key]
            size = (*(1 for _ in front), *part.size)
            chunks.append(files[part.file].reserve(part.tensor.key, (*front, *part.offset), size, dtype))
        first = files[self.parts[0].file]
        begin, objects = first.length, {key: first.append(len(NOTHING)) for key in _objects(self.spec)}
        for name in files:
            (destination / name).touch()
        with (destination / first.name).open("rb+") as file:
            file.seek(begin)
            file.write(NOTHING * len(objects))
        return chunks, objects


def _dtypes(
    folder: Path, tensors: Mapping[str, MegatronTensor], found: Mapping[str, Stored], wanted: Dtype | None
) -> dict[str, Dtype]:
    """The dtype of each tensor of the checkpoint, by key."""
    names: defaultdict[str, list[str]] = defaultdict(list)
    for tensor in tensors.values():
        names[tensor.key] += sorted({box.name for box in tensor.boxes})
    problems, out = [], {}
    for key, together in names.items():
        examples = {found[name].dtype: name for name in reversed(together)}
        if odd := no_weights(folder, {name: found[name] for name in together}):
            problems += odd
        elif len(examples) > 1 and wanted is None:
            differing = ", ".join(sorted(examples.values()))
            problems.append(
                f"{folder}: {differing} are parts of one tensor in Megatron but differ in dtype: give --dtype"
            )
        out[key] = wanted or next(iter(examples))
    if problems:
        raise ModelError(problems)
    return out


def _objects(spec: ModelSpec) -> Iterator[str]:
    layers, experts = spec.num_layers, spec.num_experts
    for module in (*LAYER_STATES, *(MIXTURE_STATES if experts else DENSE_STATES)):
        for layer in range(layers):
            yield f"decoder.layers.{module}._extra_state/shard_{layer}_{layers}"
    for module in EXPERT_STATES if experts else ():
        for layer, expert in product(range(layers), range(experts)):
            yield f"decoder.layers.{module}._extra_state/shard_{layer}.{expert}_{layers}.{experts}"
    yield "decoder.final_layernorm._extra_state/shard_0_1"


def _fill(files: Files, found: Mapping[str, Stored], folder: Path, item: tuple[Part, Chunk]) -> None:
    """Write a chunk; padding rows, which come last, stay zero."""
    part, chunk = item
    path, begin, frame = folder / chunk.place.file, chunk.place.position, chunk.frame
    values = Stored(path, begin + len(frame.front), chunk.dtype, part.size)  # without the axes of layers and experts
    checksum = filled = 0
    for name, (there, size), here in part.tensor.overlaps(part.offset, part.size):
        for _, written in copy_block(files, found[name], there, values, here, size, name):
            checksum = crc32(written, checksum)
            filled += len(written)
    back = frame.back(crc32(bytes(values.num_bytes - filled), checksum))
    files.write(path, begin, frame.front)
    files.write(path, begin + chunk.place.length - len(back), back)
