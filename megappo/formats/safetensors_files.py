"""Safetensors files as headers and places: tensors are found in them, and room for tensors is made in new ones."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any

from megappo.formats.dtypes import DTYPES, FLOATS, Dtype
from megappo.formats.stored import Stored, same_bytes
from megappo.models.parameters import EMBEDDING, LM_HEAD
from megappo.models.spec import ModelError

IGNORED = ("rotary_emb.inv_freq",)
"""Endings of tensors that old checkpoints hold and nobody needs."""


HEADER_BYTES = 100_000_000
"""Limit of a header, as in the safetensors library."""

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
MOST_NAMED = 8
"""Tensors in an error: with a wrong config.json, most of them do not fit."""

Form = tuple[Dtype, tuple[int, ...]]
"""What a tensor is without its values."""

_BY_CODE = {dtype.code: dtype for dtype in DTYPES.values()}


def tensor_files(folder: str | Path) -> dict[str, Path]:
    """Which file of the folder holds each tensor.

    Raises:
        ModelError: no safetensors files, one that cannot be read, or an index that does not fit them.
    """
    folder = Path(folder)
    index, single = folder / INDEX, folder / SINGLE
    if not index.is_file():
        if not single.is_file():
            raise ModelError([_no_weights_at_all(folder)])
        return dict.fromkeys(_read_header(single), single)
    try:
        files = {name: folder / file for name, file in json.loads(index.read_text())["weight_map"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        why = error if isinstance(error, OSError | ValueError) else repr(error)
        raise ModelError([f"{index}: is no index of safetensors files ({why}): copy it again"]) from None
    named = sorted(set(files.values()))
    if away := [path for path in named if path.parent != folder]:
        raise ModelError([f"{index}: names {away[0]}, which is not beside it: give files of {folder}"])
    if single.is_file() and named != [single]:
        raise ModelError(
            [
                f"{folder}: has {SINGLE}, which transformers reads, and {INDEX} of other files, which vLLM reads: "
                "remove the one that is not meant"
            ]
        )
    if absent := [path.name for path in named if not path.is_file()]:
        lost = absent[0] if len(absent) == 1 else f"{absent[0]} and {len(absent) - 1} more"
        raise ModelError([f"{index}: of {len(named)} files that it names, there is no {lost}: add what is missing"])
    return files


def _no_weights_at_all(folder: Path) -> str:
    if pickles := _pickles(folder):
        return f"{folder}: holds its weights in pickles ({pickles[0]}): save them as safetensors (save_pretrained does)"
    if shards := sorted(path.name for path in folder.glob("*.safetensors")):
        return f"{folder}: has {shards[0]}, but neither {SINGLE} nor {INDEX}: add the one that is missing"
    return f"{folder}: has no weights: add {SINGLE}, or {INDEX} and its shards"


def _pickles(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("pytorch_model*.bin"))


def set_aside(folder: str | Path) -> list[str]:
    """What is beside the weights that are read and could be taken for them, in words: other forms, other files."""
    folder, out = Path(folder), []
    single, indexed = (folder / SINGLE).is_file(), (folder / INDEX).is_file()
    if (single or indexed) and (pickles := _pickles(folder)):
        out.append(f"{folder}: {pickles[0]} is not read, since there are safetensors: remove it if it is not the same")
    others = sorted(path.name for path in folder.glob("*.safetensors") if path.name != SINGLE)
    if single and others and not indexed:
        out.append(f"{folder}: {others[0]} is not read beside {SINGLE}, but vLLM would read both: remove one of them")
    return out


def find_tensors(folder: str | Path) -> dict[str, Stored]:
    """Every tensor of a Hugging Face folder, by name.

    Raises:
        ModelError: no safetensors files, one that cannot be read or is cut short, or an index that does not fit them.
    """
    files = tensor_files(folder)
    headers = {path: _read_header(path) for path in sorted(set(files.values()))}
    lost = sorted((path, name) for name, path in files.items() if name not in headers[path])
    if lost:
        raise ModelError([f"{path}: lacks tensor {name}, which the index places there" for path, name in lost])
    return {name: headers[path][name] for name, path in files.items()}


def check_tensors(
    folder: str | Path, found: Mapping[str, tuple[int, ...]], expected: Mapping[str, tuple[int, ...]]
) -> None:
    """Compare the tensors of a folder, by name and shape, with what the family expects.

    Raises:
        ModelError: naming those that are missing, not expected, or have another shape, the first few of many.
    """
    optional = {"lm_head.weight", "score.weight"}  # a tied head may be written out; a critic does not use either
    problems = [f"{folder}: tensor {name} {list(expected[name])} is missing" for name in expected.keys() - found.keys()]
    for name in found.keys() - expected.keys() - optional:
        if not name.endswith(IGNORED):
            problems.append(f"{folder}: tensor {name} is not part of this family")
    for name in found.keys() & expected.keys():
        if found[name] != expected[name]:
            problems.append(
                f"{folder}: tensor {name} has shape {list(found[name])}, config.json says {list(expected[name])}"
            )
    if problems:
        more = [f"{folder}: {len(problems) - MOST_NAMED} more tensors are so"] if len(problems) > MOST_NAMED else []
        fix = f"{folder}: give the config.json that the weights belong to, or weights that are whole"
        raise ModelError([*sorted(problems)[:MOST_NAMED], *more, fix])


def check_tied_head(folder: str | Path, found: Mapping[str, Stored]) -> None:
    """A head that is written out beside the embedding, though config.json says that they are one.

    Raises:
        ModelError: it is another, which transformers would use, and Megatron and vLLM would not.
    """
    (embedding,), (head,) = EMBEDDING.hf, LM_HEAD.hf
    if head in found and not same_bytes(found[embedding], found[head]):
        raise ModelError(
            [
                f"{folder}: tensor {head} is not {embedding}, as tie_word_embeddings of config.json says: remove the "
                "tensor, or give tie_word_embeddings false"
            ]
        )


def no_weights(folder: str | Path, tensors: Mapping[str, Stored]) -> list[str]:
    """Problems of tensors that are no floats of 16 or 32 bits."""
    return [
        f"{folder}: tensor {name} is {stored.dtype}: give 16- or 32-bit floats"
        for name, stored in tensors.items()
        if stored.dtype not in FLOATS
    ]


def make_room(
    folder: Path, tensors: Mapping[str, Form], shard_bytes: float, *, single: str = SINGLE
) -> dict[str, Stored]:
    """Write the headers (and the index, where there are several files) of a folder that will hold these tensors.

    Args:
        tensors: in the order in which they shall be spread over files.
        shard_bytes: limit of a file's size; a tensor that is larger has a file of its own.
        single: name of the file if there is but one.

    Returns:
        Where each tensor's values belong; until they are written, they are zero.
    """
    shards = list(_shards(tensors, shard_bytes))
    places: dict[str, Stored] = {}
    for number, names in enumerate(shards, 1):
        file = single if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        places.update(_write_header(folder / file, {name: tensors[name] for name in names}))
    if len(shards) > 1:
        index = {
            "metadata": {
                "total_parameters": sum(prod(shape) for _, shape in tensors.values()),
                "total_size": sum(place.num_bytes for place in places.values()),
            },
            "weight_map": {name: places[name].path.name for name in sorted(places)},
        }
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    return places


def _shards(tensors: Mapping[str, Form], shard_bytes: float) -> Iterator[list[str]]:
    names: list[str] = []
    filled = 0
    for name, (dtype, shape) in tensors.items():
        size = prod(shape) * dtype.itemsize
        if names and filled + size > shard_bytes:
            yield names
            names, filled = [], 0
        names.append(name)
        filled += size
    yield names


def _read_header(path: Path) -> dict[str, Stored]:
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(8)
            length = int.from_bytes(start, "little")
            if start == b"version ":
                raise ValueError("a pointer of Git LFS: git lfs pull")
            if length > min(size - 8, HEADER_BYTES):
                raise ValueError(f"header of {length} bytes")
            header = json.loads(file.read(length))
        entries: dict[str, Any] = {name: entry for name, entry in header.items() if name != "__metadata__"}
        out, begin = {}, 0
        for name, entry in sorted(entries.items(), key=lambda item: item[1]["data_offsets"]):
            out[name] = _stored(path, 8 + length, begin, name, entry)
            begin = entry["data_offsets"][1]
        if 8 + length + begin != size:
            raise ValueError(f"{size} bytes instead of {8 + length + begin}")
        return {name: out[name] for name in entries}
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        why = error if isinstance(error, OSError | ValueError) else repr(error)
        raise ModelError([f"{path}: cannot be read as safetensors ({why}): copy it again"]) from None


def _stored(path: Path, values: int, expected: int, name: str, entry: Mapping[str, Any]) -> Stored:
    """A tensor of a header, which must begin where the one before ends and have the place that its shape needs."""
    code, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
    # A type that we do not know matters only if the tensor is needed.
    dtype = _BY_CODE.get(code) or Dtype(str(code), str(code), 0)
    if not all(type(number) is int and number >= 0 for number in (begin, end, *shape)):
        raise ValueError(f"tensor {name}: its shape is {shape}, its data_offsets {[begin, end]}")
    if begin != expected:
        raise ValueError(f"tensor {name}: begins at {begin} instead of {expected}")
    if end < begin or (dtype.itemsize and end - begin != prod(shape) * dtype.itemsize):
        raise ValueError(f"tensor {name}: has {end - begin} bytes, not those of {code} {shape}")
    return Stored(path, values + begin, dtype, tuple(shape))


def _write_header(path: Path, tensors: Mapping[str, Form]) -> dict[str, Stored]:
    """A file's header, byte for byte as the safetensors library writes it: wide types first, then by name."""
    order = sorted(tensors, key=lambda name: (-tensors[name][0].itemsize, tensors[name][0].code != "BF16", name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for name in order:
        dtype, shape = tensors[name]
        end = begin + prod(shape) * dtype.itemsize
        header[name] = {"dtype": dtype.code, "shape": list(shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + begin)
    return {name: Stored(path, 8 + len(text) + header[name]["data_offsets"][0], *tensors[name]) for name in order}
