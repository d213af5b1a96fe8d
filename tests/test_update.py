"""One PPO update gives the same loss and weights at every layout, and the gradient that plain torch gives."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from ranks import run_ranks
from tiny import make_model, random_rows

from megappo.config import KLConfig, OptimizerConfig, PPOConfig
from megappo.data import batch
from megappo.data.loss_mask import flat_mask, row_counts
from megappo.layout.mesh import Layout

pytestmark = pytest.mark.ranks

LAYOUTS = [
    Layout(tp=2),
    Layout(pp=2),
    Layout(dp=2),
    Layout(tp=2, sequence_parallel=True),
    Layout(tp=2, pp=2),
    Layout(tp=2, pp=2, dp=2),
    Layout(tp=2, pp=2, dp=2, sequence_parallel=True),
    Layout(pp=2, vpp=2, dp=2),
]
ROWS = random_rows(11)  # an odd number: shards and mini-batches come out uneven
PPO = PPOConfig(
    mini_batch=7,
    actor_lr=1e-3,
    critic_lr=1e-3,
    entropy_coef=0.01,
    aggregation="seq_mean_token_mean",
    kl=KLConfig(loss_coef=0.05),
    optimizer=OptimizerConfig(eps=1e-4, weight_decay=0.1, grad_clip=0.5),
)


def update(folder: str, layout: Layout, critic: bool, ppo: PPOConfig, budget: int) -> tuple[Any, list[Any]]:
    """Two mini-batches; the reported statistics, and what this rank holds of the model afterwards."""
    from megappo.workers.megatron_role import MegatronRole
    from megappo.workers.settings import RoleSettings

    return take_steps(MegatronRole(RoleSettings(folder, layout, "float32", budget, critic, ppo.optimizer)), critic, ppo)


def take_steps(role: Any, critic: bool, ppo: PPOConfig) -> tuple[Any, list[Any]]:
    import torch.distributed as dist

    from megappo.ppo.balance import balanced_partition, mini_batches
    from megappo.reshard.copies import block
    from megappo.workers.objectives import ActorObjective, CriticObjective
    from megappo.workers.settings import MiniBatch, Totals

    layout = role.settings.layout
    dp_rank = layout.coordinates(dist.get_rank())["dp"]
    ids, lengths = batch.column(ROWS, "id"), batch.lengths(ROWS, "response_ids")
    steps = []
    for rows in mini_batches(ROWS.num_rows, ppo.mini_batch):
        share = balanced_partition(lengths[rows].tolist(), layout.dp)[dp_rank]
        steps.append(MiniBatch(ids[np.array(rows)[share]], Totals(len(rows), int(lengths[rows].sum()))))
    objective = CriticObjective(ppo) if critic else ActorObjective(ppo, 0.8)
    stats = role.update(ROWS, steps, objective, 1e-3)
    blocks = [(box, role.params[box.param][block(box.local_offset, box.size)]) for box in role.boxes()]
    return stats, [(box.name, box.offset, np.array(values.tolist(), np.float32)) for box, values in blocks]


def gathered(results: list[tuple[Any, list[Any]]]) -> tuple[dict[str, float], dict[str, np.ndarray]]:
    """Statistics (equal wherever reported) and full weights (equal on replicas)."""
    reports = [stats for stats, _ in results if stats is not None]
    assert all(report == reports[0] for report in reports)
    weights: dict[str, np.ndarray] = {}
    pieces: dict[tuple[str, tuple[int, ...]], np.ndarray] = {}
    for _, held in results:
        for name, offset, values in held:
            if (name, offset) in pieces:
                np.testing.assert_array_equal(pieces[name, offset], values)
            pieces[name, offset] = values
    for name in {name for name, _ in pieces}:
        parts = {offset: values for (n, offset), values in pieces.items() if n == name}
        shape = tuple(np.max([np.add(offset, values.shape) for offset, values in parts.items()], axis=0))
        weights[name] = np.full(shape, np.nan, np.float32)
        for offset, values in parts.items():
            weights[name][tuple(slice(o, o + n) for o, n in zip(offset, values.shape, strict=True))] = values
        assert not np.isnan(weights[name]).any()
    return reports[0], weights


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, str]:
    out = {tied: make_model(tmp_path_factory.mktemp("model"), tie_word_embeddings=tied) for tied in (False, True)}
    return {tied: str(folder) for tied, folder in out.items()}


ALONE: dict[str, Any] = {}
"""What one rank computes, by what it was asked."""


def one_rank(folder: str, critic: bool, ppo: PPOConfig = PPO) -> tuple[dict[str, float], dict[str, np.ndarray]]:
    asked = f"{folder} {critic} {ppo}"
    if asked not in ALONE:
        ALONE[asked] = gathered(run_ranks(1, update, folder, Layout(), critic, ppo, 64))
    return ALONE[asked]


def assert_same(a: tuple[dict[str, float], dict[str, np.ndarray]], b: tuple[Any, Any]) -> None:
    assert a[0].keys() == b[0].keys()
    for name in a[0]:
        assert a[0][name] == pytest.approx(b[0][name], abs=1e-6, rel=2e-6), name
    for name in a[1]:
        np.testing.assert_allclose(a[1][name], b[1][name], atol=1e-6, err_msg=name)


@pytest.mark.parametrize("layout", LAYOUTS, ids=Layout.describe)
@pytest.mark.parametrize("role", ["actor", "actor-tied", "critic"])
def test_update_equals_one_rank(folders: dict[bool, str], role: str, layout: Layout) -> None:
    folder, critic = folders[role == "actor-tied"], role == "critic"
    assert_same(gathered(run_ranks(layout.world, update, folder, layout, critic, PPO, 64)), one_rank(folder, critic))


def scored(folder: str, layout: Layout, critic: bool) -> pa.Table | None:
    from megappo.workers.megatron_role import MegatronRole
    from megappo.workers.settings import RoleSettings

    role = MegatronRole(RoleSettings(folder, layout, "float32", 64, critic))
    return role.values(ROWS) if critic else role.logprobs(ROWS, column="values", temperature=1.0)


@pytest.mark.parametrize("critic", [False, True])
def test_chunks_score_as_one_rank_does(folders: dict[bool, str], critic: bool) -> None:
    layout = Layout(pp=2, vpp=2)
    alone, chunked = (
        [batch.take_ids(table, batch.column(ROWS, "id")) for table in tables if table is not None]
        for tables in (
            run_ranks(1, scored, folders[False], Layout(), critic),
            run_ranks(layout.world, scored, folders[False], layout, critic),
        )
    )
    assert len(alone) == len(chunked) == 1
    found, expected = (batch.flat(table, "values") for table in (chunked[0], alone[0]))
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_a_sequences_ratio_does_not_depend_on_the_layout(folders: dict[bool, str]) -> None:
    ppo, layout = replace(PPO, loss="gspo"), Layout(tp=2, pp=2, dp=2)
    found = gathered(run_ranks(layout.world, update, folders[False], layout, False, ppo, 64))
    assert_same(found, one_rank(folders[False], False, ppo))


def recomputing(folder: str, layout: Layout, recompute: str) -> tuple[Any, list[Any]]:
    from megappo.workers.megatron_role import MegatronRole
    from megappo.workers.settings import RoleSettings

    settings = RoleSettings(folder, layout, "float32", 64, False, PPO.optimizer, recompute=recompute)
    return take_steps(MegatronRole(settings), False, PPO)


@pytest.mark.parametrize("recompute", ["selective", "full"])
@pytest.mark.parametrize("layout", [Layout(), Layout(tp=2, pp=2, sequence_parallel=True)], ids=Layout.describe)
def test_recomputed_activations_change_nothing(folders: dict[bool, str], layout: Layout, recompute: str) -> None:
    found = gathered(run_ranks(layout.world, recomputing, folders[False], layout, recompute))
    assert_same(found, one_rank(folders[False], False))


def two_roles(folder: str) -> list[tuple[Any, list[Any]]]:
    """An actor on TP2 x PP2 and a critic on DP4, built in the same processes, then updated in turn."""
    from megappo.workers.megatron_role import MegatronRole
    from megappo.workers.settings import RoleSettings

    roles = []
    for layout, critic in ((Layout(tp=2, pp=2), False), (Layout(dp=4), True)):
        roles.append((MegatronRole(RoleSettings(folder, layout, "float32", 64, critic, PPO.optimizer)), critic))
    return [take_steps(role, critic, PPO) for role, critic in roles]


def test_two_roles_share_processes_with_two_layouts(folders: dict[bool, str]) -> None:
    results = run_ranks(4, two_roles, folders[False])
    for index, critic in enumerate((False, True)):
        assert_same(gathered([rank[index] for rank in results]), one_rank(folders[False], critic))


@pytest.mark.parametrize("aggregation", ["token_mean", "seq_mean_token_sum", "seq_mean_token_mean"])
def test_gradient_does_not_depend_on_the_token_budget(folders: dict[bool, str], aggregation: str) -> None:
    ppo = replace(PPO, aggregation=aggregation)
    expected = one_rank(folders[False], False, ppo)
    for budget in (23, 1000):
        assert_same(gathered(run_ranks(1, update, folders[False], Layout(), False, ppo, budget)), expected)


def gain(ppo: PPOConfig, logprobs: torch.Tensor, old: torch.Tensor, advantage: torch.Tensor) -> torch.Tensor:
    """What a row's tokens gain on average by each loss, as its paper writes it (GSPO-token for gspo)."""
    if ppo.loss == "gspo":
        ratio = torch.exp((logprobs - old).mean()).detach() * torch.exp(logprobs - logprobs.detach())
        return torch.minimum(ratio * advantage, ratio.clip(1 - ppo.clip, 1 + ppo.clip) * advantage).mean()
    ratio = torch.exp(logprobs - old)
    if ppo.loss == "cispo":
        return (ratio.clip(1 - ppo.clip, 1 + ppo.clip).detach() * advantage * logprobs).mean()
    clipped = torch.minimum(ratio * advantage, ratio.clip(1 - ppo.clip, 1 + ppo.clip) * advantage)
    return torch.where(advantage < 0, torch.maximum(clipped, 3.0 * advantage), clipped).mean()


def with_mask(rows: pa.Table) -> pa.Table:
    """With every third response token from elsewhere, but for the first of each response."""
    mask = [[int(at % 3 != 1) for at in range(n)] for n in batch.lengths(rows, "response_ids")]
    return rows.append_column("loss_mask", pa.array(mask, pa.list_(pa.int8())))


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("loss", ["ppo", "gspo", "cispo"])
def test_actor_loss_and_gradient_norm_equal_plain_torch(folders: dict[bool, str], loss: str, masked: bool) -> None:
    """The first mini-batch's loss, written out with transformers' model, one row at a time, without packing.

    The head takes three tokens at a time, so that no chunk holds whatever a sequence's ratio needs.
    """
    from transformers import AutoModelForCausalLM

    from megappo.ppo.balance import mini_batches

    folder, ppo = folders[False], replace(PPO, loss=loss)  # type: ignore[arg-type]
    stats = run_ranks(1, first_step, folder, ppo, masked)[0]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    rows = mini_batches(ROWS.num_rows, PPO.mini_batch)[0]
    columns = {name: batch.split_rows(ROWS, name) for name in ROWS.column_names if name != "id"}
    total, surrogate = torch.zeros(()), 0.0
    for row in rows:
        prompt, response = (torch.tensor(columns[name][row]).long() for name in ("prompt_ids", "response_ids"))
        logits = model(torch.cat([prompt, response])[None]).logits[0, len(prompt) - 1 : -1] / 0.8
        distribution = torch.distributions.Categorical(logits=logits)
        logprobs = distribution.log_prob(response)
        old, ref, advantage = (torch.tensor(columns[k][row]) for k in ("logprobs", "ref_logprobs", "advantages"))
        if masked:
            here = torch.arange(len(response)) % 3 != 1
            logprobs, old, ref, advantage = logprobs[here], old[here], ref[here], advantage[here]
            distribution = torch.distributions.Categorical(logits=logits[here])
        gained = gain(ppo, logprobs, old, advantage)
        kl = torch.exp(ref - logprobs) - (ref - logprobs) - 1
        total = total + (-gained + (0.05 * kl - 0.01 * distribution.entropy()).mean()) / len(rows)
        surrogate += -gained.item() / len(rows)
    total.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9).item()
    assert stats["actor/pg_loss"] == pytest.approx(surrogate, abs=1e-6)
    assert stats["actor/grad_norm"] == pytest.approx(norm, rel=1e-5)


def first_step(folder: str, ppo: PPOConfig, masked: bool) -> dict[str, float]:
    from megappo.models import language_head
    from megappo.ppo.balance import mini_batches
    from megappo.workers.megatron_role import MegatronRole
    from megappo.workers.objectives import ActorObjective
    from megappo.workers.settings import MiniBatch, RoleSettings, Totals

    role = MegatronRole(RoleSettings(folder, Layout(), "float32", 64, False, ppo.optimizer))
    language_head.CHUNK_BYTES = 3 * 4 * role.head.weight_vh.shape[0]
    rows = mini_batches(ROWS.num_rows, PPO.mini_batch)[0]
    table = with_mask(ROWS) if masked else ROWS
    lengths = batch.lengths(ROWS, "response_ids")
    lengths = row_counts(flat_mask(table, "response_ids"), lengths)
    totals = Totals(len(rows), int(lengths[rows].sum()))
    mini = MiniBatch(batch.column(ROWS, "id")[rows], totals)
    stats = role.update(table, [mini], ActorObjective(ppo, 0.8), 1e-3)
    assert stats is not None
    return stats
