"""Whether a run that goes on has the data that it began with: its place in them is a number, which says nothing."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

from megappo.data.prompts import DataError


def fingerprint(texts: Iterable[str]) -> str:
    """The number of texts, and a digest of them in their order, for people too."""
    digest, rows = hashlib.sha256(), 0
    for text in texts:
        encoded = text.encode()
        digest.update(len(encoded).to_bytes(8, "little") + encoded)
        rows += 1
    return f"{rows:,} rows, sha256 {digest.hexdigest()[:16]}"


def require_same(before: str | None, now: str, run: Path) -> None:
    """Refuse to go on with other data.

    Args:
        before: the fingerprint of what a checkpoint's run trained on; None where the checkpoint has none.
        now: that of what its files hold now.
        run: its folder.

    Raises:
        DataError: they differ.
    """
    if before not in (None, now):
        raise DataError(
            f"data.train: its files hold {now}, while the run in {run} began with {before}, and its place in those "
            "means nothing in these: bring them back (or the tokenizer, by which long ones are left out), or choose "
            "another run.dir"
        )
