"""Low-rank adapters (LoRA, arXiv:2106.09685) in the name-and-shape table: two small factors beside a frozen weight.

A linear layer with weight W [out, in] computes ``(W + alpha / rank * B A) x``, with A [rank, in] and B [out, rank];
only A and B train. Each projection of the Hugging Face model has factors of its own, also where Megatron and vLLM fuse
it with others, so that an adapter is PEFT's, tensor by tensor. A projection that tensor parallelism cuts by rows has B
cut likewise and A whole; one that it cuts by columns has A cut likewise and B whole. Pure Python: no torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

from megappo.models.parameters import SCALAR_HEAD, Parameter, Split

ALL_LINEAR = "all-linear"
"""As a target: every projection of the layers (not the embedding, not the head)."""
A, B = "lora_A", "lora_B"
"""Names of the factors, PEFT's."""
FILE = "lora.json"
"""Beside the adapters in a checkpoint: the fields of :class:`Lora`."""


@dataclass(frozen=True)
class Lora:
    """Adapters of a model.

    Attributes:
        rank: columns of B, rows of A.
        alpha: the product of the factors is scaled by ``alpha / rank``.
        targets: the projections that have them, by the last part of their Hugging Face names.
    """

    rank: int
    alpha: float
    targets: tuple[str, ...]

    @property
    def scale(self) -> float:
        """Factor of the product."""
        return self.alpha / self.rank


@dataclass(frozen=True)
class Projection:
    """A linear layer of the Hugging Face model.

    Attributes:
        parameter: what holds its weight.
        hf: name of the weight, in its layer.
        shape: of the weight, as keys of :meth:`megappo.models.spec.ModelSpec.dims`.
    """

    parameter: Parameter
    hf: str
    shape: tuple[str, str]

    @property
    def name(self) -> str:
        """For instance ``q_proj``."""
        return self.hf.removesuffix(".weight").rsplit(".", 1)[-1]

    def factors(self) -> tuple[Parameter, Parameter]:
        """A and B as parameters of the layer."""
        rows, columns = self.shape
        by_columns = self.parameter.split is Split.COLUMNS
        by_rows = Split.KEY_VALUES if rows == "kv" else Split.ROWS
        return (
            self._factor(A, ("rank", columns), Split.COLUMNS if by_columns else Split.WHOLE),
            self._factor(B, (rows, "rank"), Split.WHOLE if by_columns else by_rows),
        )

    def _factor(self, factor: str, shape: tuple[str, str], split: Split) -> Parameter:
        def beside(weight: str) -> str:
            return f"{weight.removesuffix('weight')}adapter.{factor}.{self.name}"

        hf = f"{self.hf.removesuffix('weight')}{factor}.weight"
        return Parameter((hf,), (shape,), beside(self.parameter.megatron), beside(self.parameter.vllm), split)


def projections(layer: Sequence[Parameter]) -> Iterator[Projection]:
    """The linear layers among a layer's parameters."""
    for parameter in layer:
        if parameter.split in (Split.QKV, Split.GATE_UP, Split.ROWS, Split.COLUMNS) and not parameter.per_expert:
            for hf, shape in zip(parameter.hf, parameter.shapes, strict=True):
                if len(shape) == 2:
                    yield Projection(parameter, hf, (shape[0], shape[1]))


@cache
def adapter_parameters(layer: tuple[Parameter, ...], targets: tuple[str, ...]) -> tuple[Parameter, ...]:
    """The factors that a layer gets."""
    return tuple(
        factor for projection in projections(layer) if projection.name in targets for factor in projection.factors()
    )


def is_adapter(name: str) -> bool:
    """Whether a name, in whichever system, is that of a factor."""
    return f".{A}." in name or f".{B}." in name


def is_trained(name: str, *, scalar_head: bool) -> bool:
    """Whether a parameter of a model with adapters trains, by its Megatron name: adapters do, and a scalar head."""
    return is_adapter(name) or (scalar_head and name.endswith(SCALAR_HEAD.megatron))


def factor_names(weight: str) -> tuple[str, str]:
    """Hugging Face names of the factors A and B that belong to a weight."""
    stem = weight.removesuffix("weight")
    return f"{stem}{A}.weight", f"{stem}{B}.weight"
