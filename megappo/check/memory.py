"""Whether everything fits into the devices, and calls into their limit, as far as it can be known without them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from megappo.check.findings import Advice
from megappo.config import Config, Devices, MegatronRoleConfig, SupervisedConfig
from megappo.fit.devices import DeviceTooSmall
from megappo.fit.given import check_scoring_fit, check_training_fit, scoring_roles
from megappo.plan.estimate import estimate, full_workload, on_nodes
from megappo.plan.limits import call_problems
from megappo.plan.memory import empty_devices, fit_problems
from megappo.plan.profile import DeviceProfile, ProfileError, load_profile
from megappo.plan.sync import rough_sync

EIGHT_BITS = {"tensorwise": 8.9, "blockwise": 9.0}
"""The least compute capability for which Transformer Engine has products in 8 bits."""


def fit_findings(config: Config) -> Iterator[str]:
    """What does not fit into devices of ``run.device_profile``, or takes them long; of a configuration without errors.

    It is advice: only the run sees the devices that it gets, and then refuses what does not fit.
    """
    roles = {f"roles.{name}": role for name, role in config.roles.megatron.items()}

    def problems(profile: DeviceProfile) -> Sequence[str]:
        device = on_nodes(config, profile)
        lacks = fit_problems(config, device)
        return (*_eight_bit_problems(roles, device), *lacks, *(() if lacks else _late_calls(config, device)))

    yield from _findings(config, problems)


def training_fit_findings(config: SupervisedConfig, role: str) -> Iterator[str]:
    """The same of training on given responses; of a configuration without errors.

    Args:
        role: "actor", or "reward" for a reward model on pairs.
    """

    def problems(device: DeviceProfile) -> Sequence[str]:
        empty = empty_devices(config, device)[config.role.pool]
        lacks = _lacks(lambda: check_training_fit(config, role, empty))
        return (*_eight_bit_problems({"role": config.role}, device), *lacks)

    yield from _findings(config, problems)


def scoring_fit_findings(config: Config) -> Iterator[str]:
    """The same of scoring given responses, which needs neither engines nor what training does."""
    roles = scoring_roles(config)
    pools = {role.pool for role in roles.values()}

    def problems(profile: DeviceProfile) -> Sequence[str]:
        device = on_nodes(config, profile)
        empty = {name: its for name, its in empty_devices(config, device).items() if name in pools}
        lacks = _lacks(lambda: check_scoring_fit(config, roles, empty))
        return (*_eight_bit_problems({f"roles.{name}": role for name, role in roles.items()}, device), *lacks)

    yield from _findings(config, problems)


def _lacks(check: Callable[[], None]) -> Sequence[str]:
    try:
        check()
    except DeviceTooSmall as error:
        return error.problems
    return ()


def _findings(config: Devices, problems: Callable[[DeviceProfile], Sequence[str]]) -> Iterator[str]:
    if config.run.device != "cuda":
        return
    try:
        device = load_profile(config.run.device_profile)
    except ProfileError as error:
        yield from (f"run.device_profile: {problem}" for problem in error.problems)
        return
    for problem in problems(device):
        yield Advice(f"{problem} (planned for run.device_profile: {config.run.device_profile})")


def _late_calls(config: Config, device: DeviceProfile) -> Iterator[str]:
    work = full_workload(config)
    yield from call_problems(config, device, work, estimate(config, device, work, rough_sync(config, device)))


def _eight_bit_problems(roles: Mapping[str, MegatronRoleConfig], device: DeviceProfile) -> Iterator[str]:
    for key, role in roles.items():
        if device.compute_capability < (needed := EIGHT_BITS.get(role.fp8, 0.0)):
            yield (
                f"{key}.fp8: {role.fp8} needs a device of compute capability {needed}, {device.name} has "
                f"{device.compute_capability:g}: set none"
            )
