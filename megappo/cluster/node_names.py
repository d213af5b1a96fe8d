"""By what names machines tell which pools they serve."""

from __future__ import annotations

PIN_POOLS = "MEGAPPO_PIN_POOLS"
"""Environment variable: if set, a pool takes only nodes that announce its :func:`pool_resource`."""


def pool_resource(pool: str) -> str:
    """The custom Ray resource by which a node says that it serves a pool."""
    return f"pool_{pool}"


def node_resource(node: str) -> str:
    """The custom Ray resource by which a node tells the name that the scheduler knows it by."""
    return f"node_{node}"
