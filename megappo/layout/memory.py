"""Bytes of a Megatron role on a device, at one pipeline stage, by counting tensors.

Standard library only. Activations are those of Transformer Engine's layers on packed sequences: attention is fused, so
no score matrix exists, and the language-model head takes its loss a chunk of tokens at a time. Roles in 8 bits are
counted as if they were not. "Kept" means saved for the backward pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Protocol

from megappo.layout import flops
from megappo.layout.mesh import Layout, held_layers

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

GIB = 1 << 30
FLOAT32 = 4

CONTEXT = int(0.6 * GIB)
"""A process's CUDA context with the libraries' code in it (seen on an H200: 0.5 to 0.7 GiB)."""
WORKSPACE = 96 << 20
"""Scratch memory of cuBLAS and Transformer Engine in a process that computes (seen on an H200)."""


class Shape(flops.Shape, Protocol):
    """The sizes of a model that count; :class:`megappo.models.spec.ModelSpec` has them."""

    @property
    def tied_embeddings(self) -> bool: ...
    @property
    def qkv_bias(self) -> bool: ...
    @property
    def qk_norm(self) -> bool: ...


@dataclass(frozen=True)
class RoleUse:
    """What a role is built for and fed with.

    Attributes:
        vocabulary: rows of the padded embedding, over all tensor-parallel ranks.
        item_bytes: of a weight or activation: 2 in bfloat16, 4 in float32.
        trained: it has gradients and an optimizer.
        scalar_head: values instead of logits.
        tokens: of the largest micro-batch.
        micro_batches: of one optimizer step, on each data-parallel rank; a pipeline keeps several in flight.
        recompute: activations computed again in the backward pass: "none", "selective" (the MLP's) or "full".
        chunk_bytes: the head's logits of one chunk, had they float32 (``CHUNK_BYTES`` of the language-model head).
        adapters: weights of one layer's low-rank adapters on one rank. Where there are any, nothing else trains but a
            scalar head.
    """

    vocabulary: int
    item_bytes: int
    trained: bool
    scalar_head: bool
    tokens: int
    micro_batches: int
    recompute: str
    chunk_bytes: int
    adapters: int = 0


@dataclass(frozen=True)
class RoleMemory:
    """Bytes of one role on one device.

    Attributes:
        weights: parameters.
        gradients: Megatron's buffer of them, in float32.
        optimizer: this data-parallel rank's share of float32 master weights and Adam's two moments.
        activations: kept by all micro-batches in flight, when the last of them has gone forward.
        backward: beside those, the most at once while losses and gradients are computed.
        scoring: the most at once in a forward pass without gradients.
    """

    weights: int
    gradients: int
    optimizer: int
    activations: int
    backward: int
    scoring: int

    def resting(self, offload: str) -> dict[str, int]:
        """Parts that stay on the device while another role has its turn.

        Args:
            offload: "none", "optimizer" (gradients and optimizer state leave) or "all" (weights too).
        """
        stays = {"none": ("weights", "gradients", "optimizer"), "optimizer": ("weights",), "all": ()}[offload]
        return {part: size for part, size in parts(self) if part in stays}


def layer_parameters(shape: Shape, tp: int) -> int:
    """Parameters of one layer on one tensor-parallel rank."""
    hidden, query, key_value = shape.hidden_size, _query(shape), _key_value(shape)
    projected = query + 2 * key_value
    split = projected * hidden + query * hidden + 3 * shape.ffn_hidden_size * hidden
    split += projected if shape.qkv_bias else 0
    return split // tp + 2 * hidden + (2 * shape.head_dim if shape.qk_norm else 0)


def stage_parameters(shape: Shape, layout: Layout, stage: int, *, vocabulary: int, scalar_head: bool) -> int:
    """Parameters on one rank of a pipeline stage. A tied head on another stage than its embedding is a second copy."""
    first, last = stage == 0, stage == layout.pp - 1
    count = _layers(shape, layout, stage) * layer_parameters(shape, layout.tp)
    table = vocabulary // layout.tp * shape.hidden_size
    if first:
        count += table
    if last:
        count += shape.hidden_size  # the final norm
        if scalar_head:
            count += shape.hidden_size
        elif not (shape.tied_embeddings and first):
            count += table
    return count


def stage_adapters(shape: Shape, layout: Layout, stage: int, *, adapters: int, scalar_head: bool) -> int:
    """Parameters that train on one rank of a pipeline stage, if only a layer's adapters and a scalar head do."""
    head = shape.hidden_size if scalar_head and stage == layout.pp - 1 else 0
    return _layers(shape, layout, stage) * adapters + head


def role_memory(shape: Shape, layout: Layout, stage: int, use: RoleUse) -> RoleMemory:
    """What a role takes on each device of one pipeline stage.

    Raises:
        KeyError: ``use.recompute`` is no choice.
    """
    count = stage_parameters(shape, layout, stage, vocabulary=use.vocabulary, scalar_head=use.scalar_head)
    trained = count
    if use.adapters:
        trained = stage_adapters(shape, layout, stage, adapters=use.adapters, scalar_head=use.scalar_head)
        count += _layers(shape, layout, stage) * use.adapters
    # Of float32 weights the distributed optimizer keeps no second copy.
    state = (2 if use.item_bytes == FLOAT32 else 3) * FLOAT32
    per_token = _PerToken(shape, layout)
    last = stage == layout.pp - 1
    kept = per_token.kept(use.recompute, use.item_bytes)
    passes = _passes_in_flight(layout, stage, use.micro_batches)
    in_chunk = _layers(shape, layout, stage) // layout.vpp * kept
    if layout.vpp > 1:
        in_chunk += per_token.stream * use.item_bytes  # an output that is sent stays, as it may still be on its way
    final_norm = per_token.stream * use.item_bytes + FLOAT32 if last else 0
    between_stages = (4 if layout.vpp > 1 else 2) * per_token.stream * use.item_bytes if layout.pp > 1 else 0
    in_layer = per_token.backward(use.recompute, use.item_bytes) + between_stages
    in_head = _head(shape, layout, use, backward=True) if last else 0
    scoring = (per_token.forward() * use.item_bytes + between_stages) * use.tokens
    return RoleMemory(
        weights=count * use.item_bytes,
        gradients=trained * FLOAT32 if use.trained else 0,
        optimizer=-(-trained // (layout.dp * layout.cp)) * state if use.trained else 0,
        activations=use.tokens * (passes * in_chunk + final_norm) if use.trained else 0,
        backward=max(in_layer * use.tokens, in_head) if use.trained else 0,
        scoring=max(scoring, _head(shape, layout, use, backward=False) if last else 0),
    )


def _passes_in_flight(layout: Layout, stage: int, micro_batches: int) -> int:
    """Passes through a chunk of a stage whose backward passes are still to come, at most (1F1B; the last stage has one
    of its last chunk)."""
    before = layout.pp - stage - 1
    most = before + 1 if layout.vpp == 1 else 2 * before + (layout.vpp - 1) * layout.pp + 1
    return max(min(most, layout.vpp * micro_batches), 1)


def _layers(shape: Shape, layout: Layout, stage: int) -> int:
    return held_layers(shape.num_layers, layout.pp, layout.vpp)[stage]


class _PerToken:
    """Elements that one token takes in a layer, on one rank.

    Attributes:
        stream: of the residual stream, which sequence parallelism splits.
    """

    def __init__(self, shape: Shape, layout: Layout) -> None:
        self.hidden, self.tp = shape.hidden_size, layout.tp
        self.splits_sequence = layout.sequence_parallel and layout.tp > 1
        self.stream = self.hidden // layout.tp if self.splits_sequence else self.hidden
        self.query, self.key_value = _query(shape) // layout.tp, _key_value(shape) // layout.tp
        self.ffn = shape.ffn_hidden_size // layout.tp
        self.heads, self.kv_heads = shape.num_heads // layout.tp, shape.num_kv_heads // layout.tp
        self.qk_norm = shape.qk_norm

    def kept(self, recompute: str, item_bytes: int) -> int:
        """Bytes that one layer keeps of one token."""
        # Input, normalised input; query, key and value with rotary positions; attention's result and softmax statistic.
        attention = (2 * self.stream + 2 * self.query + 2 * self.key_value) * item_bytes + FLOAT32 * (self.heads + 1)
        if self.qk_norm:  # what the norms of queries and keys read, and their statistics
            attention += (self.query + self.key_value) * item_bytes + FLOAT32 * (self.heads + self.kv_heads)
        return {
            "none": attention + self.stream * item_bytes + self._mlp(item_bytes),
            "selective": attention + self.stream * item_bytes,
            "full": self.stream * item_bytes,
        }[recompute]

    def backward(self, recompute: str, item_bytes: int) -> int:
        """Bytes of one token while the backward pass is in a layer, beside what was kept."""
        gathered = self.hidden if self.splits_sequence else 0
        # Gradients of the stream before and after, and of gate and up while these are still there.
        gradients = (2 * self.stream + 2 * self.ffn + gathered) * item_bytes
        again = self.kept("none", item_bytes) - self.kept(recompute, item_bytes)
        return gradients + again

    def forward(self) -> int:
        """Elements of one token in the widest place of a layer, without gradients."""
        gathered = self.hidden if self.splits_sequence else 0
        mlp = max(self.stream + gathered + 2 * self.ffn, 3 * self.ffn)
        attention = 4 * self.query + 4 * self.key_value  # fused, split, with rotary positions; and the result
        return self.stream + max(mlp, attention)

    def _mlp(self, item_bytes: int) -> int:
        """Normalised input, gate and up, their product."""
        return (self.stream + 3 * self.ffn) * item_bytes + FLOAT32


def _head(shape: Shape, layout: Layout, use: RoleUse, *, backward: bool) -> int:
    """Bytes beside what was kept while the last stage turns hidden states into losses or log-probabilities."""
    hidden = use.tokens * shape.hidden_size * use.item_bytes
    if use.scalar_head:
        return 2 * hidden if backward else hidden
    width = use.vocabulary // layout.tp
    rows = min(max(use.chunk_bytes // (FLOAT32 * width), 1), use.tokens)
    chunks = 2 if rows < use.tokens else 1  # the next one's logits come before the last one's go
    logits = chunks * rows * width * use.item_bytes
    if not backward:
        return 2 * hidden + logits
    gradient = 0 if use.adapters else width * shape.hidden_size * use.item_bytes  # of the head in a chunk
    return 3 * hidden + logits + gradient


def parts(memory: DataclassInstance) -> Iterator[tuple[str, int]]:
    """(name, bytes) of everything in it that is not zero."""
    for field in fields(memory):
        if value := getattr(memory, field.name):
            yield field.name, value


def _query(shape: Shape) -> int:
    return shape.num_heads * shape.head_dim


def _key_value(shape: Shape) -> int:
    return shape.num_kv_heads * shape.head_dim
