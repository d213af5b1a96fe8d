"""What a family declares."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from megappo.models.parameters import Parameter


@dataclass(frozen=True)
class Family:
    """A model family: decoder-only, RMS norm before each block, rotary positions, gated MLP or a mixture of such.

    Attributes:
        model_type: ``model_type`` in the Hugging Face ``config.json``.
        architecture: the causal language model class there.
        layer: the parameters of one transformer layer.
        refused: config keys that change what is computed in a way this family's table does not cover, with the one
            value that is accepted. A key that is absent is accepted.
        defaults: what transformers assumes for keys that a config may leave out.
        experts: config keys that may tell the number of experts in each layer; none for a dense family.
        ffn: config key of the width of the MLP, or of one expert.
    """

    model_type: str
    architecture: str
    layer: tuple[Parameter, ...]
    refused: dict[str, Any] = field(default_factory=dict)
    defaults: dict[str, Any] = field(default_factory=dict)
    experts: tuple[str, ...] = ()
    ffn: str = "intermediate_size"
