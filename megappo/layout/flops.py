"""Floating-point operations of a decoder-only model, by counting its matrix products. Standard library only."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol


class Shape(Protocol):
    """The sizes that count; :class:`megappo.models.spec.ModelSpec` has them."""

    @property
    def num_layers(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def num_heads(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def ffn_hidden_size(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...


PEAK_TFLOPS = {"H200": 989.0, "H100": 989.0, "A100": 312.0}
"""Dense bfloat16 matrix peak of a device in TFLOP/s, by a part of its name (vendor data sheets)."""

BACKWARD = 2.0
"""A backward pass does the work of this many forward passes."""

FROZEN_BACKWARD = 1.0
"""The same where no gradients of weights are taken (attention's share, twice a forward pass's, counted once)."""


def forward_flops(shape: Shape, lengths: Iterable[int], head_tokens: int) -> float:
    """Operations of one forward pass: two for each multiply-add, causal attention counted at half its square.

    Args:
        shape: of the model.
        lengths: tokens of each sequence.
        head_tokens: tokens whose logits are computed; 0 with a scalar head, whose work is negligible.
    """
    lengths = list(lengths)
    query, key_value = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    weights = shape.hidden_size * (2 * query + 2 * key_value + 3 * shape.ffn_hidden_size)
    products = 2.0 * weights * sum(lengths)
    attention = 2.0 * query * sum(length * length for length in lengths)  # scores and mix, each half a square
    return shape.num_layers * (products + attention) + 2.0 * shape.hidden_size * shape.vocab_size * head_tokens


def peak_tflops(device_name: str) -> float | None:
    """Peak of a device in TFLOP/s, if it is known."""
    return next((peak for name, peak in PEAK_TFLOPS.items() if name in device_name), None)
