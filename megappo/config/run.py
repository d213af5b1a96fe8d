"""The run itself, its data and its devices."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from megappo.config.guards import KeepBestConfig
from megappo.strict_yaml import key


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    dir: str = key("folder or URL of everything the run leaves; a run resumes from it")
    steps: int = key("training steps in all", at_least=1)
    seed: int = key("seed of data order, mini-batches and sampling", 1, at_least=0)
    save_every: int | None = key(
        "steps between checkpoints; 0: only at the end; null: a tenth of all, but at least 10", None, at_least=0
    )
    keep_checkpoints: int = key("number of latest checkpoints kept", 2, at_least=1)
    keep_best: KeepBestConfig | None = key(
        "also write and keep the checkpoint of the best validation; null: only the latest", None
    )
    validate_every: int = key("steps between validations; 0: only before and after", 0, at_least=0)
    validate_before: bool = key("validate before the first step", True)
    trackers: tuple[Literal["tensorboard", "wandb", "mlflow"], ...] = key("where metrics go besides log.jsonl", ())
    device: Literal["cuda", "cpu"] = key("what the workers run on", "cuda")
    dtype: Literal["bfloat16", "float32"] = key("type of weights and activations", "bfloat16")
    peak_tflops: float | None = key("a device's matrix peak, for MFU; null: by its name", None, above=0)
    device_profile: str = key("what plan takes a device for: H200, H100, A100, or a YAML file", "H200")
    timeout_s: float = key("seconds any one remote call or collective may take", 1800.0, above=0)
    heartbeat_s: float = key(
        "seconds without an answer after which a table of what each process is doing is printed; 0: never",
        300.0,
        at_least=0,
    )
    restarts: int = key(
        "times that a run which lost a worker or node starts over from its last checkpoint, and that a lost engine is "
        "replaced; a new checkpoint, or a weight sync, begins the count anew",
        0,
        at_least=0,
    )
    dump_rollouts: bool = key("write every step's batch to RUN/rollouts", True)
    work_dir: str | None = key("folder in which a run whose dir is a URL works; null: runs/PROTOCOL/PATH", None)
    upload_timeout_s: float = key("seconds that the end of a run may wait for its files to go up", 1800.0, above=0)

    @property
    def checkpoint_every(self) -> int:
        """Steps between checkpoints; 0: only at the end."""
        return max(10, self.steps // 10) if self.save_every is None else self.save_every

    @property
    def is_remote(self) -> bool:
        """Whether the run is kept at a URL."""
        return is_url(self.dir)

    @property
    def folder(self) -> Path:
        """Where the run works: its own folder, or one that goes up to its URL."""
        return Path(self.work_dir) if self.work_dir else working_folder(self.dir)


def is_url(text: str) -> bool:
    """Whether it is no folder here."""
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", text) is not None


def working_folder(run: str) -> Path:
    """The folder here of a run that is named by a folder or a URL: each URL has its own."""
    if not is_url(run):
        return Path(run)
    protocol, _, path = run.partition("://")
    return Path("runs", protocol, path.strip("/"))


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    train: tuple[str, ...] = key("parquet files to train on")
    validation: tuple[str, ...] = key("parquet files to validate on", ())
    canary: tuple[str, ...] = key("parquet files of prompts that are watched with every validation", ())
    prompts_per_step: int = key("prompts of one training step", at_least=1)
    max_prompt: int = key("longest prompt, in tokens", at_least=1)
    max_response: int = key("longest response, in tokens", at_least=1)
    overlong: Literal["filter", "cut"] = key(
        "longer prompts: leave out, or keep their last max_prompt tokens (of long responses: ppo.overlong)", "filter"
    )
    shuffle: bool = key("shuffle the prompts of each epoch", True)
    replay: tuple[str, ...] = key(
        "dumped or scored batches that the steps train on, one after the other, instead of generating", ()
    )
    validation_prompts: int = key("validation prompts used; 0: all", 0, at_least=0)


class Devices(Protocol):
    """Whatever has a run and its devices."""

    @property
    def run(self) -> RunConfig: ...

    @property
    def pools(self) -> Mapping[str, PoolConfig]: ...


@dataclass(frozen=True, kw_only=True)
class PoolConfig:
    nodes: int = key("machines", 1, at_least=1)
    devices_per_node: int = key("devices on each machine", at_least=1)

    @property
    def devices(self) -> int:
        """Devices on all machines together."""
        return self.nodes * self.devices_per_node
