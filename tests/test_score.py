"""`megappo score`: real ranks' log-probabilities and rewards of given text, wins, and a file that can be replayed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from small_project import REPLAY
from small_run import CONFIG, Command, make_run_folder, make_tiny_model
from test_reward_model import make_scorer, scores_of
from test_without_critic import set_sections

from megappo.config import RewardConfig, RewardWeights, load_config
from megappo.data import batch
from megappo.data.answers import load_answers
from megappo.data.given import Limits
from megappo.data.prompts import DataError
from megappo.data.replay import load_replay
from megappo.data.sequences import joined
from megappo.score import Options, check_truths, score, win_values, writing

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
    answers = load_answers(path, "response", tokenizer, limits=Limits(51, 9))
    assert batch.column(answers, "prompt_index").tolist() == [0, 0, 1]
    assert answers.column("ground_truth").to_pylist() == ["3", "3", "4"]
    pq.write_table(answers, tmp_path / "dumped.parquet")
    assert load_answers(tmp_path / "dumped.parquet", "response", tokenizer, limits=Limits(51, 9)) == answers
    pq.write_table(answers.drop_columns(["messages", "finish_reason"]), tmp_path / "less.parquet")
    less = load_answers(tmp_path / "less.parquet", "response", tokenizer, limits=Limits(51, 9))
    assert less.select(answers.column_names) == answers  # all prompts are plain, all responses whole
    with pytest.raises(DataError, match=r"row 0 \(counting from 0\): 6 tokens are more than the 5"):
        load_answers(path, "response", tokenizer, limits=Limits(51, 5))
    with pytest.raises(DataError, match="missing column answer; it has prompt, response"):
        load_answers(path, "answer", tokenizer, limits=Limits(51, 9))
    empty = write(tmp_path / "b.parquet", [{"prompt": "1+2=", "response": ""}])
    with pytest.raises(DataError, match=r"b.parquet, row 0 \(counting from 0\): response is empty: remove the row"):
        load_answers(empty, "response", tokenizer, limits=Limits(51, 9))


def test_tokens_of_others_stay_others(tmp_path: Path) -> None:
    """A dumped batch's mask goes with it through scoring; one that does not fit, or beside text, is named."""
    path, tokenizer = tmp_path / "step.parquet", make_tiny_model().make_tokenizer()

    def load(rows: list[dict[str, Any]]) -> pa.Table:
        return load_answers(write(path, rows), "response", tokenizer, limits=Limits(51, 9))

    masks = [[1, 0], [0, 1]]
    rows = [{**REPLAY, "id": id, "loss_mask": mask} for id, mask in enumerate(masks)]
    assert load(rows).column("loss_mask").to_pylist() == masks
    for mask, message in (
        ([0, 0], "loss_mask of row 1: no token of its response is the policy's"),
        ([1], "loss_mask of row 1: 1 values for 2 response tokens"),
        (None, "loss_mask has a null: fill it with 0 or 1"),
    ):
        with pytest.raises(DataError, match=f"^{path}: {message}"):
            load([rows[0], {**rows[1], "loss_mask": mask}])
        with pytest.raises(DataError, match=f"^{path}: {message}"):
            load_replay(path)
    with pytest.raises(DataError, match="loss_mask holds strings: it must hold lists of 0 and 1"):
        load([{**REPLAY, "loss_mask": "10"}])
    with pytest.raises(DataError, match="has loss_mask, which is of tokens, beside text: give prompt_ids and"):
        load([{"prompt": "1+2=", "response": "3", "loss_mask": [1]}])


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


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"id": 1}, ", row 1 (counting from 0): repeats an id, 1: number the rows anew"),
        ({"id": None}, ", row 1 (counting from 0): id is null: fill it"),
        ({"prompt_ids": []}, ", row 1 (counting from 0): the prompt is empty: remove the row"),
        ({"prompt_ids": [5] * 8}, ", row 1 (counting from 0): 10 tokens are more than the 9 that every role takes"),
        ({"response_ids": []}, ", row 1 (counting from 0): the response is empty: remove the row"),
        ({"response_ids": [5, None]}, ", row 1 (counting from 0): response_ids has a null: fill it"),
        (
            {"response_ids": [5, 51]},
            ", row 1 (counting from 0): token 51 of the response is not in the vocabulary of 51",
        ),
        (
            {"prompt_ids": [-1]},
            ", row 1 (counting from 0): token -1 of the prompt is not in the vocabulary of 51 tokens",
        ),
    ],
)
def test_bad_rows_are_named(tmp_path: Path, wrong: dict[str, Any], message: str) -> None:
    path = write(tmp_path / "step.parquet", [REPLAY, {**REPLAY, "id": 2, **wrong}])
    with pytest.raises(DataError) as error:
        load_replay(path, Limits(51, 9))
    assert str(error.value).startswith(f"{path}{message}")
    with pytest.raises(DataError) as error:
        load_answers(path, "response", make_tiny_model().make_tokenizer(), limits=Limits(51, 9))
    assert str(error.value).startswith(f"{path}{message}")


SCORES = {"score": 1.0, "failed": False, "failure": "", "extras": "{}", "response": "3"}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"response_ids": [5]}, ", row 1 (counting from 0): rollout_logprobs has not a number for each token"),
        ({"rollout_logprobs": [-1.0, float("nan")]}, ", row 1 (counting from 0): rollout_logprobs has nan, which"),
        ({"rollout_logprobs": [0.25, -1.0]}, ", row 1 (counting from 0): rollout_logprobs has 0.25, which is no log-"),
        ({"score": float("nan")}, ", row 1 (counting from 0): the score is nan, no number in float32: remove"),
        ({"score": 1e300}, ", row 1 (counting from 0): the score is 1e+300, no number in float32: remove"),
    ],
)
def test_bad_replays_are_named(tmp_path: Path, wrong: dict[str, Any], message: str) -> None:
    path = write(tmp_path / "step.parquet", [{**REPLAY, **SCORES}, {**REPLAY, **SCORES, "id": 2, **wrong}])
    with pytest.raises(DataError) as error:
        load_replay(path, Limits(51, 9))
    assert str(error.value).startswith(f"{path}{message}")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({**REPLAY, "score": 1.0}, "has no column failed, failure, extras, response"),
        ({name: value for name, value in REPLAY.items() if name != "prompt_ids"}, "has no column prompt_ids"),
        ({**REPLAY, **SCORES, "score": "high"}, "score holds strings: it must hold numbers: write it again"),
        ({**REPLAY, "response_ids": "5 6"}, "response_ids holds strings: it must hold lists of whole numbers"),
        ({**REPLAY, "id": "1"}, "id holds strings: it must hold whole numbers"),
        ({**REPLAY, "rollout_logprobs": None}, "rollout_logprobs holds null: it must hold lists of numbers"),
    ],
)
def test_wrong_columns_are_named(tmp_path: Path, row: dict[str, Any], message: str) -> None:
    path = write(tmp_path / "step.parquet", [row])
    with pytest.raises(DataError) as error:
        load_replay(path)
    assert str(error.value).startswith(f"{path}: {message}")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("folder", "folder: is a folder: name a parquet file to write"),
        ("none/out", "none/out: there is no folder "),
        ("/proc/out", "/proc/out: cannot be written ("),
    ],
)
def test_a_place_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    with pytest.raises(DataError) as error, writing(name):
        pass
    assert str(error.value).startswith(message)
    assert list(tmp_path.iterdir()) == [tmp_path / "folder"]


def test_a_file_is_whole_or_absent(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), writing(str(tmp_path / "out")) as file:
        file.write(b"half")
        raise KeyboardInterrupt
    assert not list(tmp_path.iterdir())
    with writing(str(tmp_path / "out")) as file:
        file.write(b"all")
    assert (tmp_path / "out").read_bytes() == b"all" and len(list(tmp_path.iterdir())) == 1


def test_a_column_that_comes_twice_is_named(tmp_path: Path) -> None:
    table = pa.Table.from_pylist([REPLAY])
    pq.write_table(table.append_column("id", table["id"]), tmp_path / "step.parquet")
    with pytest.raises(DataError, match=r"step.parquet: has id twice: keep one column of each name"):
        load_replay(tmp_path / "step.parquet")


def test_a_replay_is_computed_anew(tmp_path: Path) -> None:
    rows = load_replay(
        write(tmp_path / "step.parquet", [{name: REPLAY[name] for name in REPLAY if name != "extra_info"}])
    )
    assert "values" not in rows.column_names
    found = {name: rows.schema.field(name).type for name in ("prompt_ids", "rollout_logprobs")}
    assert found == {"prompt_ids": pa.list_(pa.int32()), "rollout_logprobs": pa.list_(pa.float32())}
    assert rows.column("extra_info").to_pylist() == ["{}"]
