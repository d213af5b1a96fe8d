"""Training on given responses: a reward model from pairs, or a policy from text to imitate."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megappo.config.file import read_config
from megappo.config.ppo import OptimizerConfig
from megappo.config.roles import MegatronRoleConfig
from megappo.config.run import PoolConfig, RunConfig
from megappo.strict_yaml import key

Task = Literal["reward-train", "sft"]


@dataclass(frozen=True, kw_only=True)
class SupervisedDataConfig:
    train: tuple[str, ...] = key("parquet files to train on: prompt, chosen, rejected (margin); or prompt, response")
    validation: tuple[str, ...] = key("parquet files to validate on", ())
    batch: int = key("pairs, or responses, of one training step, over all ranks", at_least=1)
    max_tokens: int = key("longest prompt and response together, in tokens; longer ones are left out", at_least=2)
    shuffle: bool = key("shuffle the rows of each epoch", True)


@dataclass(frozen=True, kw_only=True)
class SupervisedConfig:
    run: RunConfig = key("the run")
    model: str = key("Hugging Face model folder to start from")
    data: SupervisedDataConfig = key("pairs or responses")
    pools: Mapping[str, PoolConfig] = key("named sets of devices")
    role: MegatronRoleConfig = key("where the model trains, and in which sizes")
    lr: float = key("peak learning rate", at_least=0)
    optimizer: OptimizerConfig = key("AdamW and its schedule", OptimizerConfig())

    @property
    def model_folder(self) -> str:
        """Absolute path of the model's folder."""
        return os.path.abspath(self.role.model or self.model)


def load_supervised(path: str | Path, overrides: Sequence[str] = ()) -> SupervisedConfig:
    """Read a YAML file; see :func:`megappo.config.load_config`."""
    return read_config(SupervisedConfig, path, overrides)
