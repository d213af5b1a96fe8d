"""Environments made of metadata alone."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

GPU = {
    "torch": "2.11.0+cu130",
    "transformer-engine": "2.11.0",
    "megatron-core": "0.16.1",
    "vllm": "0.26.0",
    "ray": "2.60.0",
}
"""The GPU stack, in versions that work together."""


def install(folder: Path, packages: Mapping[str, str]) -> None:
    """Leave what pip leaves of packages, without the packages."""
    for name, version in packages.items():
        info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
