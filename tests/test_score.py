"""`megappo score`: real ranks' log-probabilities and rewards of given text, wins, and a file that can be replayed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from small_run import CONFIG, Command, make_run_folder, make_tiny_model
from test_reward_model import make_scorer, scores_of
from test_without_critic import set_sections

from megappo.config import RewardConfig, RewardWeights, load_config
from megappo.data import batch
from megappo.data.answers import load_answers
from megappo.data.prompts import DataError
from megappo.data.replay import load_replay
from megappo.data.sequences import joined
from megappo.score import Options, check_truths, score, win_values

pytestmark = pytest.mark.runs

POOLS = "pools: {train: {devices_per_node: 1}, serve: {devices_per_node: 1}}\n"
ROLES = """\
roles:
  actor: {pool: train, micro_batch_tokens: 100}
  rollout: {pool: serve, samples_per_prompt: 3, kv_cache_gib: 0.1}
  reward: {pool: train, model: scorer, micro_batch_tokens: 50}
"""
PPO = "ppo: {estimator: grpo, mini_batch: 8, actor_lr: 1.0e-3, kl: {in_reward: false}}\n"
PAIRS = [{"prompt": f"{a}+2=", "chosen": str(a + 2), "rejected": str(a + 3), "data_source": "sums"} for a in range(4)]


def test_scores_of_given_responses(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    folder = make_run_folder(tmp_path / "work")
    make_scorer(folder / "scorer", vocab_size=51)
    tokenizer = make_tiny_model().make_tokenizer()
    tokenizer.save_pretrained(folder / "scorer")
    (folder / "config.yaml").write_text(set_sections(CONFIG, pools=POOLS, roles=ROLES, ppo=PPO))
    pq.write_table(pa.Table.from_pylist(PAIRS), folder / "pairs.parquet")
    words = ("--column=chosen", "--against-column=rejected")
    command = Command(folder, "pairs.parquet", "scored.parquet", *words, words=("score",))
    assert command.wait() == 0, command.text

    rows = load_replay(folder / "scored.parquet")
    end = tokenizer.eos_token_id
    sides = {
        side: [np.array([*tokenizer(row["prompt"] + row[side])["input_ids"], end]) for row in PAIRS]
        for side in ("chosen", "rejected")
    }
    assert [ids.tolist() for ids in joined(rows)] == [ids.tolist() for ids in sides["chosen"]]
    scores = {side: scores_of(folder / "scorer", sequences) for side, sequences in sides.items()}
    np.testing.assert_allclose(batch.column(rows, "score"), scores["chosen"], atol=1e-5)
    wins = (scores["chosen"] > scores["rejected"]).astype(float)
    np.testing.assert_array_equal(batch.column(rows, "win"), wins)
    assert f"win rate {wins.mean():.4f}" in command.text

    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    found = batch.split_rows(rows, "rollout_logprobs")
    for prompt, whole, logprobs in zip(batch.split_rows(rows, "prompt_ids"), sides["chosen"], found, strict=True):
        with torch.no_grad():
            all_logprobs = model(torch.tensor(whole)[None]).logits[0].log_softmax(-1)
        expected = [float(all_logprobs[at - 1, whole[at]]) for at in range(len(prompt), len(whole))]
        np.testing.assert_allclose(logprobs, expected, atol=1e-4)


def test_wins() -> None:
    assert win_values(np.array([1.0, 2.0, 3.0]), np.array([2.0, 2.0, 2.0])).tolist() == [0.0, 0.5, 1.0]


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def test_answers(tmp_path: Path) -> None:
    tokenizer = make_tiny_model().make_tokenizer()
    rows = [
        {"prompt": "1+2=", "response": "3", "reward_model": {"ground_truth": "3"}, "extra_info": {"index": 4}},
        {"prompt": "1+2=", "response": "4", "reward_model": {"ground_truth": "3"}, "extra_info": {"index": 5}},
        {"prompt": "2+2=", "response": "4", "reward_model": {"ground_truth": "4"}, "extra_info": {"index": 6}},
    ]
    path = write(tmp_path / "a.parquet", rows)
    answers = load_answers(path, "response", tokenizer, longest=9)
    assert batch.column(answers, "prompt_index").tolist() == [0, 0, 1]
    assert answers.column("ground_truth").to_pylist() == ["3", "3", "4"]
    pq.write_table(answers, tmp_path / "dumped.parquet")
    assert load_answers(tmp_path / "dumped.parquet", "response", tokenizer, longest=9) == answers
    with pytest.raises(DataError, match=r"row 0 \(counting from 0\): 6 tokens are more than the 5"):
        load_answers(path, "response", tokenizer, longest=5)
    with pytest.raises(DataError, match="missing column answer; it has prompt, response"):
        load_answers(path, "answer", tokenizer, longest=9)
    empty = write(tmp_path / "b.parquet", [{"prompt": "1+2=", "response": ""}])
    with pytest.raises(DataError, match=r"b.parquet, row 0 \(counting from 0\): response is empty: remove the row"):
        load_answers(empty, "response", tokenizer, longest=9)


def test_rules_need_answers_to_compare_with() -> None:
    pairs = pa.table({"data_source": ["pairs", "sums"], "ground_truth": ["", "3"]})
    check_truths("a", pairs, RewardConfig(function="own.py", by_source={"sums": "megappo.rewards.math"}))
    check_truths("a", pairs, RewardConfig(function="megappo.rewards.math", weights=RewardWeights(function=0.0)))
    with pytest.raises(DataError, match=r"^a: has no reward_model.ground_truth for data_source 'pairs', which megappo"):
        check_truths("a", pairs, RewardConfig(function="megappo.rewards.math"))


def test_files_to_score_that_are_not_there(tmp_path: Path) -> None:
    config = load_config(Path(__file__).parents[1] / "configs/quickstart.yaml")
    here = write(tmp_path / "a.parquet", PAIRS)
    for data, against, message in ((tmp_path / "b", None, "DATA: .*b: no such file"), (here, tmp_path, "--against: ")):
        with pytest.raises(DataError, match=f"^{message}"):
            score(config, str(data), "out", Options(against=against and str(against)), print)


REPLAY = {
    "id": 1,
    "prompt_index": 0,
    "data_source": "sums",
    "ground_truth": "3",
    "prompt_text": "1+2=",
    "prompt_ids": [3, 4],
    "response_ids": [5, 6],
    "rollout_logprobs": [-1.0, -2.0],
    "finish_reason": "stop",
    "values": [0.0, 0.0],
}


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([REPLAY, REPLAY], "repeats an id"),
        ([{**REPLAY, "response_ids": [5]}], r"row 0 \(counting from 0\): rollout_logprobs has not a number for each"),
        ([{**REPLAY, "score": 1.0}], "has no column failed, failure, extras, response"),
        ([{name: value for name, value in REPLAY.items() if name != "prompt_ids"}], "has no column prompt_ids"),
    ],
)
def test_bad_replays_are_named(tmp_path: Path, rows: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(DataError, match=message):
        load_replay(write(tmp_path / "step.parquet", rows))


def test_a_replay_is_computed_anew(tmp_path: Path) -> None:
    assert "values" not in load_replay(write(tmp_path / "step.parquet", [REPLAY])).column_names
