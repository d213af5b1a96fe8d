"""What tells data from other data."""

from __future__ import annotations

from datetime import date
from hashlib import sha256
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from small_run import make_tiny_model

from megappo.data.fingerprint import fingerprint
from megappo.data.prompts import load_prompts


def test_rows_and_their_order_count() -> None:
    known = sha256(b"\2\0\0\0\0\0\0\0ab\1\0\0\0\0\0\0\0c").hexdigest()[:16]
    assert fingerprint(["ab", "c"]) == f"2 rows, sha256 {known}"
    assert len({fingerprint(texts) for texts in (["ab", "c"], ["a", "bc"], ["c", "ab"], ["abc"], [])}) == 5


def test_a_template_that_tells_the_date_changes_nothing(tmp_path: Path) -> None:
    """Llama-3.2's does: a run that goes on the next day has the same data."""
    row = {"data_source": "a", "prompt": [{"role": "user", "content": "1"}], "reward_model": {"ground_truth": "1"}}
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "rows.parquet")
    tokenizer, told = make_tiny_model().make_tokenizer(), []
    for day in (date(2026, 1, 2), date(2026, 1, 3)):
        tokenizer.chat_template = f"{day.day}{{{{ messages[0]['content'] }}}}="
        told.append(load_prompts([tmp_path / "rows.parquet"], tokenizer, max_prompt=9))
    assert told[0].table["prompt_ids"] != told[1].table["prompt_ids"]
    assert fingerprint(told[0].texts()) == fingerprint(told[1].texts())
