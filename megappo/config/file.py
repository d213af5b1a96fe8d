"""The whole configuration, read from one YAML file and written back."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, is_dataclass
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin

from megappo.config.ppo import PPOConfig
from megappo.config.roles import RolesConfig
from megappo.config.run import DataConfig, PoolConfig, RunConfig
from megappo.strict_yaml import Reader, dump, expected, fields_of, key, parse, to_plain

Schema = TypeVar("Schema")


class ConfigError(ValueError):
    """A configuration that cannot be used.

    Attributes:
        problems: every problem, one line each, with its fix.
        partial: what could be read, refused values at their defaults; None where a required key has no value.
        doubtful: the keys in ``partial`` whose values are not what the user meant.
    """

    def __init__(self, problems: Sequence[str], partial: Any = None, doubtful: Sequence[str] = ()) -> None:
        super().__init__("\n".join(problems))
        self.problems = tuple(problems)
        self.partial = partial
        self.doubtful = frozenset(doubtful)

    def news(self, findings: Iterable[str]) -> tuple[str, ...]:
        """What was found of ``partial``, less what a refused value made look wrong."""
        return tuple(line for line in findings if line.split(":")[0] not in self.doubtful)


@dataclass(frozen=True, kw_only=True)
class Config:
    run: RunConfig = key("the run")
    model: str = key("Hugging Face model folder")
    data: DataConfig = key("prompts")
    pools: Mapping[str, PoolConfig] = key("named sets of devices")
    roles: RolesConfig = key("who runs where")
    ppo: PPOConfig = key("the algorithm")

    @property
    def reference_is_base(self) -> bool:
        """Whether KL terms compare with the actor's own model without its adapters."""
        return self.ppo.kl.in_use and self.roles.reference is None and self.roles.actor.lora is not None

    def model_folder(self, role: str) -> str:
        """Absolute path of the model folder of a Megatron role: its own, or the common one.

        The actor's is also that of the engines, the tokenizer, the chat template and the end-of-text tokens.
        """
        return os.path.abspath(self.roles.megatron[role].model or self.model)


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read a YAML file, with ``key=value`` overrides (dotted keys, values in YAML) on top.

    Raises:
        ConfigError: listing every unknown key, wrong type, value out of range, missing key and duplicate at once.
    """
    return read_config(Config, path, overrides)


def read_config(schema: type[Schema], path: str | Path, overrides: Sequence[str] = ()) -> Schema:
    """Read a YAML file as any dataclass of configuration; see :func:`load_config`."""
    problems: list[str] = []
    sections: Any = schema
    raw = _read(path, problems)
    if not isinstance(raw, dict):
        raise ConfigError(problems or [f"{path}: holds no mapping: give sections {', '.join(fields_of(sections))}"])
    if other := _other_kind(sections, path, raw):
        raise ConfigError([other])
    for text in overrides:
        _override(raw, text, problems)
    reader = Reader()
    config: Any = reader.section(schema, raw)
    problems += reader.problems
    if problems:
        raise ConfigError(problems, None if config is MISSING else config, tuple(reader.doubtful))
    return config


def dump_config(config: Any) -> str:
    """The resolved configuration as YAML, every default written out; :func:`load_config` reads it back equal."""
    return dump(to_plain(config))


def describe_config(schema: Any = Config) -> Iterator[tuple[str, str, str, str]]:
    """(dotted key, legal values, default or ``required``, help) of every key; ``NAME`` stands for a name of choice."""
    return _describe(schema, "")


def _describe(cls: Any, prefix: str) -> Iterator[tuple[str, str, str, str]]:
    for name, (hint, item) in fields_of(cls).items():
        section = next((part for part in (hint, *get_args(hint)) if is_dataclass(part)), None)
        if section:
            yield from _describe(section, f"{prefix}{name}.{'NAME.' if get_origin(hint) is Mapping else ''}")
            continue
        default = item.default_factory() if item.default_factory is not MISSING else item.default
        shown = "required" if default is MISSING else dump(to_plain(default)).removesuffix("...\n").strip()
        yield f"{prefix}{name}", expected(hint, item.metadata["range"]), shown, item.metadata["help"]


def _other_kind(schema: Any, path: str | Path, raw: Mapping[str, Any]) -> str:
    """What to do with a configuration of another command, whose keys would all look wrong; empty if it is none."""
    keys = fields_of(schema).keys()
    of_train, of_examples = not raw.keys().isdisjoint(("roles", "ppo")), "role" in raw
    if of_examples and not of_train and "roles" in keys:
        return (
            f"{path}: this is a configuration of reward-train or sft: megappo check {path} --for reward-train (or sft)"
        )
    if of_train and not of_examples and "role" in keys:
        return f"{path}: this is a configuration of train: megappo check {path}"
    return ""


def _read(path: str | Path, problems: list[str]) -> Any:
    try:
        text = Path(path).read_bytes().decode("utf-8")
    except FileNotFoundError:
        problems.append(f"{path}: no such file: give the path of a YAML file")
    except OSError as error:
        problems.append(f"{path}: cannot be read ({error.strerror}): give the path of a YAML file")
    except UnicodeDecodeError:
        problems.append(f"{path}: not UTF-8 text: give the path of a YAML file")
    else:
        found: list[str] = []
        raw = parse(text, found)
        # A file that does not parse is named; a key given twice names itself.
        problems += found if raw is not MISSING else [f"{path}: {problem}" for problem in found]
        return raw
    return None


def _override(raw: dict[str, Any], text: str, problems: list[str]) -> None:
    dotted, equals, value_text = text.partition("=")
    names = dotted.strip().split(".")
    if not equals or not all(names):
        problems.append(f"{text}: not an override: write key=value, for instance roles.rollout.tp=2")
        return
    found: list[str] = []
    value = parse(value_text, found)
    if value is MISSING and any(value_text.count(left) > value_text.count(right) for left, right in ("{}", "[]")):
        fix = "close it, and quote the override in the shell, as in 'roles.actor.lora={rank: 4}'"
        problems.append(f"{text}: a bracket is not closed: {fix}")
        return
    problems += [f"{text}: {problem}" for problem in found]
    if value is MISSING:
        return
    at = raw
    for depth, name in enumerate(names[:-1]):
        child = {} if at.get(name) is None else at[name]
        if not isinstance(child, dict):
            problems.append(f"{text}: {'.'.join(names[: depth + 1])} is no section: it has no keys to override")
            return
        at[name] = dict(child)  # a copy: an alias in the YAML shares one section between two keys
        at = at[name]
    at[names[-1]] = value
