"""What a run reads and writes, looked at from outside: model folders, prompt files, reward functions, the run folder.

Only file names, headers and schemas are read, so that a check of large files is quick; no user code runs.
Every rule yields messages of the form ``what, why: fix``.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from megappo.reward_reference import parse_reference

VOCABULARIES = ("vocab.json", "vocab.txt", "tokenizer.model", "spiece.model")
COLUMNS = ("data_source", "prompt", "reward_model")
"""The columns of verl's prompt files that a run needs; ``ability`` and ``extra_info`` may be absent."""


# ---- Model folders -------------------------------------------------------------------------------------------------


def tokenizer_problems(folder: Path) -> Iterator[str]:
    """Whether a folder has what a fast or slow tokenizer is made from."""
    if (folder / "tokenizer.json").is_file():
        return
    if not (folder / "tokenizer_config.json").is_file():
        yield f"{folder}: has no tokenizer: add tokenizer.json, or tokenizer_config.json and its vocabulary"
    elif not any((folder / name).is_file() for name in VOCABULARIES):
        yield f"{folder}: its tokenizer has no vocabulary: add tokenizer.json or one of {', '.join(VOCABULARIES)}"


def has_chat_template(folder: Path) -> bool:
    """Whether the folder's tokenizer knows how to write chat messages."""
    if (folder / "chat_template.jinja").is_file() or (folder / "chat_template.json").is_file():
        return True
    try:
        return bool(json.loads((folder / "tokenizer_config.json").read_text()).get("chat_template"))
    except (OSError, ValueError, AttributeError):
        return False


def weight_problems(folder: Path, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[str]:
    """Whether a folder's safetensors files are whole and hold tensors of these names and shapes."""
    try:
        files = _weight_files(folder)
        tensors: dict[str, tuple[int, ...]] = {}
        for path in files:
            tensors.update(_safetensors_shapes(path))
    except ValueError as error:
        yield str(error)
        return
    missing = [name for name in shapes if name not in tensors]
    if missing:
        yield f"{folder}: its weights lack {_first(missing)}: give the config.json that the weights belong to"
    for name, shape in shapes.items():
        if tensors.get(name, shape) != shape:
            yield (
                f"{folder}: {name} has shape {list(tensors[name])} where config.json asks for {list(shape)}: "
                "give the config.json that the weights belong to"
            )
            return  # one wrong size shows in every layer


def _weight_files(folder: Path) -> list[Path]:
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file():
        return [single]
    if not index.is_file():
        raise ValueError(
            f"{folder}: has no weights: add model.safetensors, or model.safetensors.index.json and its shards"
        )
    try:
        shards = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        raise ValueError(f"{index}: is no index of safetensors shards: write or download it again") from None
    missing = [shard for shard in shards if not (folder / shard).is_file()]
    if missing:
        raise ValueError(f"{folder}: lacks {len(missing)} of {len(shards)} weight shards, {_first(missing)}: add them")
    return [folder / shard for shard in shards]


def _safetensors_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Names and shapes from a header: 8 bytes of length, JSON, then exactly the bytes that the JSON accounts for."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            size = path.stat().st_size
            if 8 + length > size:
                raise ValueError
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        if size != 8 + length + max((entry["data_offsets"][1] for entry in header.values()), default=0):
            raise ValueError
        return {name: tuple(entry["shape"]) for name, entry in header.items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        raise ValueError(f"{path}: is truncated or no safetensors file: write or download it again") from None


# ---- Prompt files --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PromptFile:
    """What a prompt file's footer says: how many rows, and whether prompts are chat messages."""

    rows: int
    chat: bool


def read_prompt_file(path: Path) -> PromptFile:
    """Read a parquet file's footer.

    Raises:
        ValueError: the file is missing, truncated, empty, or lacks a column.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    if not path.exists():
        raise ValueError(f"{path}: no such file: give the path of a parquet file")
    if not path.is_file():
        raise ValueError(f"{path}: is a folder: name the parquet files in it")
    try:
        with pq.ParquetFile(path) as file:
            schema, rows = file.schema_arrow, file.metadata.num_rows
    except (pa.ArrowException, OSError):
        raise ValueError(f"{path}: is truncated or no parquet file: write it again") from None
    missing = [name for name in COLUMNS if name not in schema.names]
    if missing:
        raise ValueError(
            f"{path}: has no column {', '.join(missing)}: it has {', '.join(schema.names) or 'none'}, "
            f"and needs {', '.join(COLUMNS)}"
        )
    reward_model = schema.field("reward_model").type
    if not pa.types.is_struct(reward_model) or reward_model.get_field_index("ground_truth") < 0:
        raise ValueError(f"{path}: reward_model is {reward_model}: it must be a struct with ground_truth")
    if rows == 0:
        raise ValueError(f"{path}: has no rows: give a file with at least one prompt")
    prompt = schema.field("prompt").type
    return PromptFile(rows, chat=pa.types.is_list(prompt) or pa.types.is_large_list(prompt))


def rows_in(path: Path) -> int:
    """Rows of a prompt file; 0 if it cannot be used."""
    try:
        return read_prompt_file(path).rows
    except ValueError:
        return 0


def data_sources(path: Path) -> set[str]:
    """The values of a prompt file's ``data_source`` column; none if the file cannot be read."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return set(pq.read_table(path, columns=["data_source"])["data_source"].unique().to_pylist())
    except (pa.ArrowException, OSError, KeyError):
        return set()


# ---- Reward functions ----------------------------------------------------------------------------------------------


def reward_problems(function: str) -> Iterator[str]:
    """Whether ``package.module[:name]`` or ``file.py[:name]`` exists and defines the name; nothing is imported."""
    target, name, is_file = parse_reference(function)
    if is_file:
        path: Path | None = Path(target)
        if not Path(target).is_file():
            yield f"{function}: there is no file {target}: give file.py:name or package.module:name"
            return
    else:
        try:
            path = _module_file(target)
        except LookupError as error:
            yield f"{function}: {error}: give package.module:name or file.py:name"
            return
    if path is None or path.suffix != ".py":  # compiled: its names cannot be read
        return
    try:
        names = set(_defined(ast.parse(path.read_bytes()).body))
    except (SyntaxError, ValueError, OSError) as error:
        where = f", line {error.lineno}" if isinstance(error, SyntaxError) else ""
        yield f"{function}: {path}{where} is not valid Python: fix it"
        return
    if name not in names and "*" not in names:
        public = sorted(known for known in names if not known.startswith("_"))
        yield f"{function}: {path} does not define {name}: it defines {', '.join(public) or 'nothing'}"


def reward_takes(function: str, argument: str) -> bool:
    """Whether the definition of a reward function has such an argument; false where it cannot be read."""
    target, name, is_file = parse_reference(function)
    try:
        path = Path(target) if is_file else _module_file(target)
        body = ast.parse(path.read_bytes()).body if path is not None else []
    except (LookupError, SyntaxError, ValueError, OSError):
        return False
    found = [node.args for node in body if isinstance(node, ast.FunctionDef) and node.name == name]
    return any(argument == each.arg for arguments in found for each in (*arguments.args, *arguments.kwonlyargs))


def _module_file(dotted: str) -> Path | None:
    """The file of a module, found without importing its packages (as ``importlib.util.find_spec`` would)."""
    top, *rest = dotted.split(".")
    try:
        spec = importlib.util.find_spec(top) if top else None
    except ValueError:  # a module without a spec, such as __main__
        spec = None
    if spec is None:
        raise LookupError(f"there is no module {top!r} on the Python path")
    for depth, part in enumerate(rest, 1):
        parent = ".".join([top, *rest[: depth - 1]])
        if spec.submodule_search_locations is None:
            raise LookupError(f"module {parent} is no package")
        spec = PathFinder.find_spec(part, list(spec.submodule_search_locations))
        if spec is None:
            raise LookupError(f"package {parent} has no module {part!r}")
    if spec.origin is None:
        raise LookupError(f"{dotted} is a folder without __init__.py")
    return Path(spec.origin)


def _defined(body: list[ast.stmt]) -> Iterator[str]:
    """Names that a module's statements bind at its top level; ``*`` for a star import."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from (alias.asname or alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from (part.id for target in targets for part in ast.walk(target) if isinstance(part, ast.Name))
        elif isinstance(node, ast.If | ast.Try | ast.With):
            for block in ("body", "orelse", "finalbody"):
                yield from _defined(getattr(node, block, []))
            for handler in getattr(node, "handlers", []):
                yield from _defined(handler.body)


# ---- The run folder ------------------------------------------------------------------------------------------------


def run_folder_problems(folder: Path) -> Iterator[str]:
    """Whether a run can write its folder, or make it in the nearest parent that exists."""
    nearest = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    if not nearest.is_dir():
        yield f"{folder}: {nearest} is a file: choose another folder"
    elif not os.access(nearest, os.W_OK | os.X_OK):
        yield f"{folder}: {nearest} is not writable: choose another folder, or change its permissions"


def checkpoint_steps(folder: Path) -> list[int]:
    """Steps of a run's complete checkpoints, ascending."""
    try:
        names = [path.name for path in (folder / "checkpoints").iterdir() if path.is_dir()]
    except OSError:
        return []
    return sorted(int(match[1]) for match in map(re.compile(r"step_(\d+)").fullmatch, names) if match)


def differences(old: Any, new: Any, keys: Collection[str]) -> Iterator[tuple[str, Any, Any]]:
    """(key, old, new) of each dotted key whose values in two configurations differ."""
    for dotted in keys:
        before, after = old, new
        for name in dotted.split("."):
            before, after = getattr(before, name), getattr(after, name)
        if _absolute(before) != _absolute(after):
            yield dotted, before, after


def _absolute(value: Any) -> Any:
    """Paths made comparable; what is no path stays equal to itself only."""
    if isinstance(value, tuple):
        return tuple(map(_absolute, value))
    return os.path.abspath(value) if isinstance(value, str) else value


def _first(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
