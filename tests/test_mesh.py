"""Ranks, groups and pipeline stages, held against Megatron's own arithmetic."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megappo.layout.mesh import AXES, Layout, stage_layers
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


@pytest.mark.parametrize("pp", [0, 5])
def test_more_stages_than_layers_are_refused(pp: int) -> None:
    with pytest.raises(ValueError, match=rf"pp: {pp} stages cannot share 4 layers: legal are 1 to 4"):
        stage_layers(4, pp)
