"""What a benchmark prints and writes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path


class BenchError(RuntimeError):
    """A benchmark that cannot be run here, or whose result is wrong."""


Row = Mapping[str, float | str]


def check_out(out: str | None) -> None:
    """Whether tables can be added to a file, before anything is measured.

    Raises:
        BenchError: they cannot.
    """
    if out is None:
        return
    try:
        with Path(out).open("a+", encoding="utf-8") as file:
            file.seek(0)
            content = file.read()
        if content and not isinstance(json.loads(content), dict):
            raise ValueError("no object")
    except (OSError, ValueError) as error:
        raise BenchError(f"--out {out}: is no JSON file to add a table to ({error}): name another") from None
    if not content:
        Path(out).unlink()


def show(title: str, rows: Sequence[Row], out: str | None) -> None:
    """Print a table, and write it as JSON to ``out`` if given."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    cells = [columns, *([_cell(row.get(name, "")) for name in columns] for row in rows)]
    widths = [max(len(line[at]) for line in cells) for at in range(len(columns))]
    print(title)
    for line in cells:
        print("  " + "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)), flush=True)
    if out:
        path = Path(out)
        kept = json.loads(path.read_text()) if path.is_file() else {}
        path.write_text(json.dumps({**kept, title: [dict(row) for row in rows]}, indent=1))


def _cell(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:,.4g}"
