"""Ranks, groups and pipeline stages, held against Megatron's own arithmetic."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megappo.layout.mesh import AXES, Layout, model_chunks, stage_layers
from megappo.models import megatron_cpu

megatron_cpu.install()

from megatron.core.parallel_state import RankGenerator  # noqa: E402
from megatron.core.transformer.transformer_block import get_num_layers_to_build  # noqa: E402
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset  # noqa: E402

SIZES = st.integers(1, 3)
LAYOUTS = st.builds(Layout, tp=SIZES, pp=SIZES, dp=SIZES, cp=SIZES)


@given(LAYOUTS)
def test_coordinates_and_rank_are_inverse(layout: Layout) -> None:
    seen = set()
    for rank in range(layout.world):
        at = layout.coordinates(rank)
        assert layout.rank(**at) == rank
        seen.add(tuple(at.items()))
    assert len(seen) == layout.world == layout.tp * layout.pp * layout.dp * layout.cp


@given(LAYOUTS, st.sets(st.sampled_from(AXES)))
def test_groups_partition_the_world(layout: Layout, axes: set[str]) -> None:
    groups = list(layout.groups(*axes))
    assert sorted(rank for group in groups for rank in group) == list(range(layout.world))
    for group in groups:
        assert group == sorted(group)
        kept = [{a: c for a, c in layout.coordinates(rank).items() if a not in axes} for rank in group]
        assert all(at == kept[0] for at in kept)


@given(LAYOUTS, st.sampled_from(["tp", "cp", "dp", "pp", "tp-pp", "dp-cp", "tp-cp", "tp-dp-cp"]))
def test_groups_equal_megatrons(layout: Layout, token: str) -> None:
    theirs = RankGenerator(tp=layout.tp, ep=1, dp=layout.dp, pp=layout.pp, cp=layout.cp, order="tp-cp-ep-dp-pp")
    assert sorted(layout.groups(*token.split("-"))) == sorted(theirs.get_ranks(token))


def test_tensor_neighbours_are_adjacent_and_stages_far_apart() -> None:
    layout = Layout(tp=2, dp=3, pp=2)
    assert next(layout.groups("tp")) == [0, 1]
    assert next(layout.groups("dp")) == [0, 2, 4]
    assert next(layout.groups("pp")) == [0, 6]


@pytest.mark.parametrize("rank", [-1, 12])
def test_ranks_outside_are_refused(rank: int) -> None:
    with pytest.raises(ValueError, match=rf"rank {rank} is outside this layout of 12 ranks"):
        Layout(tp=2, dp=3, pp=2).coordinates(rank)


def test_description_names_only_what_is_in_use() -> None:
    assert Layout(tp=2, pp=4, dp=1).describe() == "tp2 pp4 dp1"
    assert Layout(tp=8, dp=2, ep=16, etp=1).describe() == "tp8 pp1 dp2 ep16 etp1"
    assert Layout(tp=2, dp=2, cp=2, vpp=3, sequence_parallel=True).describe() == "tp2 pp1 dp2 cp2 vpp3 sp"


@pytest.mark.parametrize(
    ("layers", "pp", "counts"),
    [(8, 4, [2, 2, 2, 2]), (3, 2, [2, 1]), (30, 4, [7, 8, 8, 7]), (4, 3, [1, 2, 1]), (5, 4, [2, 1, 1, 1])],
)
def test_stages(layers: int, pp: int, counts: list[int]) -> None:
    assert [len(stage) for stage in stage_layers(layers, pp)] == counts


@st.composite
def splits(draw: st.DrawFn) -> tuple[int, int]:
    layers = draw(st.integers(1, 100))
    return layers, draw(st.integers(1, layers))


@given(splits())
def test_stages_cover_all_layers_in_order_and_none_is_empty(split: tuple[int, int]) -> None:
    layers, pp = split
    stages = stage_layers(layers, pp)
    assert len(stages) == pp and all(stages)
    assert [layer for stage in stages for layer in stage] == list(range(layers))
    assert len({len(stage) for stage in stages[1:-1]}) <= 1


@given(splits())
def test_one_of_the_unlike_stages_has_the_most_layers(split: tuple[int, int]) -> None:
    layers, pp = split
    counts = [len(stage) for stage in stage_layers(layers, pp)]
    assert max(counts) == max(counts[stage] for stage in Layout(pp=pp).unlike_stages)


@given(splits())
def test_stages_equal_megatrons(split: tuple[int, int]) -> None:
    """Megatron reads a handful of fields of its config here, so a plain object with them will do."""
    layers, pp = split
    stages = stage_layers(layers, pp)
    uneven = len({len(stage) for stage in stages}) > 1
    config = SimpleNamespace(
        num_layers=layers,
        pipeline_model_parallel_size=pp,
        pipeline_model_parallel_layout=None,
        virtual_pipeline_model_parallel_size=None,
        num_layers_in_first_pipeline_stage=len(stages[0]) if uneven else None,
        num_layers_in_last_pipeline_stage=len(stages[-1]) if uneven else None,
        account_for_embedding_in_pipeline_split=False,
        account_for_loss_in_pipeline_split=False,
    )
    for rank, stage in enumerate(stages):
        assert get_num_layers_to_build(config, pp_rank=rank) == len(stage)
        assert get_transformer_layer_offset(config, pp_rank=rank) == stage.start


@st.composite
def rounds(draw: st.DrawFn) -> tuple[int, int, int]:
    layers, vpp = draw(st.integers(3, 30)), draw(st.integers(1, 4))
    pp = draw(st.integers(2, layers))
    return layers * vpp, 3 if pp == 2 and layers % 2 else pp, vpp


@given(rounds())
def test_chunks_equal_megatrons(split: tuple[int, int, int]) -> None:
    layers, pp, vpp = split
    chunks = model_chunks(layers, pp, vpp)
    assert sorted(layer for stage in chunks for chunk in stage for layer in chunk) == list(range(layers))
    counts = [sum(map(len, stage)) for stage in chunks]
    uneven = len(set(counts)) > 1
    config = SimpleNamespace(
        num_layers=layers,
        pipeline_model_parallel_size=pp,
        pipeline_model_parallel_layout=None,
        virtual_pipeline_model_parallel_size=vpp if vpp > 1 else None,
        num_layers_in_first_pipeline_stage=counts[0] if uneven else None,
        num_layers_in_last_pipeline_stage=counts[-1] if uneven else None,
        account_for_embedding_in_pipeline_split=False,
        account_for_loss_in_pipeline_split=False,
    )
    for rank, stage in enumerate(chunks):
        for at, chunk in enumerate(stage):
            where = {"pp_rank": rank, "vp_stage": at if vpp > 1 else None}
            assert get_num_layers_to_build(config, **where) == len(chunk)
            assert get_transformer_layer_offset(config, **where) == chunk.start


def test_one_chunk_a_stage_is_the_plain_pipeline() -> None:
    assert model_chunks(30, 4) == tuple((stage,) for stage in stage_layers(30, 4))


@pytest.mark.parametrize(
    ("layers", "pp", "vpp", "message"),
    [
        (4, 1, 2, "vpp: 2 chunks need pp > 1: set vpp to 1, or raise pp"),
        (9, 2, 2, "vpp: 2 does not divide 9 layers"),
        (6, 2, 2, "vpp: 2 rounds of 3 layers do not divide by 2 stages"),
        (6, 4, 2, "pp: 4 stages cannot share 3 layers: legal are 1 to 3"),
    ],
)
def test_impossible_chunks_are_refused(layers: int, pp: int, vpp: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        model_chunks(layers, pp, vpp)


@given(LAYOUTS)
def test_replicas_are_the_data_and_context_parallel_ranks(layout: Layout) -> None:
    found = [list(layout.replicas(tp=tp, pp=pp)) for pp in range(layout.pp) for tp in range(layout.tp)]
    assert sorted(found) == sorted(layout.groups("dp", "cp"))


@given(LAYOUTS, st.integers(1, 6), st.integers(1, 6))
def test_expert_replicas_equal_megatrons(layout: Layout, ep: int, etp: int) -> None:
    layout = replace(layout, ep=ep, etp=etp)
    ranks = layout.world // layout.pp
    if ranks % (ep * etp):
        with pytest.raises(ValueError, match=f"ep: {ep} times etp {etp} does not divide the {ranks} ranks of a stage"):
            layout.expert_replicas(etp=0, ep=0, pp=0)
        return
    theirs = RankGenerator(tp=etp, ep=ep, dp=ranks // (ep * etp), pp=layout.pp, cp=1, order="tp-cp-ep-dp-pp")
    places = [(i, e, p) for p in range(layout.pp) for e in range(ep) for i in range(etp)]
    ours = [list(layout.expert_replicas(etp=i, ep=e, pp=p)) for i, e, p in places]
    assert ours == theirs.get_ranks("dp")


@pytest.mark.parametrize("pp", [0, 5])
def test_more_stages_than_layers_are_refused(pp: int) -> None:
    with pytest.raises(ValueError, match=rf"pp: {pp} stages cannot share 4 layers: legal are 1 to 4"):
        stage_layers(4, pp)
