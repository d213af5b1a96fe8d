"""What is predicted, against the limits on time that a run sets itself: one call, and the time before a job's end."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import ceil, floor, log10, prod

from megappo.config import TRAINED, Config
from megappo.data.prompt_files import watched_prompts
from megappo.layout.devices import DeviceProfile
from megappo.layout.timeline import SYNC
from megappo.models.lora import is_adapter
from megappo.models.spec import read_model_spec, with_lora
from megappo.plan.estimate import Estimate, Workload, estimate, validation_phase
from megappo.plan.text import NAMES

MARGIN = 2.0
"""Times what is predicted, the least that a limit should be: a call that takes longer is taken for a hang."""
STATE_BYTES = {"bfloat16": 14, "float32": 16}
"""Of a checkpoint, for each parameter: the weight, and what the optimizer keeps of it."""
WRITE_RATE = 2e9
"""Bytes a second that a shared file system is taken to write, from all nodes together."""


def call_problems(config: Config, device: DeviceProfile, work: Workload, step: Estimate) -> Iterator[str]:
    """Whether one call could be taken for a hang by ``run.timeout_s``: a phase of a step, a validation's generation, or
    the writing of a checkpoint.

    Calls that wait for others of the same process have their time when it comes to them.
    """
    step = estimate(config, device, replace(work, rounds=()), step.phases[SYNC])  # of several rounds, each is a call
    calls = {NAMES[name]: phase.seconds for name, phase in step.phases.items() if name in NAMES}
    if prompts := watched_prompts(config.data):
        calls[f"generate, {prompts:,} prompts to validate on"] = validation_phase(config, device, work, prompts).seconds
    size = checkpoint_bytes(config)
    calls[f"write a checkpoint of {size / 1e9:,.0f} GB at {WRITE_RATE / 1e9:g} GB/s"] = size / WRITE_RATE
    name = max(calls, key=calls.__getitem__)
    if config.run.timeout_s < MARGIN * calls[name]:
        yield (
            f"run.timeout_s: {config.run.timeout_s:g} s is less than twice the {calls[name]:.0f} s predicted for "
            f"{name}: give {round_up(MARGIN * calls[name])}"
        )


def checkpoint_bytes(config: Config) -> int:
    """Of one checkpoint: weights and optimizer state of actor and critic."""
    parameters = 0
    for name, role in config.roles.megatron.items():
        if name in TRAINED:
            spec = with_lora(read_model_spec(config.model_folder(name)), role.lora)
            held = [shape for tensor, shape in spec.hf_shapes().items() if spec.lora is None or is_adapter(tensor)]
            parameters += sum(map(prod, held))
    return parameters * STATE_BYTES[config.run.dtype]


def round_up(seconds: float) -> int:
    """A round number of seconds, at least so many: for instance 6868 to 7000."""
    part = max(10 ** floor(log10(seconds)) / 2, 1)
    return ceil(ceil(seconds / part) * part)
