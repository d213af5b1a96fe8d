"""One role on Megatron, whatever it is for: its sizes against the model and the pool, and products in 8 bits."""

from __future__ import annotations

from collections.abc import Iterator

from megappo.check.findings import Advice, under
from megappo.config import MegatronRoleConfig, PoolConfig, RunConfig
from megappo.layout import legality
from megappo.models.spec import ModelSpec


def size_findings(
    prefix: str, role: MegatronRoleConfig, spec: ModelSpec | None, pool: PoolConfig | None
) -> Iterator[str]:
    """Parallel sizes against the model and the pool, as far as these are known.

    Args:
        prefix: key of the role.
    """
    if spec is not None:
        yield from under(prefix, legality.megatron_model_problems(spec, role.tp, role.pp, role.vpp), ".")
        for line in legality.pipeline_warnings(spec, role.pp, role.vpp):
            yield Advice(f"{prefix}.{line}")
    sizes = legality.megatron_size_problems(role.tp, role.sequence_parallel, role.pp, role.vpp)
    yield from under(prefix, sizes, ".")
    if pool is not None:
        shape = (pool.nodes, pool.devices_per_node)
        yield from under(prefix, legality.megatron_pool_problems(role.tp, role.pp, *shape), ".")
        for line in legality.megatron_pool_warnings(role.tp, *shape):
            yield Advice(f"{prefix}.{line}")


def eight_bit_findings(prefix: str, role: MegatronRoleConfig, spec: ModelSpec | None, run: RunConfig) -> Iterator[str]:
    """What keeps a role that wants it from computing in 8 bits, but for the device."""
    if role.fp8 == "none":
        return
    if run.device == "cpu" or run.dtype != "bfloat16":
        wanted = f"run.device {run.device} and run.dtype {run.dtype}"
        yield f"{prefix}.fp8: {role.fp8} needs CUDA and bfloat16, not {wanted}: set none, or these"
    if spec is not None:
        yield from under(prefix, legality.fp8_problems(spec, role.tp, role.fp8, role.sequence_parallel), ".")
