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

from megappo.convert.companions import Head, copy_companions, fit_config
from megappo.convert.from_checkpoint import FromCheckpoint
from megappo.convert.share import shared
from megappo.formats.casts import OutOfRange, as_bytes, largest_of, overflows
from megappo.formats.safetensors_files import Form, check_tensors, check_tied_head, find_tensors, make_room, no_weights
from megappo.formats.stored import Stored, row_blocks
from megappo.models.lora import FILE, Lora, factor_names, is_trained
from megappo.models.spec import ModelError, ModelSpec, read_model_spec
from megappo.reshard.megatron_tensors import MegatronTensor
from megappo.reshard.merge import merge

PEFT_PREFIX = "base_model.model."
TASKS: Mapping[Head, str] = {"language-model": "CAUSAL_LM", "value": "TOKEN_CLS", "score": "SEQ_CLS"}
"""PEFT's names for what a model ends in."""


class _Adapters(FromCheckpoint):
    """A conversion of a checkpoint of adapters (and a scalar head), whose ``forms`` are what was trained."""

    def read_spec(self) -> ModelSpec:
        """See :meth:`FromCheckpoint.read_spec`."""
        self.lora = _read_lora(self.folder)
        return replace(read_model_spec(self.model_folder), lora=self.lora)

    def held(self, tensors: Mapping[str, MegatronTensor]) -> Mapping[str, MegatronTensor]:
        """See :meth:`FromCheckpoint.held`."""
        return {name: tensor for name, tensor in tensors.items() if is_trained(name, scalar_head=self.scalar_head)}

    def write_trained(
        self, destination: Path, forms: Mapping[str, Form], prefix: str, processes: int
    ) -> dict[str, Stored]:
        """Write one file of all that was trained; its tensors by Hugging Face name."""
        room = {prefix + name: form for name, form in forms.items()}
        if self.head == "value":  # transformers has a bias; what is not written is zero
            room[f"{prefix}score.bias"] = (next(iter(forms.values()))[0], (1,))
        made = make_room(destination, room, math.inf, single="adapter_model.safetensors")
        places = {name: made[prefix + name] for name in forms}
        self.fill(places, processes)
        return places


class ToPeft(_Adapters):
    """A conversion to a PEFT folder."""

    def write(self, destination: Path, processes: int) -> None:
        """Write the folder into an empty one."""
        self.write_trained(destination, self.forms, PEFT_PREFIX, processes)
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
    """A conversion to a Hugging Face folder, of weights with the adapters merged into them."""

    def __init__(self, *args: object, **options: bool) -> None:
        super().__init__(*args, **options)  # type: ignore[arg-type]
        self.base = find_tensors(self.model_folder)
        shapes = self.spec.base.hf_shapes(scalar_head=self.scalar_head)
        found = {name: stored.shape for name, stored in self.base.items()}
        needed = {name: shapes[name] for name in shapes if name not in self.forms}
        check_tensors(self.model_folder, found, needed)
        if self.spec.tied_embeddings and not self.scalar_head:
            check_tied_head(self.model_folder, self.base)
        if problems := no_weights(self.model_folder, {name: self.base[name] for name in needed}):
            raise ModelError(problems)
        (self.dtype, _), *_ = self.forms.values()
        self.forms = {name: (self.dtype, shape) for name, shape in shapes.items()}

    def write(self, destination: Path, processes: int) -> None:
        """Write the folder into an empty one."""
        (aside := destination / "adapters").mkdir()
        trained = self.write_trained(aside, self.held_forms, "", processes)
        places = make_room(destination, self.forms, self.shard_bytes)
        pieces = list(self._pieces())
        sizes = [prod(piece.size) for piece in pieces]
        merge_piece = partial(_merge_piece, self.model_folder, self.base, trained, places, self.lora.scale)
        shared(merge_piece, pieces, sizes, processes)
        shutil.rmtree(aside)
        copy_companions(self.model_folder, destination)
        fit_config(destination, self.dtype, head=self.head)

    def _pieces(self) -> Iterator[Piece]:
        for name, (_, shape) in self.forms.items():
            for offset, size in row_blocks([0] * len(shape), shape, self.bucket_bytes // 8):
                yield Piece(name, offset, size)


def _merge_piece(
    folder: Path,
    base: Mapping[str, Stored],
    trained: Mapping[str, Stored],
    places: Mapping[str, Stored],
    scale: float,
    piece: Piece,
) -> None:
    name, offset, size = piece
    place, stored = places[name], trained.get(name) or base[name]
    before = stored.read(offset, size)
    weight = before.to(place.dtype.torch, copy=True)
    if overflows(before, weight):
        raise OutOfRange(name, place.dtype).refusal(folder, largest_of(as_bytes(before), stored.dtype))
    a, b = (trained.get(factor) for factor in factor_names(name))
    if a is not None and b is not None:
        b_or = b.read((offset[0], 0), (size[0], b.shape[1]))
        merge(weight, a.read((0, 0), a.shape), b_or, scale)
        if overflows(before, weight):
            fix = "give --dtype float32, or a checkpoint from before its adapters went wrong"
            raise ModelError([f"tensor {name} is beyond {place.dtype} with its adapters merged into it: {fix}"])
    place.write(offset, weight)


def _read_lora(folder: Path) -> Lora:
    path = folder / FILE
    try:
        raw = json.loads(path.read_text())
        lora = Lora(int(raw["rank"]), float(raw["alpha"]), tuple(map(str, raw["targets"])))
        if lora.rank < 1 or not 0 < lora.alpha < math.inf:
            raise ValueError(f"rank {lora.rank}, alpha {lora.alpha}")
        return lora
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ModelError([f"{path}: cannot be read ({error!r}): copy the checkpoint again"]) from None
