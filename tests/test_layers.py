"""The layers of README.md: each imports only from those above it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def listed() -> dict[str, int]:
    """Line of each layer in the list."""
    block = re.search(r"## How it works\n\n```\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert block is not None
    lines = [re.split(r"\s{2,}", line)[0].split(", ") for line in block[1].splitlines()]
    return {name: at for at, names in enumerate(lines) for name in names}


def imports() -> Iterator[tuple[str, str, str]]:
    """(file, its layer, a layer that it imports from, also inside a function)."""
    for path in sorted((ROOT / "megappo").rglob("*.py")):
        file = path.relative_to(ROOT / "megappo")
        for node in ast.walk(ast.parse(path.read_text())):
            modules = (
                [f"{node.module}.{alias.name}" for alias in node.names] if isinstance(node, ast.ImportFrom) else []
            )
            modules += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            for module in modules:
                package, _, rest = module.partition(".")
                if package == "megappo" and rest:
                    yield str(file), file.parts[0].removesuffix(".py"), rest.split(".")[0]


def test_each_layer_imports_only_from_those_above_it() -> None:
    layers, found = listed(), list(imports())
    assert all((ROOT / "megappo" / name).is_dir() or (ROOT / "megappo" / f"{name}.py").is_file() for name in layers)
    assert len(found) > 1000
    wrong = [
        f"{file} imports {other}"
        for file, layer, other in found
        if layer not in (other, "__main__") and layers.get(other, -1) > layers.get(layer, -1)
    ]
    assert not wrong
