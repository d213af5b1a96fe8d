"""Low-rank adapters: who may have them, and whether the model has what they are asked for."""

from __future__ import annotations

from collections.abc import Iterator

from megappo.check.findings import under
from megappo.config import MegatronRoleConfig
from megappo.models.spec import ModelError, ModelSpec, with_lora


def lora_findings(prefix: str, role: MegatronRoleConfig, spec: ModelSpec | None, *, trains: bool) -> Iterator[str]:
    """What is wrong with a role's adapters.

    Args:
        prefix: key of the role.
        trains: whether it ever does.
    """
    if role.lora is None:
        return
    if not trains:
        yield f"{prefix}.lora: nothing trains here: leave it out"
    if role.fp8 != "none":
        yield f"{prefix}.fp8: {role.fp8} is not supported with {prefix}.lora: set none, or train all weights"
    if spec is not None:
        try:
            with_lora(spec, role.lora)
        except ModelError as error:
            yield from under(f"{prefix}.lora", error.problems, ".")
