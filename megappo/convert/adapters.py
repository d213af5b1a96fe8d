"""From a checkpoint of low-rank adapters to a PEFT folder or, merged into the model's weights, a Hugging Face folder.

Such a checkpoint holds adapters (and a scalar head), and none of the weights that stay as the model's folder has them.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path
from typing import NamedTuple

import torch

from megappo.convert.companions import Head, copy_companions, fit_config
from megappo.convert.share import shared
from megappo.convert.to_hugging_face import MODEL, check_cover, check_shapes, copy_part, parts_of
from megappo.models.lora import FILE, Lora, factor_names, is_trained
from megappo.models.parameters import LM_HEAD
from megappo.models.spec import ModelError, read_model_spec
from megappo.reshard.files import check_tensors
from megappo.reshard.megatron_tensors import megatron_tensors
from megappo.reshard.merge import merge
from megappo.reshard.safetensors_files import find_tensors, make_room
from megappo.reshard.stored import Stored, row_blocks
from megappo.reshard.torch_dist import read_chunks

PEFT_PREFIX = "base_model.model."
TASKS: Mapping[Head, str] = {"language-model": "CAUSAL_LM", "value": "TOKEN_CLS", "score": "SEQ_CLS"}
"""PEFT's names for what a model ends in."""


def has_adapters(folder: Path) -> bool:
    """Whether a checkpoint is one of adapters."""
    return (folder / FILE).is_file()


class _Adapters:
    """What a checkpoint of adapters holds.

    Args:
        folder: a ``torch_dist`` checkpoint.
        model_folder: the model that it was trained on.
        dtype: of the result; the adapters' own by default.
        shard_bytes: limit of a shard.
        bucket_bytes: limit of a piece of work in memory.
        scores: a scalar head is that of a reward model, which scores whole sequences.

    Raises:
        ModelError: the checkpoint cannot be used, or does not fit ``config.json``; every reason is listed.
    """

    def __init__(
        self,
        folder: Path,
        model_folder: Path,
        dtype: torch.dtype | None,
        shard_bytes: int,
        bucket_bytes: int,
        *,
        scores: bool = False,
    ) -> None:
        self.folder, self.model_folder = folder, model_folder
        self.shard_bytes, self.bucket_bytes = shard_bytes, bucket_bytes
        self.lora = _read_lora(folder)
        self.spec = replace(read_model_spec(model_folder), lora=self.lora)
        shapes, chunks = read_chunks(folder)
        shapes = {key: shape for key, shape in shapes.items() if key.startswith(MODEL)}
        self.scalar_head = LM_HEAD.megatron in shapes
        self.head: Head = "language-model" if not self.scalar_head else "score" if scores else "value"
        tensors = {
            name: tensor
            for name, tensor in megatron_tensors(self.spec, scalar_head=self.scalar_head).items()
            if is_trained(name, scalar_head=self.scalar_head)
        }
        check_shapes(folder, model_folder, tensors, shapes, self.spec.num_layers)
        self.parts = [part for chunk in chunks if chunk.key in shapes for part in parts_of(chunk, tensors)]
        check_cover(folder, self.parts, shapes)
        self.own_dtype = self.parts[0].chunk.dtype
        self.dtype = dtype or self.own_dtype
        every = self.spec.hf_shapes(scalar_head=self.scalar_head)
        held = {box.name for tensor in tensors.values() for box in tensor.boxes}
        self.trained = {name: shape for name, shape in every.items() if name in held}

    def write_trained(self, destination: Path, dtype: torch.dtype, prefix: str, processes: int) -> dict[str, Stored]:
        """Write one file of all that was trained; its tensors by Hugging Face name."""
        forms = {prefix + name: (dtype, shape) for name, shape in self.trained.items()}
        if self.head == "value":
            forms[f"{prefix}score.bias"] = (
                dtype,
                (1,),
            )  # transformers has one; what is not written is zero
        made = make_room(destination, forms, math.inf, single="adapter_model.safetensors")
        places = {name: made[prefix + name] for name in self.trained}
        copy = partial(copy_part, self.folder, places, self.bucket_bytes)
        shared(copy, self.parts, [part.num_bytes for part in self.parts], processes)
        return places


class ToPeft(_Adapters):
    """A conversion to a PEFT folder that is known to be possible, and has yet to be done."""

    @property
    def num_bytes(self) -> int:
        """Size of the result."""
        return sum(prod(shape) * self.dtype.itemsize for shape in self.trained.values())

    def write(self, destination: Path, processes: int) -> None:
        """Write the folder into an empty one."""
        self.write_trained(destination, self.dtype, PEFT_PREFIX, processes)
        config = {
            "peft_type": "LORA",
            "task_type": TASKS[self.head],
            "base_model_name_or_path": str(self.model_folder.absolute()),
            "r": self.lora.rank,
            "lora_alpha": self.lora.alpha,
            "target_modules": list(self.lora.targets),
            "lora_dropout": 0.0,
            "bias": "none",
            "modules_to_save": ["score"] if self.scalar_head else None,
            "fan_in_fan_out": False,
            "inference_mode": True,
        }
        (destination / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")


class Piece(NamedTuple):
    """Rows of a weight."""

    name: str
    offset: tuple[int, ...]
    size: tuple[int, ...]


class ToMerged(_Adapters):
    """A conversion to a Hugging Face folder that is known to be possible, and has yet to be done."""

    def __init__(self, *args: object, **options: bool) -> None:
        super().__init__(*args, **options)  # type: ignore[arg-type]
        self.base = find_tensors(self.model_folder)
        shapes = self.spec.base.hf_shapes(scalar_head=self.scalar_head)
        found = {name: stored.shape for name, stored in self.base.items()}
        check_tensors(self.model_folder, found, {name: shapes[name] for name in shapes if name not in self.trained})
        self.forms = {name: (self.dtype, shape) for name, shape in shapes.items()}

    @property
    def num_bytes(self) -> int:
        """Size of the result."""
        return sum(prod(shape) * dtype.itemsize for dtype, shape in self.forms.values())

    def write(self, destination: Path, processes: int) -> None:
        """Write the folder into an empty one."""
        (aside := destination / "adapters").mkdir()
        trained = self.write_trained(aside, self.own_dtype, "", processes)
        places = make_room(destination, self.forms, self.shard_bytes)
        pieces = list(self._pieces())
        sizes = [prod(piece.size) for piece in pieces]
        shared(partial(_merge_piece, self.base, trained, places, self.lora.scale), pieces, sizes, processes)
        shutil.rmtree(aside)
        copy_companions(self.model_folder, destination)
        fit_config(destination, self.dtype, head=self.head)

    def _pieces(self) -> Iterator[Piece]:
        for name, (_, shape) in self.forms.items():
            for offset, size in row_blocks([0] * len(shape), shape, self.bucket_bytes // 8):
                yield Piece(name, offset, size)


def _merge_piece(
    base: Mapping[str, Stored],
    trained: Mapping[str, Stored],
    places: Mapping[str, Stored],
    scale: float,
    piece: Piece,
) -> None:
    name, offset, size = piece
    place = places[name]
    weight = (trained.get(name) or base[name]).read(offset, size).to(place.dtype)
    a, b = (trained.get(factor) for factor in factor_names(name))
    if a is not None and b is not None:
        b_or = b.read((offset[0], 0), (size[0], b.shape[1]))
        merge(weight, a.read((0, 0), a.shape), b_or, scale)
    place.write(offset, weight)


def _read_lora(folder: Path) -> Lora:
    path = folder / FILE
    try:
        raw = json.loads(path.read_text())
        return Lora(int(raw["rank"]), float(raw["alpha"]), tuple(map(str, raw["targets"])))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError([f"{path}: cannot be read ({error!r}): copy the checkpoint again"]) from None
