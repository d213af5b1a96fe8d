"""A plan as text for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from megappo.config import Config
from megappo.fit.devices import role_layout
from megappo.fit.host import host_bytes
from megappo.layout.devices import DeviceProfile
from megappo.layout.memory import GIB
from megappo.layout.timeline import Busy, Phase, busy_share
from megappo.plan.estimate import Estimate, Workload
from megappo.plan.memory import engine_share, peaks, role_stages

NAMES = {
    "gen": "generate",
    "sleep": "engines to sleep",
    "old_log_prob": "log-probabilities, actor",
    "values": "values, critic",
    "ref": "log-probabilities, reference",
    "reward_model": "scores, reward model",
    "adv": "advantages",
    "update_critic": "update critic",
    "update_actor": "update actor",
    "wake": "engines wake",
    "update_weights": "weight sync",
}
LETTERS = {
    "gen": "G",
    "sleep": "z",
    "old_log_prob": "l",
    "values": "v",
    "ref": "r",
    "reward_model": "m",
    "update_critic": "C",
    "update_actor": "A",
    "wake": "z",
    "update_weights": "W",
}
WIDTH = 64
"""Characters of the timeline."""


def table(rows: Sequence[Sequence[str]], left: int = 1) -> Iterator[str]:
    """Columns as wide as they must be, the first ``left`` of them flush left, the others flush right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        cells = (
            cell.ljust(width) if column < left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        yield "  ".join(cells).rstrip()


def memory_lines(config: Config, device: DeviceProfile) -> Iterator[str]:
    """Every role by stage, the engines, each pool's peak against the device, and the host's share."""
    parts = ("weights", "gradients", "optimizer", "activations", "backward", "scoring")
    rows: list[tuple[str, ...]] = [("role", "pool", "layout", "stage", *parts)]
    for stage in role_stages(config):
        layout = role_layout(config, stage.role)
        sizes = (_gib(getattr(stage.memory, part)) for part in parts)
        pool = config.roles.megatron[stage.role].pool
        rows.append((stage.role, pool, layout.describe(), stage.name, *sizes))
    yield "memory, GiB on each device"
    yield from table(rows, left=4)
    rollout, engine = config.roles.rollout, engine_share(config, device)
    engines = config.pools[rollout.pool].devices // rollout.tp
    longest = config.data.max_prompt + config.data.max_response
    yield ""
    yield (
        f"rollout in {rollout.pool}: {count(engines, 'engine')} of tp{rollout.tp}, {rollout.memory_fraction:.0%} of a "
        f"device: weights {_gib(engine.memory.weights)}, forward pass and sampler {_gib(engine.memory.working)}, "
        f"libraries {_gib(engine.memory.overhead)}, keys and values {_gib(engine.cache)}"
    )
    enough = "all" if engine.sequences >= rollout.max_sequences else "fewer than"
    wanted = f"{enough} the {rollout.max_sequences:,} wanted"
    yield f"  room for {engine.sequences:,} full sequences of {longest:,} tokens, {wanted}"
    yield ""
    rows = [("pool", "devices", "peak GiB", f"of {_gib(device.memory)}", "when")]
    for peak in peaks(config, device):
        share = peak.turn.need / device.memory
        bar = "#" * min(round(share * 20), 20)
        who = ", ".join(
            f"{name} {_gib(sum(use.values()))}"
            for name, use in sorted(peak.turn.uses.items(), key=lambda item: -sum(item[1].values()))
            if use
        )
        devices = str(config.pools[peak.pool].devices)
        rows.append(
            (peak.pool, devices, _gib(peak.turn.need), f"{share:4.0%} {bar:.<20}", f"{peak.turn.doing} ({who})")
        )
    width = max(len(row[4]) for row in rows)
    yield from table([(*row[:4], row[4].ljust(width)) for row in rows])
    for name, size in host_bytes(config).items():
        there = f", which has {device.host_memory_gib:.1f}" if device.host_memory_gib else ""
        yield f"host memory for what is offloaded and saved: {_gib(size)} GiB on each node of {name}{there}"


def phase_lines(estimate: Estimate, work: Workload, devices: int) -> Iterator[str]:
    """Each phase with what binds it, and the step."""
    yield (f"one step: {work.sequences:,} responses, {work.prompt:,.0f} + {work.response:,.0f} tokens each")
    rows = [("phase", "seconds", "of step", "bound by")]
    for name, text in NAMES.items():
        phase = estimate.phases.get(name)
        if phase is not None and phase.seconds:
            share = f"{phase.seconds / estimate.seconds:.0%}"
            rows.append((text, seconds(phase.seconds), share, bound_by(phase)))
    rate = work.tokens / estimate.seconds / devices
    rows.append(("step", seconds(estimate.seconds), "", f"{rate:,.0f} tokens a second and device"))
    width = max(len(row[3]) for row in rows)
    yield from table([(*row[:3], row[3].ljust(width)) for row in rows])


def bound_by(phase: Phase) -> str:
    """Its largest parts, with their shares."""
    parts = sorted(phase.parts.items(), key=lambda item: -item[1])
    shares = [(name, part / phase.seconds) for name, part in parts[:3]]
    large = [f"{name} {share:.0%}" for name, share in shares if share >= 0.15]
    return ", ".join(large) if len(parts) > 1 else parts[0][0]


def timeline_lines(busy: Sequence[Busy], pools: Sequence[str]) -> Iterator[str]:
    """A bar for each pool: a letter where it works, a dot where it idles."""
    end = max((one.ended for one in busy), default=0.0)
    if not end:
        return
    label = max(map(len, ("pool", *pools)))
    yield f"{'pool':{label}}  0{f'{seconds(end)} s':>{WIDTH - 1}}  busy"
    for pool in pools:
        row = ["."] * WIDTH
        for one in busy:
            if one.pool == pool:
                first = min(int(one.began / end * WIDTH), WIDTH - 1)
                last = max(min(round(one.ended / end * WIDTH), WIDTH), first + 1)
                row[first:last] = LETTERS[one.phase] * (last - first)
        yield f"{pool:{label}}  {''.join(row)}  {busy_share(busy, pool):4.0%}"
    used = {one.phase for one in busy}
    meaning: dict[str, list[str]] = {}
    for phase, letter in LETTERS.items():
        if phase in used:
            meaning.setdefault(letter, []).append(NAMES[phase])
    yield "; ".join(f"{letter} {', '.join(names)}" for letter, names in meaning.items()) + "; . idle"


def overlap_lines(staleness: int, overlapped_s: float, strict_s: float) -> Iterator[str]:
    """What it saves that engines generate while others work."""
    what = "the next batch generates" if staleness == 1 else f"up to {staleness} batches ahead generate"
    yield (
        f"ppo.staleness {staleness}: {what} while this one trains: {seconds(overlapped_s)} s a step instead of "
        f"{seconds(strict_s)} one after the other ({overlapped_s / strict_s - 1:+.0%})"
    )


def seconds(value: float) -> str:
    """Three digits or so."""
    digits = 0 if value >= 100 else 1 if value >= 10 else 2 if value >= 0.1 else 4
    return f"{value:.{digits}f}"


def count(number: int, noun: str) -> str:
    """For instance ``1 device`` or ``2 devices``."""
    return f"{number:,} {noun}" + "s" * (number != 1)


def _gib(size: float) -> str:
    return f"{size / GIB:.1f}" if size else "-"
