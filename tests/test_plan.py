"""The plan, carried out on numpy arrays, against a plain gather; who sends; each rank's part; what it refuses."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from random_layouts import synced, trained

from megappo.layout.mesh import Layout
from megappo.models.spec import ModelSpec
from megappo.reshard.actor_to_rollout import TransferSpec
from megappo.reshard.agreement import Fingerprint, disagreement, fingerprint
from megappo.reshard.boxes import Box, Shard, file_boxes, megatron_boxes, vllm_boxes
from megappo.reshard.copies import Copy, block
from megappo.reshard.explain import LINKS, Speeds, explain
from megappo.reshard.intersections import PlanError
from megappo.reshard.messages import make_messages
from megappo.reshard.plan import plan_copies
from megappo.reshard.routes import DEVICE, NETWORK, NODE, Places, distance, place

Arrays = dict[tuple[int, str], np.ndarray]  # by rank and local parameter


def sides(sync: TransferSpec) -> tuple[list[Box], list[Box]]:
    """Source and destination boxes of a weight sync, rank by rank."""
    sources = [
        box
        for rank in range(sync.actor.world)
        for box in megatron_boxes(sync.model, sync.actor, rank, fused_norms=sync.fused_norms)
    ]
    wanted = [
        box
        for engine in range(sync.engines)
        for at in range(sync.engine_tp)
        for box in vllm_boxes(
            sync.model,
            sync.engine_tp,
            at,
            sync.worker_rank(engine, at),
            expert_parallel=sync.expert_parallel,
        )
    ]
    return sources, wanted


def make_plan(sources: Iterable[Box], destinations: Iterable[Box], places: Places = ()) -> tuple[Copy, ...]:
    """Between any two lists of boxes, each rank a shard of its own."""

    def shards(boxes: Iterable[Box]) -> list[Shard]:
        held: dict[int, list[Box]] = defaultdict(list)
        for each in boxes:
            held[each.rank].append(each)
        return [Shard((rank,), own) for rank, own in held.items()]

    return tuple(plan_copies(shards(sources), shards(destinations), places))


def a_sync(**changes: object) -> tuple[ModelSpec, Layout, int]:
    fields = {"num_layers": 2, "hidden_size": 6, "num_heads": 4, "num_kv_heads": 2, "head_dim": 2, "vocab_size": 33}
    rest = {"ffn_hidden_size": 8, "max_positions": 8, "norm_eps": 1e-6, "rope_theta": 1e4, "rope_scaling": None}
    return ModelSpec(**{"family": "qwen2", "tied_embeddings": False, **fields, **rest, **changes}), Layout(2, 2), 2


def blank(boxes: list[Box]) -> Arrays:
    """Local parameters just large enough for their boxes, filled with -1."""
    ends: dict[tuple[int, str], np.ndarray] = {}
    for box in boxes:
        lead = len(box.local_offset) - len(box.size)
        end = np.add(box.local_offset, (1,) * lead + box.size)
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
        out[box.rank, box.param][block(box.local_offset, box.size)] = whole[box.name][block(box.offset, box.size)]
    return out


def carry_out(plan: Iterable[Copy], sources: Arrays, destinations: Arrays) -> Arrays:
    """Move the values in place, in order; return how often each destination element was written."""
    writes = {key: np.zeros(array.shape, int) for key, array in destinations.items()}
    for copy in plan:
        to, at = (copy.destination, copy.param), block(copy.offset, copy.size)
        side = destinations if copy.wave else sources
        values = side[copy.source, copy.source_param][block(copy.source_offset, copy.size)]
        assert values.shape == copy.size == destinations[to][at].shape  # nothing hangs over an edge
        assert (values >= 0).all()  # the second wave reads only what the first has written
        destinations[to][at] = values
        writes[to][at] += 1
    return writes


def assert_moves_everything_once(plan: Iterable[Copy], spec: ModelSpec, sources: list[Box], wanted: list[Box]) -> None:
    found, expected = blank(wanted), gathered(spec, wanted)
    writes = carry_out(plan, gathered(spec, sources), found)
    for key in expected:
        np.testing.assert_array_equal(found[key], expected[key])
        np.testing.assert_array_equal(writes[key], expected[key] >= 0)


def numbers(spec: ModelSpec, boxes: list[Box]) -> dict[int, set[int]]:
    """The elements that each rank holds or wants."""
    out: dict[int, set[int]] = defaultdict(set)
    for (rank, _), array in gathered(spec, boxes).items():
        out[rank].update(array[array >= 0].tolist())
    return out


@given(synced())
@settings(deadline=None, max_examples=80)
def test_every_destination_element_is_written_once_and_right(sync: TransferSpec) -> None:
    assert_moves_everything_once(sync.plan(), sync.model, *sides(sync))


@given(synced())
@settings(deadline=None, max_examples=40)
def test_nothing_moves_further_or_more_often_than_it_must(sync: TransferSpec) -> None:
    """Bytes by link and rank equal what sets of elements say, without looking at boxes or at the plan."""
    sources, wanted = sides(sync)
    held, wants = numbers(sync.model, sources), numbers(sync.model, wanted)
    on_device, on_node = defaultdict(set), defaultdict(set)
    for rank, elements in held.items():
        on_device[place(sync.places, rank)] |= elements
        on_node[place(sync.places, rank)[0]] |= elements
    enters: Counter[int | str] = Counter()
    for node in {place(sync.places, rank)[0] for rank in wants}:
        inside = [elements for rank, elements in wants.items() if place(sync.places, rank)[0] == node]
        if sync.forward:  # once a node
            enters[node] = len(set().union(*inside) - on_node[node])
        else:  # once for each that wants it
            enters[node] = sum(len(elements - on_node[node]) for elements in inside)
    found: Counter[int | str] = Counter()
    for copy in sync.plan():
        if distance(sync.places, copy.source, copy.destination) == NETWORK:
            found[place(sync.places, copy.destination)[0]] += copy.elements
    assert found == +enters
    plan = sync.plan()
    told = explain(plan, sync.sources(), sync.destinations(), sync.places, item_size=2)
    off_device = {rank: 2 * len(elements - on_device[place(sync.places, rank)]) for rank, elements in wants.items()}
    assert {rank: size for rank, size in told.received.items() if size} == {r: n for r, n in off_device.items() if n}
    assert told.least_received == off_device
    assert told.planned[DEVICE] == told.least[DEVICE]
    assert told.planned[NETWORK] == 2 * sum(enters.values()) >= told.least[NETWORK]
    assert told.planned == told.least or not sync.forward
    assert sum(told.sent.values()) == sum(told.received.values()) == sum(told.planned[link] for link in (NODE, NETWORK))


@given(synced())
@settings(deadline=None, max_examples=40)
def test_each_rank_finds_its_own_part_alone(sync: TransferSpec) -> None:
    plan = sync.plan()
    parts = {rank: sync.part(rank) for rank in range(sync.world)}
    for rank, part in parts.items():
        assert part == tuple(copy for copy in plan if rank in (copy.source, copy.destination))
        own = [m for m in make_messages(plan, 10) if rank in (m.source, m.destination)]
        assert list(make_messages(part, 10)) == own
    marks = {rank: sync.fingerprint(rank, part) for rank, part in parts.items()}
    assert disagreement(marks) is None


def sent_by_kind(plan: Iterable[Copy]) -> dict[str, Counter[int]]:
    """Number of blocks of each kind of tensor that each rank sends in the first wave."""
    out: dict[str, Counter[int]] = defaultdict(Counter)
    for copy in plan:
        out[re.sub(r"\d+", "", copy.name)][copy.source] += copy.wave == 0
    return out


def cuts_inside_groups() -> TransferSpec:
    """Three ranks share four groups of [q q q k v], so they hold pieces of two or three heads, of unequal sizes."""
    spec, _, _ = a_sync(num_layers=1, num_heads=12, num_kv_heads=4, head_dim=3, ffn_hidden_size=12)
    return TransferSpec(spec, Layout(tp=3, dp=2), engines=1, engine_tp=1, fused_norms=False)


@given(synced())
@example(cuts_inside_groups())
@settings(deadline=None, max_examples=40)
def test_replicas_share_the_sending(sync: TransferSpec) -> None:
    """Of every kind of tensor, none sends more than a block beyond another, where they are equally near to all."""
    apart = TransferSpec(sync.model, sync.actor, sync.engines, sync.engine_tp, sync.fused_norms)
    for kind, sent in sent_by_kind(apart.plan()).items():
        if "experts" not in kind and not (sync.model.tied_embeddings and "embed" in kind):
            for replicas in sync.actor.groups("dp", "cp"):
                if "norm" in kind or ".gate." in kind:  # all tensor-parallel ranks are replicas of each other
                    continue
                counts = [sent[rank] for rank in replicas]
                assert max(counts) - min(counts) <= 1, (kind, counts)


@pytest.mark.parametrize("engines", [1, 2, 3, 5, 8, 20])
def test_senders_of_a_large_model_are_evenly_loaded(engines: int) -> None:
    """70B over TP8 x PP4 x DP4: the busiest rank of a stage sends at most a tenth more than the stage's average."""
    spec, _, _ = a_sync(num_layers=80, hidden_size=8192, num_heads=64, num_kv_heads=8, head_dim=128)
    layout = Layout(tp=8, pp=4, dp=4)
    ranks = range(layout.world + engines * 8)
    places = tuple((f"node{rank // 8}", str(rank % 8)) for rank in ranks)
    sync = TransferSpec(spec, layout, engines, 8, True, places, forward=True)
    sent: Counter[int] = Counter()
    for copy in sync.plan():
        sent[copy.source] += copy.elements * (copy.wave == 0)
    for stage in range(4):
        load = [sent[rank] for rank in range(32 * stage, 32 * stage + 32)]
        assert max(load) <= 1.1 * sum(load) / len(load)


@given(trained(), st.integers(1, 2), st.integers(1, 3))
@settings(deadline=None, max_examples=30)
def test_between_two_megatron_layouts_and_files(model: tuple[ModelSpec, Layout], pp: int, dp: int) -> None:
    """The same plan reshards a checkpoint, here to one stage or two; and converts it, with a file at one end."""
    spec, layout = model
    other = Layout(pp=min(pp, spec.num_layers), dp=dp)
    sources = [box for rank in range(layout.world) for box in megatron_boxes(spec, layout, rank)]
    wanted = [box for rank in range(other.world) for box in megatron_boxes(spec, other, rank)]
    file = file_boxes(spec, 0)
    for origin, target in ((sources, wanted), (sources, file), (file, wanted)):
        assert_moves_everything_once(make_plan(origin, target), spec, origin, target)


def test_nearest_first_and_once_into_a_node() -> None:
    """Rank 0 holds w, and so does 1. Wanted on the device of 1, beside 0, and twice on another node."""
    places = (("a", "0"), ("b", "0"), ("b", "0"), ("a", "1"), ("c", "0"), ("c", "1"))
    sources = [box("w", [0], [4], rank) for rank in range(2)]
    plan = make_plan(sources, [box("w", [0], [4], rank) for rank in range(2, 6)], places)
    assert [(c.source, c.destination, c.wave) for c in plan] == [(1, 2, 0), (0, 3, 0), (0, 4, 0), (1, 5, 0)]
    sync = [Shard((0, 1), sources[:1]), Shard(range(2, 6), [box("w", [0], [4], 2)])]
    plan = tuple(plan_copies(sync[:1], sync[1:], places, forward=True))
    assert [(c.source, c.destination, c.wave) for c in plan] == [(1, 2, 0), (0, 3, 0), (0, 4, 0), (4, 5, 1)]


def test_explanation_by_hand() -> None:
    """Eight bytes on a device, eight within a node, eight between nodes and the same eight passed on."""
    places = (("a", "0"), ("a", "0"), ("a", "1"), ("b", "0"), ("b", "1"))
    sources, wanted = [Shard((0,), [box("w", [0], [4])])], [Shard(range(1, 5), [box("w", [0], [4], 1)])]
    plan = tuple(plan_copies(sources, wanted, places, forward=True))
    told = explain(plan, sources, wanted, places, item_size=2, speeds=Speeds(device=1.0, node=4.0, network=0.5))
    assert told.planned == told.least == {DEVICE: 8, NODE: 16, NETWORK: 8}
    assert told.sent == {0: 16, 3: 8}
    assert told.received == told.least_received == {1: 0, 2: 8, 3: 8, 4: 8}
    assert told.seconds == (16.0, 2.0)  # between nodes, then within
    text = "\n".join(told.lines())
    assert all(name in text for name in LINKS.values())
    assert "received / least: 1.0000" in text
    assert "predicted time: 18 s, 2 s of it to pass on" in text


def tampered(part: tuple[Copy, ...]) -> Iterator[tuple[Copy, ...]]:
    """Ways in which one end may be wrong."""
    first = part[0]
    yield part[1:]
    yield (first._replace(offset=(first.offset[0] + 1, *first.offset[1:])), *part[1:])
    yield (first._replace(source_param="other"), *part[1:])
    yield (*part, first)


def test_ends_that_disagree_are_noticed() -> None:
    spec, layout, tp = a_sync()
    sync = TransferSpec(spec, layout, 1, tp, fused_norms=False)
    parts = [sync.part(rank) for rank in range(sync.world)]
    marks = {rank: sync.fingerprint(rank, part) for rank, part in enumerate(parts)}
    for rank in (0, sync.world - 1):
        for wrong in tampered(parts[rank]):
            problem = disagreement({**marks, rank: sync.fingerprint(rank, wrong)})
            assert problem and problem.startswith("what 6 ranks plan to send is not what they plan to receive")
    other = TransferSpec(spec, layout, 1, tp, fused_norms=True)
    assert disagreement({**marks, 3: other.fingerprint(3, parts[3])}) == (
        "ranks [3] planned from other inputs, or with another version, than the rest of 6"
    )


def box(name: str, offset: list[int], size: list[int], rank: int = 0, local: list[int] | None = None) -> Box:
    return Box(name, tuple(offset), tuple(size), rank, "p", tuple(local or [0] * len(size)))


def test_two_dimensional_blocks_written_out() -> None:
    """Columns 0..3 of rank 0 and 3..6 of rank 1, wanted as rows 0..1 and 1..4: four copies, by hand."""
    sources = [box("w", [0, 0], [4, 3], 0), box("w", [0, 3], [4, 3], 1, [0, 5])]
    wanted = [box("w", [0, 0], [1, 6], 2, [7, 0]), box("w", [1, 0], [3, 6], 3)]
    assert [(c.source, c.source_offset, c.destination, c.offset, c.size) for c in make_plan(sources, wanted)] == [
        (0, (0, 0), 2, (7, 0), (1, 3)),
        (0, (1, 0), 3, (0, 0), (3, 3)),
        (1, (0, 5), 2, (7, 3), (1, 3)),
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
    sources, wanted = sides(TransferSpec(spec, layout, 1, tp, fused_norms=False))
    for lost in range(layout.world):  # there are no replicas: each rank is needed
        with pytest.raises(PlanError):
            make_plan([box for box in sources if box.rank != lost], wanted)


def test_fingerprint_is_the_same_everywhere_and_tells_plans_apart() -> None:
    spec, layout, tp = a_sync()

    def mark(layout: Layout, engines: int, fused_norms: bool = False) -> Fingerprint:
        transfer = TransferSpec(spec, layout, engines, tp, fused_norms=fused_norms)
        return fingerprint("inputs", 0, transfer.part(0))

    own = mark(layout, 1)
    assert (own.sent, own.received) == (76285613094031925, 0)  # fixed: other machines and Pythons must agree
    assert own == fingerprint("inputs", 0, TransferSpec(spec, layout, 1, tp, fused_norms=False).part(0)[::-1])
    others = [mark(Layout(2, 2), 2), mark(Layout(2, 2), 1, fused_norms=True), mark(Layout(2, 1, 2), 1)]
    assert len({own.sent, *(other.sent for other in others)}) == 4
    assert fingerprint("others", 0, ()).inputs != fingerprint("inputs", 0, ()).inputs


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
def test_messages_carry_the_whole_plan_in_small_buckets(sync: TransferSpec, bucket: int) -> None:
    messages = make_messages(sync.plan(), bucket)
    copies = [copy for message in messages for copy in message.copies]
    assert_moves_everything_once(copies, sync.model, *sides(sync))
    for message in messages:
        assert all((c.source, c.destination) == (message.source, message.destination) for c in message.copies)
        assert message.elements == sum(math.prod(copy.size) for copy in message.copies) > 0
        rows = [copy.elements // copy.size[0] for copy in message.copies]
        assert message.elements <= bucket or (len(message.copies) == 1 and message.elements == rows[0] > bucket)


@given(synced(), st.integers(1, 60))
@settings(deadline=None, max_examples=40)
def test_two_buffers_a_side_never_deadlock(sync: TransferSpec, bucket: int) -> None:
    """Play the exchange: a rank posts its messages in order, two at a time; a message ends once both post it.

    What is passed on is posted only when all that this rank receives in the first wave is done.
    """
    messages = make_messages(sync.plan(), bucket)
    queues: dict[tuple[str, int], list[int]] = defaultdict(list)
    feeds: dict[int, set[int]] = defaultdict(set)
    for number, message in enumerate(messages):
        queues["send", message.source].append(number)
        queues["receive", message.destination].append(number)
        if message.wave == 0:
            feeds[message.destination].add(number)
    done: set[int] = set()
    while len(done) < len(messages):
        posted: Counter[int] = Counter()
        for (side, rank), queue in queues.items():
            for number in [number for number in queue if number not in done][:2]:
                if side == "receive" or messages[number].wave == 0 or feeds[rank] <= done:
                    posted[number] += 1
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


def test_messages_are_filled_before_the_next_begins() -> None:
    def copy(rows: int, width: int) -> Copy:
        return Copy(0, "s", (0, 0), 1, "d", (0, 0), (rows, width), "w")

    messages = make_messages([copy(5, 4), copy(7, 4), copy(14, 1), copy(3, 1)], bucket_elements=32)
    shapes = [[(c.source_offset[0], c.size) for c in m.copies] for m in messages]
    assert shapes == [
        [(0, (5, 4)), (0, (3, 4))],
        [(3, (4, 4)), (0, (14, 1)), (0, (2, 1))],
        [(2, (1, 1))],
    ]
    # Where a sixteenth is left, or less than a row, nothing is cut for it.
    for copies in ([copy(31, 1), copy(2, 1)], [copy(25, 1), copy(2, 9)]):
        assert [list(m.copies) for m in make_messages(copies, bucket_elements=32)] == [[each] for each in copies]


def test_pairs_take_turns() -> None:
    copies = [Copy(s, "s", (0,), d, "d", (i,), (5,), "w") for s in (0, 1) for d in (2, 3) for i in range(2)]
    order = [(m.source, m.destination) for m in make_messages(copies, 5)]
    assert order == [(0, 2), (1, 3), (0, 3), (1, 2)] * 2  # two of no common rank at a time
