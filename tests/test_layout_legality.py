"""Legal layouts of models and pools, and the words of what is refused."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import pytest

from megappo.layout import legality
from megappo.layout.mesh import model_chunks


@dataclass(frozen=True)
class Sizes:
    num_layers: int = 4
    hidden_size: int = 32
    head_dim: int = 4
    num_heads: int = 8
    num_kv_heads: int = 4
    ffn_hidden_size: int = 256
    num_experts: int = 0


SMOLLM2 = Sizes(num_layers=30, num_heads=9, num_kv_heads=3, ffn_hidden_size=1536)
QWEN_05B = Sizes(num_layers=24, num_heads=14, num_kv_heads=2, ffn_hidden_size=4864)


def test_experts_are_cut_by_a_size_of_their_own() -> None:
    mixture = Sizes(num_kv_heads=8, ffn_hidden_size=12, num_experts=4)
    assert list(legality.megatron_model_problems(mixture, 8, 1)) == []
    assert list(legality.expert_problems(mixture, 4, 3)) == []
    assert list(legality.expert_problems(mixture, 8, 8)) == [
        "ep: 8 does not divide 4 experts: legal are 1, 2, 4",
        "etp: 8 does not divide 12 MLP columns of an expert: legal are 1, 2, 3, 4, 6, 12",
    ]


def test_lopsided_pipelines() -> None:
    assert list(legality.pipeline_warnings(Sizes(num_layers=4), 3)) == []  # 1, 2, 1: no layout of three is evener
    assert list(legality.pipeline_warnings(Sizes(num_layers=4), 5)) == [], "an error of its own"
    assert list(legality.pipeline_warnings(Sizes(num_layers=30), 4)) == []  # 7, 8, 8, 7
    assert list(legality.pipeline_warnings(Sizes(num_layers=28), 16)) == [
        "pp: 16 stages share 28 layers unevenly: the fullest has 7 where 2 would do, so that the others wait: even are "
        "1, 2, 4, 7, 14, 28"
    ]


def test_sizes_for_eight_bits() -> None:
    def problems(sizes: Sizes, tp: int, fp8: str = "tensorwise", sequence_parallel: bool = False) -> list[str]:
        return list(legality.fp8_problems(sizes, tp, fp8, sequence_parallel))

    assert problems(Sizes(), 2) == []  # 32, 16, 32 and 128
    assert problems(Sizes(hidden_size=40), 4) == [
        "fp8: tensorwise at tp 4: the model has 40 hidden size, which 16 must divide and 8 query columns a rank, which "
        "16 must divide: set none, or lower tp"
    ]
    assert problems(Sizes(hidden_size=40), 4, "none") == []
    # Transformer Engine's Float8BlockQuantizer.is_quantizable: what is gathered is cut into blocks of 128 both ways.
    assert problems(Sizes(), 2, "blockwise") == []
    assert problems(Sizes(), 2, "blockwise", sequence_parallel=True) == [
        "fp8: blockwise at tp 2: the model has 32 hidden size, which 128 must divide: set none, or set "
        "sequence_parallel to false"
    ]
    assert legality.fp8_multiple("blockwise", True) == 128 and legality.fp8_multiple("blockwise", False) == 16
    assert legality.fp8_multiple("tensorwise", True) == 16 and legality.fp8_multiple("none", True) == 1


def test_legal_sizes() -> None:
    assert legality.megatron_tp(Sizes()) == [1, 2, 4]
    assert legality.megatron_tp(SMOLLM2) == [1, 3]
    assert legality.megatron_tp(QWEN_05B) == [1, 2]
    assert legality.megatron_tp(Sizes(num_heads=8, num_kv_heads=8, ffn_hidden_size=12)) == [1, 2, 4]
    # vLLM replicates key/value heads: 8 ranks may share 4. 7 ranks can share neither 2 heads nor 151,936 rows.
    assert legality.rollout_tp(Sizes(), 512) == [1, 2, 4, 8]
    assert legality.rollout_tp(QWEN_05B, 151936) == [1, 2]
    assert legality.rollout_tp(SMOLLM2, 49152) == [1, 3]
    assert legality.rollout_tp(SMOLLM2, 49216) == [1]


@pytest.mark.parametrize(
    ("model", "tp", "pp", "messages"),
    [
        (Sizes(), 4, 4, []),
        (Sizes(), 2, 3, []),  # stages may be uneven
        (SMOLLM2, 3, 7, []),
        (SMOLLM2, 2, 1, ["tp: 2 does not divide 9 attention heads and does not divide 3 key/value heads: "
                         "legal are 1, 3"]),
        (SMOLLM2, 9, 1, ["tp: 9 is more than 3 key/value heads (training does not replicate them) and does not divide "
                         "1536 MLP columns: legal are 1, 3"]),
        (Sizes(), 8, 1, ["tp: 8 is more than 4 key/value heads (training does not replicate them): "
                         "legal are 1, 2, 4"]),
        (Sizes(num_kv_heads=1), 2, 1, ["tp: 2 is more than 1 key/value head (training does not replicate them): "
                                       "legal are 1"]),
        (Sizes(num_kv_heads=8, ffn_hidden_size=12), 8, 1, ["tp: 8 does not divide 12 MLP columns: legal are 1, 2, 4"]),
        (Sizes(), 1, 5, ["pp: 5 stages cannot share 4 layers: legal are 1 to 4"]),
        (Sizes(), 1, (2, 2), []),
        (Sizes(num_layers=8), 1, (3, 2), []),  # rounds of 1, 2, 1
        (Sizes(num_layers=12), 1, (2, 4), ["vpp: 4 chunks of each of 2 stages cannot share 12 layers in rounds of "
                                           "equally many even ones: legal are 1, 2, 3, 6"]),
        (Sizes(num_layers=30), 1, (4, 4), ["vpp: 4 chunks of each of 4 stages cannot share 30 layers in rounds of "
                                           "equally many: legal are 1, 2, 3, 5, 6"]),
        (Sizes(), 3, 9, ["tp: 3 does not divide 8 attention heads and does not divide 4 key/value heads and does not "
                         "divide 256 MLP columns: legal are 1, 2, 4",
                         "pp: 9 stages cannot share 4 layers: legal are 1 to 4"]),
    ],
)  # fmt: skip
def test_megatron_model(model: Sizes, tp: int, pp: int | tuple[int, int], messages: list[str]) -> None:
    """Stages, or stages and chunks of each."""
    sizes = (pp,) if isinstance(pp, int) else pp
    assert list(legality.megatron_model_problems(model, tp, *sizes)) == messages


def test_legal_chunks_are_those_that_can_be_dealt_out() -> None:
    for layers, pp, vpp in product(range(1, 13), range(2, 7), range(1, 13)):
        try:
            model_chunks(layers, pp, vpp)
        except ValueError:
            assert vpp not in legality.megatron_vpp(Sizes(num_layers=layers), pp) or pp > layers
        else:
            assert vpp in legality.megatron_vpp(Sizes(num_layers=layers), pp)


@pytest.mark.parametrize(
    ("tp", "pp", "nodes", "per_node", "messages"),
    [
        (2, 2, 1, 4, []),
        (2, 1, 1, 8, []),
        (4, 2, 2, 4, []),
        (2, 2, 1, 6, ["tp: 2 times pp 2 does not divide the 6 devices of the pool: legal tp * pp are 1, 2, 3, 6"]),
        (2, 1, 1, 1, ["tp: 2 times pp 1 does not divide the 1 device of the pool: legal tp * pp are 1"]),
        (4, 4, 2, 4, ["tp: 4 times pp 4 does not divide the 8 devices of the pool: legal tp * pp are 1, 2, 4, 8"]),
    ],
)  # fmt: skip
def test_megatron_pool(tp: int, pp: int, nodes: int, per_node: int, messages: list[str]) -> None:
    assert list(legality.megatron_pool_problems(tp, pp, nodes, per_node)) == messages


def test_sequence_parallel() -> None:
    assert list(legality.megatron_size_problems(2, True)) == []
    assert list(legality.megatron_size_problems(1, False)) == []
    assert list(legality.megatron_size_problems(1, False, 2, 2)) == []
    assert list(legality.megatron_size_problems(1, False, 1, 2)) == [
        "vpp: 2 chunks of a pipeline stage need pp > 1: set it to 1, or raise pp"
    ]
    assert list(legality.megatron_size_problems(1, True)) == [
        "sequence_parallel: true needs tp > 1: set it to false, or raise tp"
    ]


def test_tensor_parallel_across_nodes_is_a_warning() -> None:
    assert list(legality.megatron_pool_warnings(4, nodes=2, devices_per_node=4)) == []
    assert list(legality.megatron_pool_warnings(8, nodes=1, devices_per_node=4)) == [], "an error of its own"
    assert list(legality.megatron_pool_warnings(8, nodes=2, devices_per_node=4)) == [
        "tp: 8 does not divide the 4 devices of a node, so tensor parallel groups cross nodes, which is slow: "
        "sizes within a node are 1, 2, 4"
    ]


@pytest.mark.parametrize(
    ("model", "rows", "tp", "messages"),
    [
        (Sizes(), 512, 8, []),
        (Sizes(num_heads=12, num_kv_heads=4, ffn_hidden_size=12), 192, 6,
         ["tp: 6 neither divides nor is a multiple of 4 key/value heads: legal are 1, 2, 4, 12"]),
        (SMOLLM2, 49216, 3, ["tp: 3 does not divide 49216 padded vocabulary rows: legal are 1"]),
        (QWEN_05B, 151936, 4, ["tp: 4 does not divide 14 attention heads: legal are 1, 2"]),
    ],
)  # fmt: skip
def test_rollout_model(model: Sizes, rows: int, tp: int, messages: list[str]) -> None:
    assert list(legality.rollout_model_problems(model, rows, tp)) == messages


def test_rollout_pool() -> None:
    assert list(legality.rollout_pool_problems(2, 4)) == []
    assert list(legality.rollout_pool_problems(2, 3)) == [
        "tp: engines of 2 devices do not fill a node of 3: legal are 1, 3"
    ]
    assert list(legality.rollout_pool_problems(8, 4)) == [
        "tp: an engine of 8 devices does not fit in a node of 4: legal are 1, 2, 4"
    ]
