"""``megappo plan``: what a configuration will take and cost, printed; or the layouts that would be better."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from megappo.config import Config
from megappo.layout.devices import DeviceProfile
from megappo.plan import text
from megappo.plan.estimate import Workload, estimate, full_workload, on_nodes
from megappo.plan.limits import call_problems
from megappo.plan.memory import fit_problems
from megappo.plan.output import OptionError
from megappo.plan.picture import write_picture
from megappo.plan.profile import load_profile
from megappo.plan.sync import sync_lines, weight_sync

ACCURACY = (
    "times: within 20% of what was seen on one H200; what links between devices and nodes add is reckoned from their\n"
    "rates alone; a slow host makes engines slower; rewards, validation and checkpoints are not counted"
)


class DoesNotFit(ValueError):
    """The devices have not the memory; ``problems`` says who needs how much, and the ways out."""

    def __init__(self, problems: tuple[str, ...]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


@dataclass(frozen=True)
class Options:
    """What can be asked for.

    Attributes:
        device: profile, by name or YAML file.
        prompt, response: tokens of a sequence on average; all at their longest unless given.
        search: look for better layouts.
        devices: that the search may use; as many as the pools have unless given.
        out: HTML or SVG file for the timeline.
        write: YAML file for the best layout.
    """

    device: str
    prompt: float | None = None
    response: float | None = None
    search: bool = False
    devices: int | None = None
    out: str | None = None
    write: str | None = None


def plan(config: Config, options: Options, show: Callable[[str], None]) -> None:
    """Print the plan of a configuration, or search.

    Raises:
        OptionError: options that would have no effect, or whose files cannot be written.
        ProfileError: no such device.
        DoesNotFit: naming who needs how much.
        SearchError: no layout fits.
    """
    if wrong := tuple(option_problems(config, options)):
        raise OptionError(*wrong)
    device = on_nodes(config, load_profile(options.device))
    work = workload(config, options)
    if options.search:
        from megappo.plan.choose import search_command

        search_command(config, device, work, options.devices, options.write, show)
        return
    devices = sum(pool.devices for pool in config.pools.values())
    show(f"{devices} x {headline(device)}\n")
    show("\n".join(text.memory_lines(config, device)) + "\n")
    if problems := fit_problems(config, device):
        raise DoesNotFit(problems)
    told, sync = weight_sync(config, device)
    show("weight sync\n" + "\n".join(sync_lines(told)) + "\n")
    found = estimate(config, device, work, sync)
    show("\n".join(text.phase_lines(found, work, devices)) + "\n")
    show("\n".join(text.timeline_lines(found.busy, list(config.pools))) + "\n")
    if config.ppo.staleness:
        strict = estimate(replace(config, ppo=replace(config.ppo, staleness=0)), device, work, sync)
        show("\n".join(text.overlap_lines(config.ppo.staleness, found.seconds, strict.seconds)) + "\n")
    warnings = [f"warning: {problem}" for problem in call_problems(config, device, work, found)]
    show("\n".join([*warnings, ACCURACY, *notes(config)]))
    if options.out:
        show(str(write_picture(Path(options.out), found, list(config.pools))))


def option_problems(config: Config, options: Options) -> Iterator[str]:
    """Options that nothing would come of, one line each, with its fix."""
    if not options.search:
        for name in ("devices", "write"):
            if (value := getattr(options, name)) is not None:
                yield f"--{name} {value}: is for a search: give --search too, or leave it out"
    if options.out is not None:
        if options.search:
            yield f"--out {options.out}: a search draws no timeline: --write the best, and plan that with --out"
        elif Path(options.out).suffix not in (".html", ".svg"):
            yield f"--out {options.out}: is neither .html nor .svg: give a name that ends in one of them"
    for name, most in (("prompt", config.data.max_prompt), ("response", config.data.max_response)):
        value = getattr(options, name)
        if value is not None and not 0 < value <= most:
            yield f"--{name} {value:g}: give more than 0, and at most data.max_{name}, {most}"


def notes(config: Config) -> Iterator[str]:
    """What of the configuration was not reckoned with."""
    if config.run.device == "cpu":
        yield "run.device cpu: planned as if it were cuda"
    if config.run.dtype == "float32":
        yield "run.dtype float32: its products take longer than the bfloat16 ones that are reckoned with"
    if eight := [name for name, role in config.roles.megatron.items() if role.fp8 != "none"]:
        yield f"fp8 of {' and '.join(eight)}: products in 8 bits count as if they were bfloat16"


def workload(config: Config, options: Options) -> Workload:
    """A step's responses, of the lengths that are asked for."""
    full = full_workload(config)
    prompt = full.prompt if options.prompt is None else options.prompt
    response = full.response if options.response is None else options.response
    return replace(full, prompt=prompt, response=response)


def headline(device: DeviceProfile) -> str:
    """A device in a line."""
    return (
        f"{device.name}: {device.memory_gib:g} GiB at {device.memory_gb_s / 1000:g} TB/s, "
        f"{device.matrix_tflops:g} TFLOP/s, {device.node_gb_s:g} GB/s inside a node of {device.devices_per_node}, "
        f"{device.network_gb_s:g} GB/s between nodes, {device.host_gb_s:g} GB/s to the host"
    )
