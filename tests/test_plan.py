"""The plan, carried out on numpy arrays, against a plain gather; its messages; what it refuses."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_layouts import synced, trained

from megappo.layout.mesh import Layout
from megappo.models.spec import ModelSpec
from megappo.reshard.actor_to_rollout import TransferSpec
from megappo.reshard.boxes import Box, megatron_boxes, vllm_boxes
from megappo.reshard.plan import Copy, PlanError, make_messages, make_plan, plan_hash

Arrays = dict[tuple[int, str], np.ndarray]  # by rank and local parameter
Sync = tuple[ModelSpec, Layout, int, int]


def sides(sync: Sync) -> tuple[list[Box], list[Box]]:
    """Source and destination boxes of a weight sync."""
    spec, layout, engines, tp = sync
    sources = [box for rank in range(layout.world) for box in megatron_boxes(spec, layout, rank)]
    wanted = [box for r in range(engines * tp) for box in vllm_boxes(spec, tp, r % tp, layout.world + r)]
    return sources, wanted


def window(offset: Iterable[int], size: Iterable[int]) -> tuple[slice, ...]:
    return tuple(slice(a, a + n) for a, n in zip(offset, size, strict=True))


def blank(boxes: list[Box]) -> Arrays:
    """Local parameters just large enough for their boxes, filled with -1."""
    ends: dict[tuple[int, str], np.ndarray] = {}
    for box in boxes:
        end = np.add(box.local_offset, box.size)
        ends[box.rank, box.param] = np.maximum(end, ends.get((box.rank, box.param), end))
    return {key: np.full(tuple(end), -1) for key, end in ends.items()}


def gathered(spec: ModelSpec, boxes: list[Box]) -> Arrays:
    """The same parameters, each box filled from whole tensors whose elements are numbered through."""
    whole, begin = {}, 0
    for name, shape in spec.hf_shapes().items():
        whole[name] = begin + np.arange(math.prod(shape)).reshape(shape)
        begin += math.prod(shape)
    out = blank(boxes)
    for box in boxes:
        out[box.rank, box.param][window(box.local_offset, box.size)] = whole[box.name][window(box.offset, box.size)]
    return out


def carry_out(plan: Iterable[Copy], sources: Arrays, destinations: Arrays) -> Arrays:
    """Move the values in place; return how often each destination element was written."""
    writes = {key: np.zeros(array.shape, int) for key, array in destinations.items()}
    for copy in plan:
        to, at = (copy.destination, copy.param), window(copy.offset, copy.size)
        values = sources[copy.source, copy.source_param][window(copy.source_offset, copy.size)]
        assert values.shape == copy.size == destinations[to][at].shape  # nothing hangs over an edge
        destinations[to][at] = values
        writes[to][at] += 1
    return writes


def assert_moves_everything_once(plan: Iterable[Copy], sync: Sync) -> None:
    sources, wanted = sides(sync)
    found, expected = blank(wanted), gathered(sync[0], wanted)
    writes = carry_out(plan, gathered(sync[0], sources), found)
    for key in expected:
        np.testing.assert_array_equal(found[key], expected[key])
        np.testing.assert_array_equal(writes[key], expected[key] >= 0)


@given(synced())
@settings(deadline=None, max_examples=60)
def test_every_destination_element_is_written_once_and_right(sync: Sync) -> None:
    assert_moves_everything_once(make_plan(*sides(sync)), sync)


@given(synced())
@settings(deadline=None, max_examples=30)
def test_each_destination_receives_its_own_shard_and_no_more(sync: Sync) -> None:
    sources, wanted = sides(sync)
    received: Counter[int] = Counter()
    for copy in make_plan(sources, wanted):
        received[copy.destination] += copy.elements
    shard: Counter[int] = Counter()
    for (rank, _), array in gathered(sync[0], wanted).items():
        shard[rank] += int((array >= 0).sum())
    assert received == shard


@given(synced())
@settings(deadline=None, max_examples=30)
def test_replicas_share_the_sending(sync: Sync) -> None:
    plan = make_plan(*sides(sync))
    sent: Counter[int] = Counter()
    for copy in plan:
        sent[copy.source] += copy.elements
    largest = max(copy.elements for copy in plan)
    for replicas in sync[1].groups("dp"):
        assert max(sent[r] for r in replicas) - min(sent[r] for r in replicas) <= largest


@given(trained(), st.integers(1, 2), st.integers(1, 3))
@settings(deadline=None, max_examples=30)
def test_between_two_megatron_layouts(model: tuple[ModelSpec, Layout], pp: int, dp: int) -> None:
    """The same plan reshards a checkpoint: here to one stage or two, without tensor parallelism."""
    spec, layout = model
    other = Layout(pp=min(pp, spec.num_layers), dp=dp)
    sources = [box for rank in range(layout.world) for box in megatron_boxes(spec, layout, rank)]
    wanted = [box for rank in range(other.world) for box in megatron_boxes(spec, other, rank)]
    found, expected = blank(wanted), gathered(spec, wanted)
    carry_out(make_plan(sources, wanted), gathered(spec, sources), found)
    for key in expected:
        np.testing.assert_array_equal(found[key], expected[key])


def box(name: str, offset: list[int], size: list[int], rank: int = 0, local: list[int] | None = None) -> Box:
    return Box(name, tuple(offset), tuple(size), rank, "p", tuple(local or [0] * len(size)))


def test_two_dimensional_blocks_written_out() -> None:
    """Columns 0..3 of rank 0 and 3..6 of rank 1, wanted as rows 0..1 and 1..4: four copies, by hand."""
    sources = [box("w", [0, 0], [4, 3], 0), box("w", [0, 3], [4, 3], 1, [0, 5])]
    wanted = [box("w", [0, 0], [1, 6], 2, [7, 0]), box("w", [1, 0], [3, 6], 3)]
    assert [(c.source, c.source_offset, c.destination, c.offset, c.size) for c in make_plan(sources, wanted)] == [
        (0, (0, 0), 2, (7, 0), (1, 3)),
        (1, (0, 5), 2, (7, 3), (1, 3)),
        (0, (1, 0), 3, (0, 0), (3, 3)),
        (1, (1, 5), 3, (0, 3), (3, 3)),
    ]


@pytest.mark.parametrize(
    ("sources", "message"),
    [
        ([], r"w: rank 5 wants 4 elements at \(2,\), the sources hold 0 of them"),
        ([box("v", [0], [8])], r"w: rank 5 wants 4 elements at \(2,\), the sources hold 0 of them"),
        ([box("w", [0], [3]), box("w", [4], [4])], "the sources hold 3 of them"),
        ([box("w", [0], [5]), box("w", [4], [4])], r"ranks 0 .* and 0 .* overlap without being equal"),
        # as many elements as are wanted, but element 2 twice and element 5 not at all
        ([box("w", [0], [3], 1), box("w", [2], [3], 2)], r"ranks 1 .* and 2 .* overlap without being equal"),
    ],
)
def test_sources_that_do_not_fit_are_refused(sources: list[Box], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        make_plan(sources, [box("w", [2], [4], 5)])


def test_a_lost_rank_is_noticed() -> None:
    spec, layout, tp = a_sync()
    sources, wanted = sides((spec, layout, 1, tp))
    for lost in range(layout.world):  # there are no replicas: each rank is needed
        with pytest.raises(PlanError):
            make_plan([box for box in sources if box.rank != lost], wanted)


def a_sync(**changes: object) -> tuple[ModelSpec, Layout, int]:
    fields = {"num_layers": 2, "hidden_size": 6, "num_heads": 4, "num_kv_heads": 2, "head_dim": 2, "vocab_size": 33}
    rest = {"ffn_hidden_size": 8, "max_positions": 8, "norm_eps": 1e-6, "rope_theta": 1e4, "rope_scaling": None}
    return ModelSpec(**{"family": "qwen2", "tied_embeddings": False, **fields, **rest, **changes}), Layout(2, 2), 2


def test_hash_is_the_same_everywhere_and_tells_plans_apart() -> None:
    spec, layout, tp = a_sync()
    transfer = TransferSpec(spec, layout, 1, tp, fused_norms=False)
    plan = transfer.plan()
    assert plan_hash(plan) == plan_hash(transfer.plan())
    assert plan_hash(plan) == "fc7d409730dfb39e"  # a fixed value: other machines and Pythons must agree
    assert plan_hash(plan) != plan_hash(plan[::-1])
    assert plan_hash(plan) != plan_hash(TransferSpec(spec, Layout(2, 2), 2, tp, fused_norms=False).plan())
    assert plan_hash(plan) != plan_hash(TransferSpec(spec, Layout(2, 2), 1, tp, fused_norms=True).plan())


def test_transfer_numbers_ranks_actor_first() -> None:
    spec, layout, _ = a_sync()
    transfer = TransferSpec(spec, layout, engines=2, engine_tp=2, fused_norms=False)
    assert transfer.world == 8
    assert [transfer.worker_rank(engine, tp) for engine in range(2) for tp in range(2)] == [4, 5, 6, 7]
    plan = transfer.plan()
    assert {copy.source for copy in plan} == {0, 1, 2, 3}
    assert {copy.destination for copy in plan} == {4, 5, 6, 7}


@given(synced(), st.integers(1, 60))
@settings(deadline=None, max_examples=40)
def test_messages_carry_the_whole_plan_in_small_buckets(sync: Sync, bucket: int) -> None:
    plan = make_plan(*sides(sync))
    messages = make_messages(plan, bucket)
    assert_moves_everything_once([copy for message in messages for copy in message.copies], sync)
    for message in messages:
        assert all((c.source, c.destination) == (message.source, message.destination) for c in message.copies)
        assert message.elements == sum(math.prod(copy.size) for copy in message.copies) > 0
        rows = [copy.elements // copy.size[0] for copy in message.copies]
        assert message.elements <= bucket or (len(message.copies) == 1 and message.elements == rows[0] > bucket)


@given(synced(), st.integers(1, 60))
@settings(deadline=None, max_examples=40)
def test_two_buffers_a_side_never_deadlock(sync: Sync, bucket: int) -> None:
    """Play the exchange: a rank posts its messages in order, two at a time; a message ends once both post it."""
    messages = make_messages(make_plan(*sides(sync)), bucket)
    queues: dict[tuple[str, int], list[int]] = defaultdict(list)
    for number, message in enumerate(messages):
        queues["send", message.source].append(number)
        queues["receive", message.destination].append(number)
    done: set[int] = set()
    while len(done) < len(messages):
        posted = Counter(n for queue in queues.values() for n in [n for n in queue if n not in done][:2])
        ready = {number for number, sides in posted.items() if sides == 2}
        assert ready, "every rank waits for another"
        done |= ready


def test_large_blocks_are_cut_and_small_ones_share_a_message() -> None:
    def copy(rows: int, width: int) -> Copy:
        return Copy(0, "s", (10, 1), 1, "d", (20, 2), (rows, width), "w")

    messages = make_messages([copy(7, 4), copy(1, 3), copy(2, 2), copy(1, 50)], bucket_elements=12)
    shapes = [[(c.source_offset[0] - 10, c.offset[0] - 20, c.size) for c in m.copies] for m in messages]
    assert shapes == [
        [(0, 0, (3, 4))],
        [(3, 3, (3, 4))],
        [(6, 6, (1, 4)), (0, 0, (1, 3)), (0, 0, (2, 2))],
        [(0, 0, (1, 50))],  # a single row is never cut
    ]
    assert make_messages([], 12) == ()


def test_pairs_take_turns() -> None:
    copies = [Copy(s, "s", (0,), d, "d", (i,), (5,), "w") for s in (0, 1) for d in (2, 3) for i in range(2)]
    order = [(m.source, m.destination) for m in make_messages(copies, 5)]
    assert order == [(0, 2), (0, 3), (1, 2), (1, 3)] * 2
