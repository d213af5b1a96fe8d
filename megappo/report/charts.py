"""Charts as inline SVG text, drawn without any library: lines over steps, and stacked bars.

Colours are CSS variables of the page (--c0 ... --c10, --axis, --grid), so that light and dark mode share one drawing.
Values that are not finite are gaps; a point without neighbours is drawn as a dot. The exact values show as the
browser's own tooltips.
"""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

WIDTH, HEIGHT = 440, 220
LEFT, RIGHT, TOP, BOTTOM = 50, 10, 10, 24  # the margins around the plot
COLORS = 11
MOST_POINTS = 400  # a line has more points than the screen has columns beyond this: then runs of points are averaged
MOST_TOOLTIPS = 120
MOST_BARS = 100
DOTS_UP_TO = 12  # lines of few points have each point marked


class Series(NamedTuple):
    name: str
    points: Sequence[tuple[float, float]]
    """(step, value) in step order; values may be NaN."""
    dashed: bool = False
    """Drawn in the colour of the line before it: what that was predicted to be."""


class _Scale(NamedTuple):
    """Data to SVG coordinates."""

    x_low: float
    x_high: float
    y_low: float
    y_high: float

    def x(self, value: float) -> float:
        return LEFT + (value - self.x_low) / (self.x_high - self.x_low) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - (value - self.y_low) / (self.y_high - self.y_low) * (HEIGHT - TOP - BOTTOM)


def line_chart(series: Sequence[Series], *, label: str, y_range: tuple[float, float] | None = None) -> str:
    """Lines over steps as one <svg>. label: for screen readers. y_range: at least this much of the axis is shown.

    Without any finite value the text "no data" stands in for the chart.
    """
    drawn = [_thin(line) for line in series]
    finite = [point for line in drawn for point in line.points if math.isfinite(point[1])]
    if not finite:
        return '<p class="nodata">no data</p>'
    y_values = [y for _, y in finite] + list(y_range or ())
    scale = _scale([x for x, _ in finite], y_values)
    body = [_axes(scale)]
    body.extend(_line(line, scale, color) for line, color in zip(drawn, _colors(series), strict=True))
    body.append(_line_tooltips(series, scale))
    return svg("".join(body), label) + _line_legend(series)


def stacked_bars(
    steps: Sequence[float], parts: Mapping[str, Sequence[float]], total: Sequence[float], *, label: str
) -> str:
    """One bar a step, stacked from `parts` (name -> one value a step; NaN counts as none), and a line for `total`.

    Where a bar stands above the line, its parts ran at the same time. Many steps are averaged in runs.
    """
    count = len(steps)
    if count == 0 or not any(math.isfinite(value) for values in (total, *parts.values()) for value in values):
        return '<p class="nodata">no data</p>'
    run = math.ceil(count / MOST_BARS)
    starts = range(0, count, run)
    bars = {name: [mean(values[at : at + run], absent=0.0) for at in starts] for name, values in parts.items()}
    totals = [mean(total[at : at + run], absent=math.nan) for at in starts]
    heights = [sum(values[i] for values in bars.values()) for i in range(len(totals))]
    top = max([*heights, *filter(math.isfinite, totals)]) or 1.0
    scale = _scale([steps[0] - 0.5, steps[-1] + 0.5], [0.0, top], pad_x=False)
    body = [_axes(scale)]
    slot = (WIDTH - LEFT - RIGHT) / len(totals)
    gap = min(2.0, slot * 0.15)
    line = []
    for i in range(len(totals)):
        x, base = LEFT + i * slot, 0.0
        first, last = steps[i * run], steps[min((i + 1) * run, count) - 1]
        tip = [f"step {first:g}" if first == last else f"steps {first:g} to {last:g} (mean)"]
        rectangles = []
        for index, (name, values) in enumerate(bars.items()):
            if values[i] > 0:
                y_top = scale.y(base + values[i])
                rectangles.append(
                    f'<rect x="{x + gap / 2:.1f}" y="{y_top:.1f}" width="{slot - gap:.1f}"'
                    f' height="{scale.y(base) - y_top:.1f}" fill="var(--c{index % COLORS})"/>'
                )
                tip.append(f"{name}: {number(values[i])} s")
                base += values[i]
        if math.isfinite(totals[i]):
            tip.append(f"whole step: {number(totals[i])} s")
            line.append(f"{x:.1f},{scale.y(totals[i]):.1f} {x + slot:.1f},{scale.y(totals[i]):.1f}")
        body.append(f"<g>{''.join(rectangles)}<title>{html.escape(chr(10).join(tip))}</title></g>")
    if line:
        body.append(f'<polyline class="total" points="{" ".join(line)}"/>')
    return svg("".join(body), label) + _legend(list(bars), extra="whole step" if line else None)


def number(value: float) -> str:
    """A short text of about three digits: 0.0123, 1.23, 123, 12k, 3.4e-07."""
    size = abs(value)
    if not math.isfinite(value):
        return "-"
    if size >= 1e6 or 0 < size < 1e-4:
        return f"{value:.3g}"
    if size >= 1e4:
        return f"{value / 1000:.4g}k"
    return f"{value:.4g}" if size >= 100 else f"{value:.3g}"


def ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Round values (1, 2 or 5 times a power of ten apart) in [low, high], at most `most` + 1 of them."""
    if not high > low:
        return [low]
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    spacing = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))
    first, last = math.ceil(low / spacing - 1e-9), math.floor(high / spacing + 1e-9)
    return [index * spacing for index in range(first, last + 1)]


def _scale(xs: Sequence[float], ys: Sequence[float], pad_x: bool = True) -> _Scale:
    x_low, x_high, y_low, y_high = min(xs), max(xs), min(ys), max(ys)
    if x_low == x_high and pad_x:
        x_low, x_high = x_low - 1, x_high + 1
    if y_low == y_high == 0:  # shares and counts are zero at first, and never below it
        y_high = 1.0
    elif y_low == y_high:
        room = abs(y_low) * 0.1
        y_low, y_high = y_low - room, y_high + room
    else:  # a little air, but none below a zero that bounds the data
        room = (y_high - y_low) * 0.05
        y_low, y_high = (y_low if y_low == 0 else y_low - room), y_high + room
    return _Scale(x_low, x_high, y_low, y_high)


def _axes(scale: _Scale) -> str:
    out = []
    values = ticks(scale.y_low, scale.y_high, 5)
    for value, text in zip(values, _tick_texts(values), strict=True):
        y = scale.y(value)
        out.append(f'<line class="rule" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        out.append(f'<text class="tick" x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{text}</text>')
    for value in ticks(scale.x_low, scale.x_high, 6):
        if value >= 0 and value == round(value):  # there is no half step
            x = scale.x(value)
            out.append(f'<text class="tick" x="{x:.1f}" y="{HEIGHT - 7}" text-anchor="middle">{number(value)}</text>')
    base = HEIGHT - BOTTOM
    out.append(f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{base}" y2="{base}"/>')
    return "".join(out)


def _tick_texts(values: Sequence[float]) -> list[str]:
    """Short, but no two alike: 0.999, 0.9995 where three digits would not tell them apart."""
    texts = [number(value) for value in values]
    if len(set(texts)) == len(texts):
        return texts
    decimals = max(0, math.ceil(-math.log10(values[1] - values[0]) - 1e-9))
    return [f"{value:.{decimals}f}" for value in values]


def _colors(series: Sequence[Series]) -> list[str]:
    whole, out = -1, []
    for line in series:
        whole += not line.dashed
        out.append(f"var(--c{max(whole, 0) % COLORS})")
    return out


def _line(line: Series, scale: _Scale, color: str) -> str:
    """The stretches of finite values as polylines, lonely points as dots."""
    stretches: list[list[tuple[float, float]]] = [[]]
    for x, y in line.points:
        if math.isfinite(y):
            stretches[-1].append((scale.x(x), scale.y(y)))
        elif stretches[-1]:
            stretches.append([])
    few = len(line.points) <= DOTS_UP_TO
    out = []
    for stretch in stretches:
        if len(stretch) > 1:
            points = " ".join(f"{x:.1f},{y:.1f}" for x, y in stretch)
            dashes = ' stroke-dasharray="5 4"' if line.dashed else ""
            out.append(f'<polyline class="line" stroke="{color}"{dashes} points="{points}"/>')
        if few or len(stretch) == 1:
            out.extend(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{color}"/>' for x, y in stretch)
    return "".join(out)


def _line_tooltips(series: Sequence[Series], scale: _Scale) -> str:
    """Invisible columns, one a step, whose titles the browser shows when the pointer rests on them."""
    at_step: dict[float, list[str]] = {}
    for line in series:
        for x, y in line.points:
            at_step.setdefault(x, []).append(f"{line.name}: {number(y)}")
    steps = sorted(step for step in at_step if scale.x_low <= step <= scale.x_high)
    steps = steps[:: math.ceil(len(steps) / MOST_TOOLTIPS)]
    centers = [scale.x(step) for step in steps]
    out = []
    for i, step in enumerate(steps):
        left = LEFT if i == 0 else (centers[i - 1] + centers[i]) / 2
        right = WIDTH - RIGHT if i == len(steps) - 1 else (centers[i] + centers[i + 1]) / 2
        title = html.escape("\n".join([f"step {step:g}", *at_step[step]]))
        out.append(
            f'<rect class="hit" x="{left:.1f}" y="{TOP}" width="{max(0.0, right - left):.1f}"'
            f' height="{HEIGHT - TOP - BOTTOM}"><title>{title}</title></rect>'
        )
    return "".join(out)


def _thin(line: Series) -> Series:
    """At most MOST_POINTS points: means over runs of equal length, so that no spike decides how a stretch looks."""
    run = math.ceil(len(line.points) / MOST_POINTS)
    if run <= 1:
        return line
    runs = [line.points[at : at + run] for at in range(0, len(line.points), run)]
    return line._replace(points=[(run_[-1][0], mean([y for _, y in run_], absent=math.nan)) for run_ in runs])


def mean(values: Sequence[float], absent: float) -> float:
    """Of the finite values; ``absent`` where there are none."""
    finite = [value for value in values if math.isfinite(value)]
    return sum(finite) / len(finite) if finite else absent


def svg(body: str, label: str, height: int = HEIGHT) -> str:
    """The element of a drawing that is WIDTH units wide. label: for screen readers."""
    return f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{html.escape(label)}">{body}</svg>'


def _line_legend(series: Sequence[Series]) -> str:
    """What the colours mean; nothing for a single line, which the chart's title already names."""
    items = []
    for line, color in zip(series, _colors(series), strict=True):
        css = ' class="dashed"' if line.dashed else ""
        items.append(f'<span><i{css} style="--color:{color}"></i>{html.escape(line.name)}</span>')
    return f'<div class="legend">{"".join(items)}</div>' if len(items) > 1 else ""


def _legend(names: Sequence[str], extra: str | None) -> str:
    """What the parts of a bar are, and its line."""
    items = [
        f'<span><i style="--color:var(--c{index % COLORS})"></i>{html.escape(name)}</span>'
        for index, name in enumerate(names)
    ]
    if extra is not None:
        items.append(f'<span><i class="total"></i>{html.escape(extra)}</span>')
    return f'<div class="legend">{"".join(items)}</div>'
