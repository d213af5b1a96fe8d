"""A reward model on Megatron ranks gives the scores that transformers gives, also where it reads other tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from ranks import run_ranks
from small_run import make_tiny_model
from tiny import make_model, random_rows

from megappo.data import batch
from megappo.data.examples import load_pairs
from megappo.layout.mesh import Layout
from megappo.rewards.reading import make_reader

pytestmark = pytest.mark.ranks

TEMPLATE = "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }};{% endfor %}"
TEMPLATE += "{% if add_generation_prompt %}<assistant>{% endif %}"


def make_scorer(folder: Path, family: str = "qwen2", **changes: Any) -> Path:
    """A folder as AutoModelForSequenceClassification saves it, with one label and random weights."""
    import transformers

    make_model(folder, family, **changes)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1)
    torch.manual_seed(5)
    torch.nn.init.normal_(model.score.weight, std=0.5)
    model.save_pretrained(folder)
    return folder


def scores_of(folder: Path, sequences: list[np.ndarray]) -> np.ndarray:
    """transformers' scores, one sequence at a time."""
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    model.config.pad_token_id = None  # no token is padding
    with torch.no_grad():
        return np.array([float(model(torch.tensor(one)[None].long()).logits) for one in sequences])


def rank_scores(folder: str, layout: Layout, tokenizer: str, batches: list[pa.Table]) -> list[pa.Table | None]:
    import torch.distributed as dist

    from megappo.workers.megatron_role import MegatronRole
    from megappo.workers.settings import RoleSettings

    role = MegatronRole(RoleSettings(folder, layout, "float32", 60, scalar_head=True))
    shares = [np.arange(rows.num_rows)[layout.coordinates(dist.get_rank())["dp"] :: layout.dp] for rows in batches]
    pairs = zip(batches, shares, strict=True)
    return [role.scores(rows.take(pa.array(share)), tokenizer=tokenizer) for rows, share in pairs]


def scored(folder: Path, layout: Layout, tokenizer: Path, *batches: pa.Table) -> list[pa.Table]:
    found = run_ranks(layout.world, rank_scores, str(folder), layout, str(tokenizer), list(batches))
    of_batches = zip(*found, strict=True)
    return [pa.concat_tables([table for table in tables if table is not None]) for tables in of_batches]


@pytest.mark.parametrize(
    ("layout", "family"),
    [(Layout(tp=2, pp=2, sequence_parallel=True), "qwen2"), (Layout(pp=2, dp=2), "llama")],
    ids=["tp2-pp2-sp", "pp2-dp2"],
)
def test_scores_equal_transformers(tmp_path: Path, layout: Layout, family: str) -> None:
    folder = make_scorer(tmp_path / "scorer", family, vocab_size=51)
    make_tiny_model().make_tokenizer().save_pretrained(folder)
    rows = random_rows(9, vocab=51, longest=30)
    rows = rows.append_column("prompt_text", pa.array([""] * 9)).append_column("messages", pa.array([None] * 9))
    found, few = scored(folder, layout, folder, rows, rows.slice(3, 1))  # of the few, some rank has none
    out = batch.take_ids(found, batch.column(rows, "id"))
    sequences = [
        np.concatenate(pair)
        for pair in zip(batch.split_rows(rows, "prompt_ids"), batch.split_rows(rows, "response_ids"), strict=True)
    ]
    np.testing.assert_allclose(batch.column(out, "score_model"), scores_of(folder, sequences), atol=1e-5)
    assert set(out.column("failure_model").to_pylist()) == {""}
    assert few.schema == found.schema
    np.testing.assert_allclose(batch.column(few, "score_model"), batch.column(out, "score_model")[3:4], atol=1e-5)


def test_another_tokenizer(tmp_path: Path) -> None:
    """Text is decoded and encoded again, chat messages by the reward model's own template, and ended where it ended."""
    tokenizer = make_tiny_model().make_tokenizer()
    tokenizer.save_pretrained(tmp_path / "actor")
    folder = make_scorer(tmp_path / "scorer", vocab_size=80, max_position_embeddings=40)
    other = other_tokenizer()
    other.save_pretrained(folder)

    messages = [{"role": "user", "content": "1+2="}]
    end = tokenizer.eos_token_id
    rows = pa.table(
        {
            "id": pa.array([7, 3, 5], pa.int64()),
            "prompt_ids": pa.array([tokenizer("1+2=")["input_ids"]] * 3, pa.list_(pa.int32())),
            "response_ids": pa.array(
                [[*tokenizer("3")["input_ids"], end], tokenizer("4")["input_ids"], tokenizer("1" * 60)["input_ids"]],
                pa.list_(pa.int32()),
            ),
            "finish_reason": ["stop", "length", "length"],
            "prompt_text": ["<user>1+2=</user>", "1+2=", "1+2="],
            "messages": pa.array([json.dumps(messages), None, None], pa.string()),
        }
    )
    out = batch.take_ids(*scored(folder, Layout(), tmp_path / "actor", rows), [7, 3, 5])
    read = [[*other("<user>1+2=;<assistant>3")["input_ids"], other.eos_token_id], other("1+2=4")["input_ids"]]
    expected = scores_of(folder, [np.array(ids) for ids in read])
    np.testing.assert_allclose(batch.column(out, "score_model")[:2], expected, atol=1e-5)
    assert np.isnan(batch.column(out, "score_model")[2])
    assert out.column("failure_model").to_pylist() == ["", "", "64 of the reward model's tokens, more than 40"]


def test_what_is_read_is_what_was_trained_on(tmp_path: Path) -> None:
    """A reward model with a tokenizer of its own reads a response in PPO as ``reward-train`` had it read the text."""
    actor, other = make_tiny_model().make_tokenizer(), other_tokenizer()
    for name, tokenizer in (("actor", actor), ("scorer", other)):
        tokenizer.save_pretrained(tmp_path / name)
    messages = [{"role": "user", "content": "1+2="}]
    trained = []
    for prompt in (messages, "1+2="):
        pair = pa.Table.from_pylist([{"prompt": prompt, "chosen": "3", "rejected": "4"}])
        pq.write_table(pair, tmp_path / "pairs.parquet")
        examples = load_pairs([tmp_path / "pairs.parquet"], other, max_tokens=40)
        trained += batch.split_rows(examples.table, "prompt_ids")[:1]
    three = actor("3")["input_ids"]
    responses = [[*three, actor.eos_token_id]] * 2 + [three] * 2
    rows = pa.table(
        {
            "response_ids": pa.array(responses, pa.list_(pa.int32())),
            "finish_reason": ["stop", "stop", "length", "length"],
            "prompt_text": ["", "1+2="] * 2,
            "messages": pa.array([json.dumps(messages), None] * 2, pa.string()),
        }
    )
    reader = make_reader(str(tmp_path / "actor"), str(tmp_path / "scorer"))
    found = [ids.tolist() for ids in reader.sequences(rows)]
    assert found[:2] == [ids.tolist() for ids in trained]
    assert found[2:] == [ids.tolist()[:-1] for ids in trained]  # they were cut


def other_tokenizer() -> Any:
    """Bytes in another order than the actor's, without its template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    characters = ["<end>", *"=+<>;/0123456789", *"abcdefghijklmnopqrstuvwxyz"]
    inner = Tokenizer(models.BPE({character: at for at, character in enumerate(characters)}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<end>")
    tokenizer.chat_template = TEMPLATE
    return tokenizer
