"""Both sides of a conversion compared: every weight, and for small models what the two systems compute from them."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import torch

from megappo.convert.from_checkpoint import Part
from megappo.convert.share import shared
from megappo.convert.to_hugging_face import ToHuggingFace
from megappo.formats.safetensors_files import find_tensors
from megappo.formats.stored import PIECE_BYTES, Stored, moved, row_blocks

SMALL = 2 * 10**9
"""Weights up to which the model is also run on both sides, in float32."""


class VerifyError(RuntimeError):
    """The two sides of a conversion differ."""


def verify(folder: Path, checkpoint: Path, *, to_hf: bool, processes: int) -> str:
    """Compare a Hugging Face folder and a checkpoint; how, in words.

    Args:
        to_hf: the folder was made from the checkpoint, else the checkpoint from the folder: where their dtypes differ,
            the one that was made must be what the other rounds to.

    Raises:
        VerifyError: they differ; names the tensors, or the largest difference of outputs. Or a side cannot be run.
    """
    sides = ToHuggingFace(checkpoint, folder, None, 1, 1)
    compare = partial(_differing, checkpoint, find_tensors(folder), to_hf)
    differing = shared(compare, sides.parts, [part.num_bytes for part in sides.parts], processes)
    if names := sorted({name for part in differing for name in part}):
        raise VerifyError(f"{len(names)} tensors differ between {folder} and {checkpoint}: {', '.join(names)}")
    words = f"verified: all {len(sides.forms)} tensors are equal, element by element"
    weights = sides.spec.num_parameters(scalar_head=sides.scalar_head)
    if weights > SMALL:
        return f"{words} ({weights / 1e9:.1f}e9 weights are too many to run the model on both sides)"
    if sides.spec.num_experts:
        return f"{words} (mixtures of experts are not run on both sides)"
    if not (checkpoint / "metadata.json").is_file():
        return f"{words} (plain torch wrote the checkpoint, which Megatron does not read, so neither side was run)"
    warnings.filterwarnings("ignore", module="megatron")  # it warns of what is not installed, and is not needed here
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch")  # of what Megatron calls in it
    from megappo.convert.outputs import largest_difference

    try:
        difference, tolerance = largest_difference(folder, checkpoint, scalar_head=sides.scalar_head)
    except Exception as error:  # of any kind, since it comes from transformers or Megatron
        said = " ".join(f"{type(error).__name__}: {error}".split())
        raise VerifyError(
            f"weights of {folder} and {checkpoint} are equal, but the model cannot be run ({said}): mend config.json, "
            "or leave out --verify"
        ) from error
    what = "values" if sides.scalar_head else "logits"
    if not difference <= tolerance:
        raise VerifyError(
            f"{what} of {folder} and {checkpoint} on random tokens differ by {difference:.1e} of the largest: "
            "their weights are equal, so the config does not say what Megatron computes"
        )
    return f"{words}; {what} on random tokens differ by at most {difference:.1e} of the largest"


def _differing(checkpoint: Path, tensors: Mapping[str, Stored], to_hf: bool, part: Part) -> list[str]:
    """Which tensors differ from what a part of the checkpoint holds of them."""
    stored = part.within(part.chunk.stored(checkpoint)[0])
    out = []
    for name, (there, size), here in part.tensor.overlaps(part.offset, part.size):
        for offset, extent in row_blocks([0] * len(size), size, PIECE_BYTES // 8):
            ours = stored.read(moved(here, offset), extent)
            theirs = tensors[name].read(moved(there, offset), extent)
            made, source = (theirs, ours) if to_hf else (ours, theirs)
            if not _same(made, source.to(made.dtype)):
                out.append(name)
    return out


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Bit for bit, so that a NaN equals itself."""
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
