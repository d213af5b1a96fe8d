"""Training on given responses: the losses and gradients are torch's at any layout, and a run goes on where it was."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from ranks import run_ranks
from small_run import Command, make_tiny_model
from test_reward_model import make_scorer, scores_of
from tiny import make_model, random_rows

from megappo.config import OptimizerConfig
from megappo.data import batch
from megappo.data.examples import load_pairs, load_responses
from megappo.data.prompts import DataError
from megappo.data.sequences import ending_rows, joined
from megappo.layout.mesh import Layout
from megappo.report.run_log import read_log

pytestmark = pytest.mark.runs

CONFIG = """\
run: {dir: run, steps: 4, seed: 3, device: cpu, dtype: float32, save_every: 2, validate_every: 2, timeout_s: 300}
model: model
data: {train: pairs.parquet, validation: held_out.parquet, batch: 5, max_tokens: 16}
pools: {train: {devices_per_node: 2}}
role: {pool: train, pp: 2, micro_batch_tokens: 60}
lr: 1.0e-3
optimizer: {warmup_steps: 2}
"""


def pair_rows() -> pa.Table:
    """Seven pairs with margins; their ids are in order."""
    sequences = joined(random_rows(14, longest=14))
    table = ending_rows(np.arange(14), sequences)
    margins = np.repeat(np.linspace(0, 0.5, 7), 2).astype(np.float32)
    return table.append_column("margin", batch.ragged(margins, np.ones(14, np.int64)))


def one_step(folder: str, layout: Layout, task: str, rows: pa.Table) -> dict[str, float] | None:
    """The statistics of one update, all rows being one mini-batch."""
    import torch.distributed as dist

    from megappo.ppo.balance import balanced_partition, unit_rows, unit_sums
    from megappo.supervised import KINDS
    from megappo.workers.megatron_role import MegatronRole
    from megappo.workers.micro_batch import sequence_lengths
    from megappo.workers.settings import MiniBatch, RoleSettings, Totals

    objective = KINDS[task].objective  # type: ignore[index]
    scalar = task == "reward-train"
    role = MegatronRole(RoleSettings(folder, layout, "float32", 60, scalar, OptimizerConfig(grad_clip=100.0)))
    sums = unit_sums(sequence_lengths(rows), objective.unit).tolist()
    share = balanced_partition(sums, layout.dp)[layout.coordinates(dist.get_rank())["dp"]]
    totals = Totals(rows.num_rows, int(batch.lengths(rows, "response_ids").sum()))
    ids = batch.column(rows, "id")[unit_rows(share, objective.unit)]
    return role.update(rows, [MiniBatch(ids, totals)], objective, 1e-3)


LAYOUTS = [Layout(tp=2, dp=2, sequence_parallel=True), Layout(pp=2)]


@pytest.mark.parametrize("layout", LAYOUTS, ids=Layout.describe)
def test_pairs_have_the_gradient_of_torch(tmp_path: Path, layout: Layout) -> None:
    from transformers import AutoModelForSequenceClassification

    folder, rows = make_scorer(tmp_path), pair_rows()
    reports = [found for found in run_ranks(layout.world, one_step, str(folder), layout, "reward-train", rows) if found]
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    model.config.pad_token_id = None
    scores = torch.cat(
        [model(torch.tensor(one)[None].long()).logits[0] for one in batch.split_rows(rows, "prompt_ids")]
    )
    gaps = scores[::2] - scores[1::2]
    loss = -torch.log(torch.sigmoid(gaps - torch.tensor(batch.flat(rows, "margin")[::2].copy()))).mean()
    loss.backward()
    norm = torch.stack([param.grad.norm() for param in model.parameters() if param.grad is not None]).norm()
    for report in reports:
        assert report["train/loss"] == pytest.approx(float(loss), rel=1e-5)
        assert report["train/accuracy"] == pytest.approx(float((gaps > 0).float().mean()), abs=1e-6)
        assert report["train/gap"] == pytest.approx(float(gaps.mean()), rel=1e-4, abs=1e-5)
        assert report["critic/grad_norm"] == pytest.approx(float(norm), rel=1e-4)


def summed_loss(model: Any, rows: pa.Table) -> torch.Tensor:
    """Of a transformers model on all response tokens."""
    total = torch.zeros(())
    for prompt, whole in zip(batch.split_rows(rows, "prompt_ids"), joined(rows), strict=True):
        ids = torch.tensor(whole)[None].long()
        labels = ids.clone()
        labels[:, : len(prompt)] = -100
        total = total + model(ids, labels=labels).loss * (len(whole) - len(prompt))
    return total


def test_responses_have_the_gradient_of_torch(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    folder, rows, layout = make_model(tmp_path), random_rows(9), LAYOUTS[0]
    reports = [found for found in run_ranks(layout.world, one_step, str(folder), layout, "sft", rows) if found]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    loss = summed_loss(model, rows) / batch.lengths(rows, "response_ids").sum()
    loss.backward()
    norm = torch.stack([param.grad.norm() for param in model.parameters() if param.grad is not None]).norm()
    for report in reports:
        assert report["train/loss"] == pytest.approx(float(loss), rel=1e-5)
        assert report["actor/grad_norm"] == pytest.approx(float(norm), rel=1e-4)


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


PAIR = {"prompt": "1+2=", "chosen": "3", "rejected": "4"}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"rejected": "3"}, "row 1 (counting from 0): chosen and rejected are equal: remove the row"),
        ({"chosen": " "}, "row 1 (counting from 0): chosen is empty: remove the row"),
        ({"rejected": None}, "row 1 (counting from 0): rejected is 'None': it must be a string, the response alone"),
        ({"margin": float("nan")}, "row 1 (counting from 0): margin is nan: it must be a number, and within float32"),
        ({"margin": 1e300}, "row 1 (counting from 0): margin is 1e+300: it must be a number, and within float32"),
        ({"prompt": ""}, "row 1 (counting from 0): the prompt is empty; remove the row"),
    ],
)
def test_bad_pairs_are_named(tmp_path: Path, wrong: dict[str, Any], message: str) -> None:
    path = write(tmp_path / "pairs.parquet", [{**PAIR, "margin": 0.5}, {**PAIR, "margin": 0.5, **wrong}])
    with pytest.raises(DataError) as error:
        load_pairs([path], make_tiny_model().make_tokenizer(), max_tokens=16)
    assert str(error.value) == f"{path}, {message}"


def test_a_response_without_tokens_is_named(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(
        models.BPE({"<eos>": 0, "1": 1, "+": 2, "2": 3, "=": 4, "3": 5}, [])
    )  # drops what it does not know
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>")
    path = write(tmp_path / "text.parquet", [{"prompt": "1+2=", "response": text} for text in ("3", "日")])
    with pytest.raises(DataError, match=r"row 1 \(counting from 0\): response is '日', of which the tokenizer knows"):
        load_responses([path], tokenizer, max_tokens=16)


def test_margins_must_be_numbers(tmp_path: Path) -> None:
    path = write(tmp_path / "pairs.parquet", [{**PAIR, "margin": "large"}])
    with pytest.raises(DataError, match="margin is 'large': it must be a number"):
        load_pairs([path], make_tiny_model().make_tokenizer(), max_tokens=16)


def test_examples_are_tokenized_as_in_ppo(tmp_path: Path) -> None:
    tokenizer = make_tiny_model().make_tokenizer()
    end = tokenizer.eos_token_id
    pairs = load_pairs([write(tmp_path / "a", [PAIR, {**PAIR, "rejected": "4" * 20}])], tokenizer, max_tokens=16)
    assert len(pairs) == 1 and pairs.report.endswith("2 rows, 1 over 16 tokens left out")
    prompt = tokenizer("1+2=")["input_ids"]
    sides = [[*prompt, *tokenizer(text)["input_ids"], end] for text in ("3", "4")]
    assert pairs.table.column("prompt_ids").to_pylist() == sides
    path = write(tmp_path / "b", [{"prompt": "1+2=", "response": "3"}])
    responses = load_responses([path], tokenizer, max_tokens=64)
    assert responses.table.column("prompt_ids").to_pylist() == [prompt]
    assert responses.table.column("response_ids").to_pylist() == [sides[0][len(prompt) :]]


def make_folder(folder: Path) -> Path:
    folder.mkdir()
    make_model(folder / "model", hidden_size=128, vocab_size=51, tie_word_embeddings=True)
    make_tiny_model().make_tokenizer().save_pretrained(folder / "model")
    (folder / "config.yaml").write_text(CONFIG)
    pairs = [
        {"prompt": f"{a}+{b}=", "chosen": f"{a + b}", "rejected": f"{a + b + 1}"} for a in range(5) for b in range(5)
    ]
    write(folder / "pairs.parquet", pairs[:19])
    write(folder / "held_out.parquet", pairs[19:])
    return folder


def lines(folder: Path) -> dict[int, dict[str, float]]:
    """Everything in the log but what depends on the clock."""
    rows = read_log(folder)
    timed = ("timing_s/", "perf/")
    return {row["step"]: {k: v for k, v in row["metrics"].items() if not k.startswith(timed)} for row in rows}


def test_reward_training_resumes_and_exports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from megappo.convert.command import convert
    from megappo.convert.options import Options

    folder = make_folder(tmp_path / "work")
    monkeypatch.chdir(folder)  # for the paths of the run's configuration
    command = Command(folder, words=("reward-train",))
    assert command.wait() == 0, command.text
    log = lines(folder / "run")
    assert sorted(log) == [0, 1, 2, 3, 4]
    assert log[0]["val/loss"] == pytest.approx(np.log(2), abs=1e-6)  # a fresh head gives 0
    assert log[4]["train/loss"] != log[1]["train/loss"]

    shutil.rmtree(folder / "run" / "checkpoints" / "step_4")
    command = Command(folder, words=("reward-train",))
    assert command.wait() == 0, command.text
    assert "resumed from the checkpoint of step 2" in command.text
    assert lines(folder / "run") == log

    said: list[str] = []
    convert(folder / "run", folder / "exported", Options(verify=True), said.append)
    tokenizer = make_tiny_model().make_tokenizer()
    held_out = load_pairs([folder / "held_out.parquet"], tokenizer, max_tokens=16)
    scores = scores_of(folder / "exported", batch.split_rows(held_out.table, "prompt_ids"))
    gaps = scores[::2] - scores[1::2]
    assert log[4]["val/accuracy"] == pytest.approx((gaps > 0).mean())
    assert log[4]["val/loss"] == pytest.approx(np.log1p(np.exp(-gaps)).mean(), abs=1e-6)


def test_supervised_training_learns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the last loss in the log is the one that transformers has of what comes out."""
    from transformers import AutoModelForCausalLM

    from megappo.convert.command import convert
    from megappo.convert.options import Options

    folder = make_folder(tmp_path / "work")
    monkeypatch.chdir(folder)
    sums = [{"prompt": f"{a}+{b}=", "response": str(a + b)} for a in range(6) for b in range(6)]
    write(folder / "sums.parquet", sums)
    small = ("run.steps=12", "run.validate_every=12", "run.save_every=0", "pools.train.devices_per_node=1", "role.pp=1")
    data = ("data.train=sums.parquet", "data.validation=sums.parquet", "data.batch=12", "lr=3.0e-3")
    command = Command(folder, *small, *data, words=("sft",))
    assert command.wait() == 0, command.text
    log = lines(folder / "run")
    timed = [row["step"] for row in read_log(folder / "run") if row["metrics"].get("timing_s/testing", 0) > 0]
    assert timed == [0, 12]  # its validations, as those of PPO
    assert log[12]["val/loss"] < log[0]["val/loss"] / 3 and log[12]["train/loss"] < log[1]["train/loss"] / 3
    convert(folder / "run", folder / "exported", Options(), lambda text: None)
    rows = load_responses([folder / "sums.parquet"], make_tiny_model().make_tokenizer(), max_tokens=16).table
    with torch.no_grad():
        total = summed_loss(AutoModelForCausalLM.from_pretrained(folder / "exported", dtype=torch.float32), rows)
    assert log[12]["val/loss"] == pytest.approx(float(total) / batch.lengths(rows, "response_ids").sum(), rel=1e-4)
