"""Model families, one declarative file each: adding a file here is all that a new family needs."""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache

from megappo.models.families.family import Family

__all__ = ["Family", "known_families"]


@cache
def known_families() -> dict[str, Family]:
    """All families, by the ``model_type`` of their Hugging Face config."""
    modules = (m.name for m in pkgutil.iter_modules(__path__) if m.name != "family")
    found = [importlib.import_module(f"{__name__}.{name}").FAMILY for name in sorted(modules)]
    return {family.model_type: family for family in found}
