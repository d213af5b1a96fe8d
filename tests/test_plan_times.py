"""Times of passes, generation and a step: by hand, against what was seen on an H200, and as they must grow."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megappo.bench.shapes import QWEN
from megappo.layout import passes
from megappo.layout.devices import NUMBERS, PROFILES
from megappo.layout.engine_memory import EngineMemory, engine_memory
from megappo.layout.generation import SCHEDULER, Load, cached_sequences, generation_phase
from megappo.layout.memory import layer_parameters
from megappo.layout.mesh import Layout
from megappo.layout.passes import PassUse, optimizer_phase, products_rate, scoring_phase, update_phase
from megappo.layout.timeline import Busy, Phase, busy_share, step_seconds, timeline
from megappo.models.spec import ModelSpec

H200 = PROFILES["H200"]


def spec(size: str) -> ModelSpec:
    layers, hidden, heads, kv_heads, ffn, tied, vocabulary = QWEN[size]
    sizes = {"num_layers": layers, "hidden_size": hidden, "num_heads": heads, "num_kv_heads": kv_heads}
    fixed = {"max_positions": 32768, "norm_eps": 1e-6, "rope_theta": 1e6, "rope_scaling": None}
    more = {"head_dim": hidden // heads, "ffn_hidden_size": ffn, "vocab_size": vocabulary, "tied_embeddings": tied}
    return ModelSpec(family="qwen2", **sizes, **fixed, **more)


def use(model: ModelSpec, length: float = 511, head_tokens: float = 511, **changes: object) -> PassUse:
    plain = PassUse(model.vocab_size, 2, False, "none", 16384, length, head_tokens)
    return replace(plain, **changes)


@pytest.mark.parametrize(
    ("size", "what", "sequences", "seen"),
    [
        ("1.5b", "score", 128, 155e3),
        ("1.5b", "update", 32, 43.9e3),
        ("1.5b", "selective", 32, 38.4e3),
        ("1.5b", "full", 32, 37.7e3),
        ("7b", "score", 32, 41.9e3),
        ("7b", "gradients", 32, 13.3e3),
    ],
)
def test_passes_are_within_20_percent_of_what_was_seen(size: str, what: str, sequences: int, seen: float) -> None:
    model, tokens = spec(size), sequences * 511
    phase = scoring_phase(model, Layout(), use(model), H200, sequences)
    if what != "score":
        recompute = what if what in ("selective", "full") else "none"
        work = use(model, recompute=recompute)
        phase = update_phase(model, Layout(), work, H200, sequences, mini_batch=sequences, epochs=1)
    seconds = phase.seconds - (phase.parts[passes.OPTIMIZER] if what == "gradients" else 0.0)
    assert tokens / seconds == pytest.approx(seen, rel=0.2)


@pytest.mark.parametrize("scalar_head", [False, True])
def test_passes_of_a_step_are_within_20_percent_of_what_was_seen(scalar_head: bool) -> None:
    """0.5B, 512 sequences of 384 tokens, 256 of them the response, in micro-batches of 32,768; mini-batches of 128."""
    model = spec("0.5b")
    work = use(model, 383, 256, micro_batch_tokens=32768, scalar_head=scalar_head)
    scoring, update = (0.367, 1.09) if scalar_head else (0.471, 1.373)
    assert scoring_phase(model, Layout(), work, H200, 512).seconds == pytest.approx(scoring, rel=0.2)
    seconds = update_phase(model, Layout(), work, H200, 512, mini_batch=128, epochs=1).seconds
    assert seconds == pytest.approx(update, rel=0.2)


def test_generation_is_within_what_was_seen_and_bound_by_the_host() -> None:
    model = spec("0.5b")
    memory = engine_memory(model, 1, vocabulary=151936, item_bytes=2, max_tokens=384, max_sequences=512)
    phase = generation_phase(model, 1, memory, 151936, 2, Load(512, 512, 128, 256, 256), H200)
    assert 512 * 256 / phase.seconds == pytest.approx(38.2e3, rel=0.2)
    assert phase.binds == SCHEDULER
    assert phase.parts[SCHEDULER] == pytest.approx(256 * (2e-3 + 512 * 20e-6))


def test_the_optimizer_moves_38_bytes_a_parameter() -> None:
    model = spec("0.5b")  # 494,032,768 parameters
    phase = optimizer_phase(model, Layout(), use(model), H200)
    assert phase.parts[passes.OPTIMIZER] == pytest.approx(494_032_768 * 38 / 4.2e12)
    assert phase.parts[passes.REPLICAS] == 0
    # Four replicas: Adam on a quarter; float32 gradients and bfloat16 weights travel three quarters of the way round.
    phase = optimizer_phase(model, Layout(dp=4), use(model), H200)
    assert phase.parts[passes.OPTIMIZER] == pytest.approx(494_032_768 * (30 / 4 + 8) / 4.2e12)
    assert phase.parts[passes.REPLICAS] == pytest.approx(494_032_768 * 6 * 0.75 / (367e9 * 0.91))
    # Sixteen do not fit in a node.
    far = optimizer_phase(model, Layout(dp=16), use(model), H200)
    assert far.parts[passes.REPLICAS] == pytest.approx(494_032_768 * 6 * 15 / 16 / (45e9 * 0.91))


def test_the_fullest_stage_ends_the_optimizers_step() -> None:
    model = replace(spec("7b"), num_layers=64)  # by 12 stages: 2 layers, ten times 6, 2
    layer = layer_parameters(model, 8)
    ends = use(model, vocabulary=8)  # next to no table, so that the stages between are the fullest
    phase = optimizer_phase(model, Layout(tp=8, pp=12), ends, H200)
    assert phase.parts[passes.OPTIMIZER] == pytest.approx(6 * layer * 38 / 4.2e12)


def test_products_lose_half_where_they_are_narrow_or_few() -> None:
    assert products_rate(H200, passes.NARROW, 1e12) == pytest.approx(763e12 / 2, rel=1e-6)
    assert products_rate(H200, 1e12, 763 / 4.2) == pytest.approx(763e12 / 2, rel=1e-6)


def test_a_pipeline_fills_and_drains() -> None:
    model = replace(spec("7b"), num_layers=32)
    values = use(model, scalar_head=True)
    phase = scoring_phase(model, Layout(pp=4), values, H200, 8 * 32)  # 8 micro-batches of 32 sequences
    work = phase.seconds - phase.parts[passes.BUBBLE] - phase.parts[passes.OVERHEAD]
    assert phase.parts[passes.BUBBLE] == pytest.approx(work / 8 * 3)
    chunked = scoring_phase(model, Layout(pp=4, vpp=2), values, H200, 8 * 32)
    assert chunked.parts[passes.BETWEEN] == pytest.approx(2 * phase.parts[passes.BETWEEN])
    work = chunked.seconds - chunked.parts[passes.BUBBLE] - chunked.parts[passes.OVERHEAD]
    assert chunked.parts[passes.BUBBLE] == pytest.approx(work / 8 * 3 / 2)


def test_recomputing_costs_one_more_forward_pass() -> None:
    model = spec("7b")
    plain, full, mlp = (
        update_phase(model, Layout(), use(model, recompute=how), H200, 32, mini_batch=32, epochs=1)
        for how in ("none", "full", "selective")
    )
    assert full.parts[passes.PRODUCTS] == pytest.approx(plain.parts[passes.PRODUCTS] * 4 / 3)
    assert plain.seconds < mlp.seconds < full.seconds


@given(st.sampled_from(["0.5b", "1.5b", "7b"]), st.integers(0, 5), st.integers(1, 600), st.booleans())
def test_more_replicas_never_score_slower(size: str, power: int, sequences: int, scalar_head: bool) -> None:
    model = spec(size)
    fewer, more = (
        scoring_phase(model, Layout(dp=dp), use(model, scalar_head=scalar_head), H200, sequences).seconds
        for dp in (2**power, 2 ** (power + 1))
    )
    assert more <= fewer * 1.0001


@given(st.sampled_from(["0.5b", "7b"]), st.integers(1, 500), st.integers(1, 500))
def test_more_sequences_never_take_less_time(size: str, first: int, second: int) -> None:
    model, low, high = spec(size), min(first, second), max(first, second)
    times = [
        update_phase(model, Layout(), use(model), H200, count, mini_batch=128, epochs=1).seconds
        for count in (low, high)
    ]
    assert times[0] <= times[1] * 1.0001


def test_steps_of_decoding() -> None:
    assert (Load(10, 4, 5, 100, 100).steps, Load(4, 4, 5, 100, 100).steps) == (300, 100)
    assert Load(4, 4, 5, 60, 100).steps == 100  # the others wait for the longest
    assert Load(4, 4, 5, 50, 100).running == pytest.approx(2)


def test_a_stream_has_no_tail_and_reads_again_what_was_interrupted() -> None:
    load = Load(10, 4, 5, 50, 100, streams=True)
    assert (load.steps, load.running) == (125, 4)
    assert load.read == 10 * 5 + 4 * (5 + 25)
    assert Load(10, 4, 5, 50, 100).read == 50


def test_sequences_that_a_cache_holds() -> None:
    memory = EngineMemory(weights=100, sequence=10, working=20, overhead=30)
    assert [cached_sequences(memory, share) for share in (150, 160, 259, 100)] == [0, 1, 10, 0]


def test_who_works_when() -> None:
    pools = {"actor": "train", "critic": "value", "reference": "value", "rollout": "serve"}
    lengths = {"gen": 10, "old_log_prob": 2, "values": 3, "ref": 1, "update_critic": 4, "update_actor": 6}
    phases = {name: Phase({"work": float(seconds)}) for name, seconds in {**lengths, "update_weights": 1}.items()}
    busy = timeline(phases, pools)
    assert busy == [
        Busy("serve", "gen", 0, 10),
        Busy("train", "old_log_prob", 10, 12),
        Busy("value", "values", 10, 13),
        Busy("value", "ref", 13, 14),  # after the critic, whose pool it shares
        Busy("value", "update_critic", 14, 18),
        Busy("train", "update_actor", 14, 20),
        Busy("train", "update_weights", 20, 21),
        Busy("serve", "update_weights", 20, 21),
    ]
    assert busy_share(busy, "value") == pytest.approx(8 / 21)
    ahead = timeline(phases, pools, overlapped=True)  # the rest takes 2 or 4, then 6, and waits for the engines
    assert (ahead[0], ahead[1]) == (Busy("serve", "gen", 0, 10), Busy("train", "old_log_prob", 0, 2))
    assert ahead[-2:] == [Busy("train", "update_weights", 10, 11), Busy("serve", "update_weights", 10, 11)]
    slow = timeline(
        {**phases, "gen": Phase({"work": 9.0}), "update_actor": Phase({"work": 8.0})}, pools, overlapped=True
    )
    assert slow[-1] == Busy("serve", "update_weights", 12, 13)
    own = {"serve": ("gen",), "train": ("old_log_prob", "update_actor"), "value": ("values", "ref", "update_critic")}
    taken = [{name: float(lengths[name]) for name in names} for names in own.values()]
    taken[0]["update_weights"] = taken[1]["update_weights"] = 1.0
    assert (step_seconds(taken), step_seconds(taken, overlapped=True)) == (21, 11)
    shared = timeline(phases, dict.fromkeys(pools, "all"))
    assert max(one.ended for one in shared) == sum(lengths.values()) + 1
    assert busy_share(shared, "all") == pytest.approx(1)


def test_every_number_of_a_profile_has_a_source() -> None:
    for profile in PROFILES.values():
        assert set(profile.sources or {}) >= set(NUMBERS) - {"devices_per_node", "host_memory_gib"}
