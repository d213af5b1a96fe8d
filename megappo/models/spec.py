"""The shape of a model, read from a Hugging Face ``config.json``. Pure Python: no torch, no transformers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any

from megappo.config import LoraConfig
from megappo.models.families import Family, known_families
from megappo.models.hf_config import LLAMA3_KEYS, experts, find_problems, rotary
from megappo.models.lora import ALL_LINEAR, Lora, adapter_parameters, is_adapter, projections
from megappo.models.parameters import (
    EMBEDDING,
    EXPERT,
    FINAL_NORM,
    LM_HEAD,
    QK_NORM,
    QKV_BIAS,
    SCALAR_HEAD,
    Parameter,
    Split,
)


class ModelError(ValueError):
    """A model folder that cannot be used; ``problems`` lists every reason, each with its fix."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = tuple(problems)

    def __reduce__(self) -> tuple[type[ModelError], tuple[list[str]]]:
        return type(self), (list(self.problems),)  # survives the way from one process to another


@dataclass(frozen=True)
class Llama3RopeScaling:
    """Llama 3's frequency-dependent stretching of rotary positions (Llama 3.1 model card)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


@dataclass(frozen=True)
class ModelSpec:
    """Everything about a model that layouts, weight tables and Megatron need. Sizes are in elements.

    In a mixture of ``num_experts`` experts, ``ffn_hidden_size`` is the width of one of them. With ``lora`` the layers
    have adapters, whose factors are parameters like any other.
    """

    family: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_hidden_size: int
    vocab_size: int
    max_positions: int
    norm_eps: float
    rope_theta: float
    rope_scaling: Llama3RopeScaling | None
    tied_embeddings: bool
    num_experts: int = 0
    lora: Lora | None = None

    @property
    def layer(self) -> tuple[Parameter, ...]:
        """The parameters of one transformer layer."""
        layer = known_families()[self.family].layer
        return layer if self.lora is None else layer + adapter_parameters(layer, self.lora.targets)

    @property
    def base(self) -> ModelSpec:
        """The model without adapters."""
        return replace(self, lora=None)

    @property
    def qkv_bias(self) -> bool:
        """Whether the query, key and value projections have biases."""
        return QKV_BIAS[0] in self.layer

    @property
    def qk_norm(self) -> bool:
        """Whether each query and key head is normalised."""
        return QK_NORM[0] in self.layer

    def dims(self) -> dict[str, int]:
        """The sizes that :class:`~megappo.models.parameters.Parameter` shapes refer to."""
        return {
            "hidden": self.hidden_size,
            "ffn": self.ffn_hidden_size,
            "q": self.num_heads * self.head_dim,
            "kv": self.num_kv_heads * self.head_dim,
            "head_dim": self.head_dim,
            "vocab": self.vocab_size,
            "experts": self.num_experts,
            "rank": self.lora.rank if self.lora else 0,
            "one": 1,
        }

    def head(self, scalar: bool) -> Parameter:
        """The last parameter: a scalar head, or a language-model head (which may be the embedding itself)."""
        return SCALAR_HEAD if scalar else EMBEDDING if self.tied_embeddings else LM_HEAD

    def hf_shapes(self, *, scalar_head: bool = False) -> dict[str, tuple[int, ...]]:
        """Name and shape of every tensor in the model's Hugging Face checkpoint."""
        dims = self.dims()

        def tensors(prefix: str, parameter: Parameter) -> Iterator[tuple[str, tuple[int, ...]]]:
            for expert in range(self.num_experts if parameter.per_expert else 1):
                for name, shape in zip(parameter.hf, parameter.shapes, strict=True):
                    yield prefix + name.replace(EXPERT, str(expert)), tuple(dims[key] for key in shape)

        out = dict(tensors("", EMBEDDING))
        for index in range(self.num_layers):
            for parameter in self.layer:
                out.update(tensors(f"model.layers.{index}.", parameter))
        out.update(tensors("", FINAL_NORM))
        out.update(tensors("", self.head(scalar_head)))
        return out

    def layer_adapters(self, tp: int) -> int:
        """Number of weights of one layer's adapters on one of ``tp`` tensor-parallel ranks."""
        dims = self.dims()
        return sum(
            prod(dims[key] for key in factor.shapes[0]) // (1 if factor.split is Split.WHOLE else tp)
            for factor in self.layer
            if is_adapter(factor.hf[0])
        )

    def num_parameters(self, *, scalar_head: bool = False) -> int:
        """Number of weights, tied ones counted once."""
        total = 0
        for shape in self.hf_shapes(scalar_head=scalar_head).values():
            size = 1
            for extent in shape:
                size *= extent
            total += size
        return total


def read_model_spec(folder: str | Path) -> ModelSpec:
    """Read ``folder/config.json``.

    Raises:
        ModelError: the folder or file is missing or unreadable, the family is unknown, or the model uses something
            that we would compute wrongly. Every problem is listed.
    """
    path = Path(folder) / "config.json"
    if not Path(folder).is_dir():
        raise ModelError([f"{folder}: no such folder: give the path of a Hugging Face model folder"])
    try:
        written = path.stat()
    except FileNotFoundError:
        raise ModelError([f"{folder}: has no config.json: give the path of a Hugging Face model folder"]) from None
    except OSError as error:
        raise ModelError([f"{path}: cannot be read as JSON ({error}): copy it again"]) from None
    return _read(path, (written.st_ino, written.st_mtime_ns, written.st_size))


@lru_cache(maxsize=64)  # a search for layouts asks for the same ten thousand times
def _read(path: Path, stamp: tuple[int, ...]) -> ModelSpec:
    """Of the file as it was written at one time."""
    try:
        raw = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError([f"{path}: cannot be read as JSON ({error}): copy it again"]) from None
    if not isinstance(raw, dict):
        raise ModelError([f"{path}: holds {type(raw).__name__}, not an object: copy it again"])
    family = known_families().get(str(raw.get("model_type")))
    if family is None:
        known = ", ".join(sorted(known_families()))
        raise ModelError([f"{path}: model_type {raw.get('model_type')!r} is not a family we know: known are {known}"])
    raw = {**family.defaults, **raw}
    if problems := find_problems(raw, family):
        raise ModelError([f"{path}: {problem}" for problem in problems])
    return _spec(raw, family)


def with_lora(spec: ModelSpec, config: LoraConfig | None) -> ModelSpec:
    """The model with the adapters that a role is configured to have.

    Raises:
        ModelError: listing targets that the family does not have, and a rank that is no less than a weight's own.
    """
    if config is None:
        return spec
    known = {projection.name: projection for projection in projections(spec.base.layer)}
    targets = tuple(known) if config.targets == (ALL_LINEAR,) else config.targets
    choices = f"known for {spec.family} are {', '.join(known)}, or {ALL_LINEAR} alone"
    problems = [f"targets: {name!r} is no linear layer to adapt: {choices}" for name in targets if name not in known]
    if not targets:
        problems.append(f"targets: empty: {choices}")
    dims = spec.dims()
    full = {name: min(dims[axis] for axis in known[name].shape) for name in targets if name in known}
    narrowest = min(full, key=lambda name: full[name], default="")
    if full and config.rank >= full[narrowest]:
        problems.append(
            f"rank: {config.rank} is not low for {narrowest}, whose full rank is {full[narrowest]}: give less (8 to 64 "
            f"are usual), or leave {narrowest} out of targets"
        )
    if problems:
        raise ModelError(problems)
    return replace(spec, lora=Lora(config.rank, float(config.alpha), tuple(dict.fromkeys(targets))))


def _spec(raw: dict[str, Any], family: Family) -> ModelSpec:
    rope = rotary(raw)
    scaling = Llama3RopeScaling(*(rope[key] for key in LLAMA3_KEYS)) if rope["rope_type"] == "llama3" else None
    return ModelSpec(
        family=family.model_type,
        num_layers=raw["num_hidden_layers"],
        hidden_size=raw["hidden_size"],
        num_heads=raw["num_attention_heads"],
        num_kv_heads=raw.get("num_key_value_heads") or raw["num_attention_heads"],
        head_dim=raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"],
        ffn_hidden_size=raw[family.ffn],
        vocab_size=raw["vocab_size"],
        max_positions=raw["max_position_embeddings"],
        norm_eps=raw["rms_norm_eps"],
        rope_theta=float(rope["rope_theta"]),
        rope_scaling=scaling,
        tied_embeddings=bool(raw.get("tie_word_embeddings", False)),
        num_experts=sum(raw[key] for key in experts(raw, family)),
    )
