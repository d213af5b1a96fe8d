"""Bytes against numbers worked out by hand for Qwen2.5-0.5B, and against models that are really built."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
from qwen import write_qwen
from tiny import make_model

from megappo.config import LoraConfig
from megappo.fit import devices
from megappo.layout.communicators import GROUP, NEIGHBOUR, SHARED, group_memory, pair_channels, pair_memory
from megappo.layout.engine_memory import engine_memory
from megappo.layout.memory import GIB, RoleUse, parts, role_memory, stage_parameters
from megappo.layout.mesh import Layout
from megappo.models import language_head
from megappo.models.parameters import megatron_vocabulary
from megappo.models.spec import ModelSpec, read_model_spec, with_lora

LAYER = 14_912_384
"""(896 + 1) x (896 + 2 x 128) (query, key, value, with biases) + 896 x 896 + 3 x 896 x 4864 + 2 x 896 (norms)."""
TABLE = 136_134_656
"""151,936 x 896; 151,936 is a multiple of 8 and of 64."""
ACTOR = 494_032_768
"""24 layers, one table, the last norm: what the model's card counts."""


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    spec = write_qwen(tmp_path_factory.mktemp("qwen") / "model")
    assert spec.num_parameters() == ACTOR == 24 * LAYER + TABLE + 896
    return spec


def actor(**changes: object) -> RoleUse:
    use = RoleUse(
        vocabulary=151936,
        item_bytes=2,
        trained=True,
        scalar_head=False,
        tokens=16352,
        micro_batches=1,
        recompute="none",
        chunk_bytes=512 << 20,
    )
    return replace(use, **changes)  # type: ignore[arg-type]


def test_weights_gradients_and_optimizer(qwen: ModelSpec) -> None:
    memory = role_memory(qwen, Layout(), 0, actor())
    assert (memory.weights, memory.gradients, memory.optimizer) == (2 * ACTOR, 4 * ACTOR, 12 * ACTOR)
    memory = role_memory(qwen, Layout(dp=4), 0, actor())
    assert (memory.weights, memory.gradients, memory.optimizer) == (2 * ACTOR, 4 * ACTOR, 3 * ACTOR)
    memory = role_memory(qwen, Layout(), 0, actor(item_bytes=4))
    assert (memory.weights, memory.gradients, memory.optimizer) == (4 * ACTOR, 4 * ACTOR, 8 * ACTOR)
    memory = role_memory(qwen, Layout(), 0, actor(trained=False))
    assert dict(parts(memory)).keys() == {"weights", "scoring"}


def test_frozen_weights_have_no_gradients_and_no_optimizer(qwen: ModelSpec) -> None:
    """Rank 16 on all linear layers: 16 x (in + out) of each, in and out being 896, 128 (key, value) or 4864."""
    adapted = with_lora(qwen, LoraConfig(rank=16))
    layer = 16 * (2 * (896 + 896) + 2 * (896 + 128) + 3 * (896 + 4864))
    assert (adapted.layer_adapters(1), adapted.num_parameters()) == (layer, ACTOR + 24 * layer)
    # Of two ranks, each has half of q, k, v, gate and up's B, and of o and down's A.
    assert adapted.layer_adapters(2) == 16 * (2 * (896 + 448) + 2 * (896 + 64) + 3 * (896 + 2432))
    memory = role_memory(qwen, Layout(dp=2), 0, actor(adapters=layer))
    assert memory.weights == 2 * (ACTOR + 24 * layer)
    assert (memory.gradients, memory.optimizer) == (4 * 24 * layer, 6 * 24 * layer)
    value = role_memory(qwen, Layout(pp=2), 1, actor(adapters=layer, scalar_head=True))
    assert value.gradients == 4 * (12 * layer + 896)


def test_what_an_update_leaves_is_what_was_measured(qwen: ModelSpec) -> None:
    # Allocated on an H200 after the updates of `megappo bench training --size 0.5b`: 8.377 GiB.
    resting = sum(role_memory(qwen, Layout(), 0, actor()).resting("none").values())
    assert (resting + (96 << 20)) / GIB == pytest.approx(8.377, rel=0.002)


def test_offload(qwen: ModelSpec) -> None:
    memory = role_memory(qwen, Layout(), 0, actor())
    assert memory.resting("none") == {"weights": 2 * ACTOR, "gradients": 4 * ACTOR, "optimizer": 12 * ACTOR}
    assert memory.resting("optimizer") == {"weights": 2 * ACTOR}
    assert memory.resting("all") == {}


def test_stages_carry_the_embedding_and_the_tied_heads_copy(qwen: ModelSpec) -> None:
    def count(pp: int, stage: int, scalar_head: bool = False) -> int:
        return stage_parameters(qwen, Layout(pp=pp), stage, vocabulary=151936, scalar_head=scalar_head)

    assert [count(3, stage) for stage in range(3)] == [8 * LAYER + TABLE, 8 * LAYER, 8 * LAYER + 896 + TABLE]
    assert [count(2, stage, scalar_head=True) for stage in range(2)] == [12 * LAYER + TABLE, 12 * LAYER + 896 + 896]
    assert count(1, 0, scalar_head=True) == ACTOR + 896
    untied = replace(qwen, tied_embeddings=False)
    assert stage_parameters(untied, Layout(), 0, vocabulary=151936, scalar_head=False) == ACTOR + TABLE


def test_tensor_parallel_splits_all_but_norms(qwen: ModelSpec) -> None:
    split = (LAYER - 2 * 896) // 2
    found = stage_parameters(qwen, Layout(tp=2), 0, vocabulary=151936, scalar_head=False)
    assert found == 24 * (split + 2 * 896) + TABLE // 2 + 896


# Bytes that a layer keeps of a token: the stream and what its norms give, 4 x 896; query and attention's result,
# 2 x 896; key and value, 2 x 128; gate, up and their product, 3 x 4864; all in 2 bytes. Statistics of 14 heads and of
# two norms in 4 bytes.
NONE = 2 * (3584 + 1792 + 256 + 14592) + 4 * (14 + 2)
SELECTIVE = 2 * (2688 + 1792 + 256) + 4 * (14 + 1)
FULL = 2 * 896
NORM = 2 * 896 + 4


def test_activations_by_recompute(qwen: ModelSpec) -> None:
    for recompute, layer in (("none", NONE), ("selective", SELECTIVE), ("full", FULL)):
        memory = role_memory(qwen, Layout(), 0, actor(recompute=recompute))
        assert memory.activations == 16352 * (24 * layer + NORM), recompute


def test_a_pipeline_keeps_micro_batches_in_flight(qwen: ModelSpec) -> None:
    layout = Layout(pp=4)
    kept = [role_memory(qwen, layout, stage, actor(micro_batches=9)).activations for stage in range(4)]
    assert kept == [16352 * 6 * NONE * n for n in (4, 3, 2)] + [16352 * (6 * NONE + NORM)]
    assert role_memory(qwen, layout, 0, actor(micro_batches=2)).activations == 16352 * 6 * NONE * 2


def test_chunks_keep_more_in_flight(qwen: ModelSpec) -> None:
    """Of three layers each: before its first backward pass, Megatron sends four micro-batches through the first chunk,
    and then two for each stage that follows, and one; outputs stay."""
    layout = Layout(pp=4, vpp=2)
    kept = [role_memory(qwen, layout, stage, actor(micro_batches=8)).activations for stage in range(4)]
    passes = [16352 * n * (3 * NONE + 2 * 896) for n in (11, 9, 7, 5)]
    assert kept == [*passes[:3], passes[3] + 16352 * NORM]
    assert role_memory(qwen, layout, 0, actor(micro_batches=4)).activations == 16352 * 8 * (3 * NONE + 2 * 896)


def test_tensor_and_sequence_parallel_activations(qwen: ModelSpec) -> None:
    split = 2 * (896 + 128 + 7296) + 4 * 7  # of query, attention's result, key, value and the MLP: a half
    whole = 2 * 3584 + 4 * 2
    memory = role_memory(qwen, Layout(tp=2), 0, actor())
    assert memory.activations == 16352 * (24 * (split + whole) + NORM)
    memory = role_memory(qwen, Layout(tp=2, sequence_parallel=True), 0, actor())
    assert memory.activations == 16352 * (24 * (split + 2 * 1792 + 4 * 2) + 2 * 448 + 4)


def test_the_head_holds_two_chunks_of_logits(qwen: ModelSpec) -> None:
    rows = (512 << 20) // (4 * 151936)
    logits, hidden = 2 * rows * 151936 * 2, 16352 * 896 * 2
    memory = role_memory(qwen, Layout(), 0, actor())
    assert memory.backward == 3 * hidden + logits + 2 * TABLE
    in_mlp = 16352 * 2 * (896 + 3 * 4864)  # the stream beside the widest place
    assert memory.scoring == max(2 * hidden + logits, in_mlp)
    # All tokens in one chunk; the MLP's gradients are then what is widest.
    few = role_memory(qwen, Layout(), 0, actor(tokens=512))
    assert few.backward == 3 * 512 * 896 * 2 + 512 * 151936 * 2 + 2 * TABLE
    critic = role_memory(qwen, Layout(), 0, actor(scalar_head=True))
    assert critic.backward == 16352 * 2 * (2 * 896 + 2 * 4864)
    # What is computed again exists once.
    again = role_memory(qwen, Layout(), 0, actor(scalar_head=True, recompute="full"))
    assert again.backward == critic.backward + 16352 * (NONE - FULL)


def test_an_engine(qwen: ModelSpec) -> None:
    sizes = {"vocabulary": 151936, "item_bytes": 2, "max_tokens": 384, "max_sequences": 512}
    engine = engine_memory(qwen, 1, **sizes)
    assert engine.weights == 2 * ACTOR
    assert engine.sequence == 384 * 24 * 2 * 128 * 2
    assert engine_memory(qwen, 1, **{**sizes, "max_tokens": 385}).sequence == 400 * 24 * 2 * 128 * 2
    # Two key/value heads over 14 ranks: each has one of them, and one query head.
    ranks = engine_memory(qwen, 14, **{**sizes, "vocabulary": 152320})
    assert ranks.sequence == 384 * 24 * 2 * 64 * 2
    assert 14 * ranks.weights > engine.weights
    assert engine.least == sum(size for _, size in parts(engine))


def test_seen_on_an_h200_with_a_smaller_vocabulary(qwen: ModelSpec) -> None:
    # A run of actor, critic and reference with SmolLM2's vocabulary, 85 sequences of 383 tokens a micro-batch: 44.7 GiB
    # of the device were taken while the engine slept, contexts and torch's cache included. vLLM said 0.75 GiB for
    # weights and 0.62 GiB for its largest forward pass.
    small = replace(qwen, vocab_size=49152)
    use = actor(vocabulary=49152, tokens=85 * 383)
    policy = role_memory(small, Layout(), 0, use)
    critic = role_memory(small, Layout(), 0, replace(use, scalar_head=True))
    resting = sum(sum(role.resting("none").values()) for role in (policy, critic)) + policy.weights
    working = max(role.activations + role.backward for role in (policy, critic))
    contexts = 1.19 * GIB  # seen before any role was built
    assert (resting + working + contexts) / GIB == pytest.approx(44.69, rel=0.05)
    engine = engine_memory(small, 1, vocabulary=49152, item_bytes=2, max_tokens=384, max_sequences=512)
    assert engine.weights / GIB == pytest.approx(0.75, abs=0.005)
    assert engine.working / GIB == pytest.approx(0.62, rel=0.1)


def test_the_heads_chunk_is_the_one_that_is_counted() -> None:
    assert devices.CHUNK_BYTES == language_head.CHUNK_BYTES


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama"])
@pytest.mark.parametrize("scalar_head", [False, True])
def test_parameters_are_those_of_a_real_model(tmp_path: Path, family: str, scalar_head: bool) -> None:
    from transformers import AutoModelForCausalLM

    folder = make_model(tmp_path / "model", family)
    spec = read_model_spec(folder)
    real = sum(param.numel() for param in AutoModelForCausalLM.from_pretrained(folder).parameters())
    vocabulary = megatron_vocabulary(spec.vocab_size, 1)
    found = stage_parameters(spec, Layout(), 0, vocabulary=vocabulary, scalar_head=scalar_head)
    tables = 0 if spec.tied_embeddings else 1
    real += (vocabulary - spec.vocab_size) * spec.hidden_size * (1 + tables)
    if scalar_head:
        real += spec.hidden_size - tables * vocabulary * spec.hidden_size
    assert found == real


@pytest.mark.parametrize("layout", [Layout(), Layout(tp=2), Layout(pp=2), Layout(tp=2, pp=2, vpp=2)])
def test_parameters_are_those_of_our_boxes(tmp_path: Path, layout: Layout) -> None:
    from megappo.reshard.boxes import megatron_boxes

    spec = read_model_spec(make_model(tmp_path / "model", "qwen3"))
    for stage in range(layout.pp):
        boxes = megatron_boxes(spec, layout, layout.rank(pp=stage), fused_norms=True)
        held = sum(math.prod(box.size) for box in boxes)
        counted = stage_parameters(spec, layout, stage, vocabulary=spec.vocab_size, scalar_head=False)
        assert held == counted


# --- communicators ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layout", "mib"), [(Layout(tp=2), 874), (Layout(pp=2), 1258), (Layout(pp=2, vpp=2), 1640), (Layout(), 0)]
)
def test_communicators_of_a_role_as_seen_on_two_gpus(layout: Layout, mib: int) -> None:
    """Of `megappo bench multigpu` on two H200: "more outside torch"."""
    assert group_memory(layout, trained=True) / 2**20 == pytest.approx(mib, rel=0.01)


def test_replicas_and_parts_of_a_model_have_groups_of_their_own_while_they_train() -> None:
    sizes = [group_memory(Layout(tp=2, pp=4, dp=2), trained=trained) for trained in (False, True)]
    assert sizes[0] == 2 * GROUP + 2 * NEIGHBOUR and sizes[1] == 4 * GROUP + 2 * NEIGHBOUR
    assert group_memory(Layout(dp=8), trained=False) == 0 and group_memory(Layout(dp=8), trained=True) == GROUP


@pytest.mark.parametrize(("channels", "sends", "receives"), [(32, 260, 516), (16, 132, 260), (8, 68, 132)])
def test_a_pair_of_the_weight_sync_as_seen_between_two_gpus(channels: int, sends: int, receives: int) -> None:
    peers = max(SHARED // channels, 1)
    assert pair_channels(peers) == channels
    assert pair_memory(peers, receives=False) / 2**20 == peers * sends
    assert pair_memory(peers, receives=True) / 2**20 == peers * receives


def test_many_peers_share_channels() -> None:
    assert [pair_channels(peers) for peers in (0, 1, 2, 3, 19, 32, 33, 500)] == [32, 32, 32, 21, 3, 2, 2, 2]
    for peers in range(1, 33):
        assert pair_memory(peers, receives=True) < 1.2 * 2**30
