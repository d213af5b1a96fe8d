"""``megappo plan --search``: the best layouts, with reasons."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from megappo.config import Config, dump_config
from megappo.fit.devices import role_layout
from megappo.layout.devices import DeviceProfile
from megappo.layout.timeline import STEP, busy_share
from megappo.plan import text
from megappo.plan.estimate import Estimate, Workload, estimate
from megappo.plan.memory import fit_problems, peaks
from megappo.plan.output import write_output
from megappo.plan.search import Found, SearchError, search
from megappo.plan.sync import rough_sync, weight_sync

SHOWN = 5


def search_command(
    config: Config,
    device: DeviceProfile,
    work: Workload,
    devices: int | None,
    write: str | None,
    show: Callable[[str], None],
) -> None:
    """Search, print the best, and write the very best if wanted.

    Raises:
        SearchError: nothing fits, or ``write`` is there already.
    """
    if write and Path(write).exists():
        raise SearchError(f"--write {write}: is there already: give another name")
    total = sum(pool.devices for pool in config.pools.values()) if devices is None else devices
    if total < 1:
        raise SearchError(f"--devices {total}: give a number of at least 1")
    ranking = search(config, device, work, total, device.devices_per_node)
    show(
        f"{text.count(ranking.placements, 'placement')} on {total} x {device.name}, "
        f"{ranking.layouts:,} layouts of roles looked at; {text.count(len(ranking.best), 'way')} to share pools "
        "fit, the best of each\n"
    )
    best = ranking.best[0]
    _, sync = weight_sync(best.config, device)
    best = replace(best, estimate=estimate(best.config, device, work, sync))
    for number, found in enumerate((best, *ranking.best[1:SHOWN]), 1):
        show("\n".join(_lines(number, found, best, device)) + "\n")
    show("\n".join(_yours(config, device, work, total, best)))
    if write:
        write_output("--write", Path(write), dump_config(best.config))
        show(f"written: {write}")


def _lines(number: int, found: Found, best: Found, device: DeviceProfile) -> Iterator[str]:
    config, step = found.config, found.estimate
    slower = "" if found is best else f", {step.seconds / best.estimate.seconds - 1:+.0%}"
    yield f"{number}. {text.seconds(step.seconds)} s a step{slower}: {_reason(found, best)}"
    fullest = {peak.pool: peak.turn.need / device.memory for peak in peaks(config, device)}
    for pool, its in config.pools.items():
        busy, full = busy_share(step.busy, pool), fullest.get(pool, 0.0)
        yield f"   {pool}: {text.count(its.devices, 'device')}, busy {busy:.0%}, memory {full:.0%}"
        yield from text.table([(f"     {who}", layout, how) for who, layout, how in _tenants(config, pool)], left=3)


def _tenants(config: Config, pool: str) -> Iterator[tuple[str, str, str]]:
    """Each role of a pool: its name, its layout, and what is unusual."""
    for name, role in config.roles.megatron.items():
        if role.pool == pool:
            how = [f"micro-batches of {role.micro_batch_tokens:,} tokens"] * (role.pp > 1)
            how += [f"recompute {role.recompute}"] * (role.recompute != "none")
            how += [f"offload {role.offload}"] * (role.offload != "none")
            yield name, role_layout(config, name).describe(), ", ".join(how)
    rollout = config.roles.rollout
    if rollout.pool == pool:
        engines = text.count(config.pools[pool].devices // rollout.tp, "engine")
        shared = any(role.pool == pool for role in config.roles.megatron.values())
        rest = f", sleep {rollout.sleep}" if shared else ""
        yield "rollout", f"{engines} of tp{rollout.tp}", f"memory_fraction {rollout.memory_fraction:g}{rest}"


def _groups(step: Estimate) -> dict[str, float]:
    """Seconds of a step's lines, by the phase that takes most of each."""
    names = {0: "generating", 2: "scoring", 4: "updating"}
    out = dict.fromkeys((*names.values(), "the rest"), 0.0)
    for at, line in enumerate(STEP):
        ends = [one.ended for one in step.busy if one.phase in line]
        begins = [one.began for one in step.busy if one.phase in line]
        if ends:
            out[names.get(at, "the rest")] += max(ends) - min(begins)
    return out


def _reason(found: Found, best: Found) -> str:
    """Where its time goes, and for all but the best, where it loses most."""
    own, first = _groups(found.estimate), _groups(best.estimate)
    spent = ", ".join(f"{name} {text.seconds(seconds)}" for name, seconds in own.items() if seconds)
    if found is best:
        name, phase = max(found.estimate.phases.items(), key=lambda item: item[1].seconds)
        return f"{spent}; longest: {text.NAMES[name]}, bound by {phase.binds}"
    worst = max(own, key=lambda name: own[name] - first[name])
    return f"{spent}; loses most in {worst} ({own[worst] - first[worst]:+.1f} s)"


def _yours(config: Config, device: DeviceProfile, work: Workload, total: int, best: Found) -> Iterator[str]:
    own = sum(pool.devices for pool in config.pools.values())
    if fit_problems(config, device):
        yield f"the configuration as it is, on {text.count(own, 'device')}, does not fit"
        return
    step = estimate(config, device, work, rough_sync(config, device))
    change = f"{step.seconds / best.estimate.seconds:.2f} times the best" if own == total else "on other devices"
    yield f"the configuration as it is, on {text.count(own, 'device')}: {text.seconds(step.seconds)} s a step, {change}"
