"""Each pool's busy share over the steps of a run, one strip a pool: inline SVG as in ``charts``."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence

from megappo.report.charts import COLORS, WIDTH, mean, svg, ticks

LEFT, RIGHT = 2, 2
TITLE, STRIP, GAP, FOOT = 17, 26, 9, 20  # heights: a strip's name, the strip, the space below it, the steps' numbers
MOST_COLUMNS = 120


def busy_timeline(steps: Sequence[float], shares: Mapping[str, Sequence[float]], *, label: str) -> str:
    """A strip for each pool, filled to its share of busy time at each step. Many steps are averaged in runs.

    shares: pool -> one share (0 to 1) a step; NaN where it is not known.
    """
    known = {name: values for name, values in shares.items() if any(map(math.isfinite, values))}
    if not known:
        return '<p class="nodata">no data</p>'
    run = math.ceil(len(steps) / MOST_COLUMNS)
    starts = range(0, len(steps), run)
    width = (WIDTH - LEFT - RIGHT) / len(starts)
    columns = {name: [mean(values[at : at + run], absent=math.nan) for at in starts] for name, values in known.items()}
    body = []
    for index, (name, values) in enumerate(columns.items()):
        top = index * (TITLE + STRIP + GAP) + TITLE
        body.append(f'<text class="name" x="{LEFT}" y="{top - 5}">{html.escape(name)}</text>')
        whole = f"{mean(known[name], absent=0.0):.0%}"
        body.append(f'<text class="tick" x="{WIDTH - RIGHT}" y="{top - 5}" text-anchor="end">{whole} on average</text>')
        body.append(
            f'<rect class="track" x="{LEFT}" y="{top}" width="{WIDTH - LEFT - RIGHT}" height="{STRIP}" rx="3"/>'
        )
        for column, share in enumerate(values):
            if math.isfinite(share) and share > 0:
                height = STRIP * min(share, 1.0)
                body.append(
                    f'<rect x="{LEFT + column * width:.2f}" y="{top + STRIP - height:.1f}" '
                    f'width="{width + 0.05:.2f}" height="{height:.1f}" fill="var(--c{index % COLORS})"/>'
                )
    height = len(columns) * (TITLE + STRIP + GAP) + FOOT
    body.append(_steps(steps, run, width, height))
    body.extend(_tooltips(steps, run, width, columns))
    return svg("".join(body), label, height)


def _steps(steps: Sequence[float], run: int, width: float, height: int) -> str:
    """Numbers below the strips, each at the middle of its step's column."""
    out = []
    for value in ticks(steps[0], steps[-1], 6):
        if value == round(value):
            column = next(at for at in range(len(steps)) if steps[at] >= value) // run
            x = min(max(LEFT + (column + 0.5) * width, 8.0), WIDTH - 12.0)
            out.append(f'<text class="tick" x="{x:.1f}" y="{height - 6}" text-anchor="middle">{value:g}</text>')
    return "".join(out)


def _tooltips(steps: Sequence[float], run: int, width: float, columns: Mapping[str, Sequence[float]]) -> list[str]:
    """Invisible columns whose titles the browser shows when the pointer rests on them."""
    out = []
    for column, at in enumerate(range(0, len(steps), run)):
        last = steps[min(at + run, len(steps)) - 1]
        title = [f"step {last:g}" if steps[at] == last else f"steps {steps[at]:g} to {last:g} (mean)"]
        shown = [(name, values[column]) for name, values in columns.items()]
        title += [f"{name}: {share:.0%}" if math.isfinite(share) else f"{name}: -" for name, share in shown]
        out.append(
            f'<rect class="hit" x="{LEFT + column * width:.2f}" y="0" width="{width:.2f}" '
            f'height="{len(columns) * (TITLE + STRIP + GAP)}"><title>{html.escape(chr(10).join(title))}</title></rect>'
        )
    return out
