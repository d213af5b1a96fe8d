"""Hugging Face safetensors as a source of weights: each rank reads only the blocks it holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from megappo.formats.safetensors_files import check_tensors, tensor_files
from megappo.models.spec import ModelError, ModelSpec
from megappo.reshard.boxes import Box
from megappo.reshard.copies import block


def load_weights(
    folder: str | Path,
    spec: ModelSpec,
    boxes: Sequence[Box],
    params: Mapping[str, torch.Tensor],
    *,
    scalar_head: bool = False,
) -> None:
    """Fill this rank's parameters from a Hugging Face folder, block by block; each is read once, straight to its place.

    Padding rows of the vocabulary become zero. A scalar head that the folder lacks (a critic started from a language
    model) becomes zero: its first values are then 0.

    Args:
        boxes: what this rank holds.
        params: this rank's parameters, by Megatron's names.

    Raises:
        ModelError: tensors are missing, not expected, or have another shape (all are listed), or a file cannot be
            read. No parameter has been changed then.
    """
    files = tensor_files(folder)
    shapes = spec.hf_shapes(scalar_head=scalar_head)
    fresh = {"score.weight"} - files.keys()
    with ExitStack() as stack:
        readers = {path: stack.enter_context(_open(path)) for path in sorted(set(files.values()))}
        _check_index(files, {path: set(reader.keys()) for path, reader in readers.items()})
        slices = {name: readers[path].get_slice(name) for name, path in files.items()}
        found = {name: tuple(slice_.get_shape()) for name, slice_ in slices.items()}
        check_tensors(folder, found, {name: shape for name, shape in shapes.items() if name not in fresh})
        with torch.no_grad():
            for param in params.values():
                param.zero_()
            for box in boxes:
                if box.name not in fresh:
                    place = params[box.param][block(box.local_offset, box.size)]
                    place.copy_(slices[box.name][block(box.offset, box.size)])


def _open(path: Path) -> Any:
    try:
        return safe_open(path, "pt")
    except (SafetensorError, OSError) as error:
        raise ModelError([f"{path}: cannot be read as safetensors ({error}): copy it again"]) from None


def _check_index(files: Mapping[str, Path], held: Mapping[Path, set[str]]) -> None:
    if lost := [(path, name) for name, path in files.items() if name not in held[path]]:
        raise ModelError([f"{path}: lacks tensor {name}, which the index places there" for path, name in sorted(lost)])
