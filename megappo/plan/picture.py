"""A step's timeline as an SVG picture, alone or in an HTML page."""

from __future__ import annotations

import html
from collections.abc import Sequence
from pathlib import Path

from megappo.plan.estimate import Estimate
from megappo.plan.output import write_output
from megappo.plan.text import NAMES, seconds

COLORS = {
    "gen": "#4c78a8",
    "sleep": "#bab0ac",
    "old_log_prob": "#72b7b2",
    "values": "#eeca3b",
    "ref": "#9d755d",
    "reward_model": "#ff9da6",
    "adv": "#b279a2",
    "update_critic": "#f58518",
    "update_actor": "#e45756",
    "wake": "#bab0ac",
    "update_weights": "#54a24b",
}
WIDTH, ROW, LEFT = 960, 34, 90
"""Pixels: of the bars, of a pool, before the bars."""


def write_picture(path: Path, estimate: Estimate, pools: Sequence[str]) -> Path:
    """Write an SVG picture, or a page around it where the name ends in ``.html``."""
    svg = timeline_svg(estimate, pools)
    if path.suffix == ".html":
        svg = f'<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>megappo plan</title>{svg}</html>\n'
    write_output("--out", path, svg)
    return path


def timeline_svg(estimate: Estimate, pools: Sequence[str]) -> str:
    """A row for each pool, a box for each phase with its time as a tooltip, and what the colours mean."""
    scale = WIDTH / max(estimate.seconds, 1e-9)
    used = [name for name in NAMES if any(one.phase == name and one.pool in pools for one in estimate.busy)]
    height = ROW * len(pools) + 50 + 20 * ((len(used) + 2) // 3)
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {LEFT + WIDTH + 20} {height}" '
        'font-family="system-ui, sans-serif" font-size="13">'
    ]
    for at, pool in enumerate(pools):
        top = at * ROW + 6
        out.append(f'<text x="0" y="{top + 17}" fill="currentColor">{html.escape(pool)}</text>')
        out.append(f'<rect x="{LEFT}" y="{top}" width="{WIDTH}" height="{ROW - 10}" fill="#8883" rx="3"/>')
        for one in estimate.busy:
            if one.pool == pool:
                took = one.ended - one.began
                out.append(
                    f'<rect x="{LEFT + one.began * scale:.2f}" y="{top}" width="{max(took * scale, 0.5):.2f}" '
                    f'height="{ROW - 10}" fill="{COLORS[one.phase]}">'
                    f"<title>{NAMES[one.phase]}: {seconds(took)} s</title></rect>"
                )
    axis = ROW * len(pools) + 18
    for part in range(5):
        x, anchor = LEFT + WIDTH * part / 4, "start" if part == 0 else "end" if part == 4 else "middle"
        out.append(
            f'<text x="{x:.0f}" y="{axis}" text-anchor="{anchor}" fill="currentColor" opacity=".7">'
            f"{seconds(estimate.seconds * part / 4) if part else 0} s</text>"
        )
    for at, name in enumerate(used):
        x, y = LEFT + 320 * (at % 3), axis + 24 + 20 * (at // 3)
        out.append(f'<rect x="{x}" y="{y - 10}" width="12" height="12" fill="{COLORS[name]}" rx="2"/>')
        label = f"{NAMES[name]}, {seconds(estimate.phases[name].seconds)} s"
        out.append(f'<text x="{x + 18}" y="{y}" fill="currentColor">{label}</text>')
    return "\n".join([*out, "</svg>"])
