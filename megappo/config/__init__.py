"""The configuration of a run: frozen dataclasses, one field a YAML key, read strictly from one YAML file.

Batch sizes count responses over all ranks; nothing is multiplied or divided behind the user's back.
"""

from megappo.config.file import Config, ConfigError, describe_config, dump_config, load_config
from megappo.config.guards import GuardConfig, KeepBestConfig
from megappo.config.ppo import (
    CorrectionConfig,
    DynamicSamplingConfig,
    KLConfig,
    KLEstimator,
    OptimizerConfig,
    OverlongConfig,
    PPOConfig,
)
from megappo.config.roles import (
    SCALAR_HEAD,
    TRAINED,
    Carrier,
    LengthPenaltyConfig,
    LoraConfig,
    MegatronRoleConfig,
    MegatronSizes,
    Offload,
    Recompute,
    RewardConfig,
    RewardWeights,
    RolesConfig,
    RolloutConfig,
    SandboxConfig,
    Sleep,
    Verify,
)
from megappo.config.run import DataConfig, Devices, PoolConfig, RunConfig
from megappo.config.supervised import SupervisedConfig, SupervisedDataConfig, Task, load_supervised

__all__ = [
    "SCALAR_HEAD",
    "TRAINED",
    "Carrier",
    "Config",
    "ConfigError",
    "CorrectionConfig",
    "DataConfig",
    "Devices",
    "DynamicSamplingConfig",
    "GuardConfig",
    "KLConfig",
    "KLEstimator",
    "KeepBestConfig",
    "LengthPenaltyConfig",
    "LoraConfig",
    "MegatronRoleConfig",
    "MegatronSizes",
    "Offload",
    "OptimizerConfig",
    "OverlongConfig",
    "PPOConfig",
    "PoolConfig",
    "Recompute",
    "RewardConfig",
    "RewardWeights",
    "RolesConfig",
    "RolloutConfig",
    "RunConfig",
    "SandboxConfig",
    "Sleep",
    "SupervisedConfig",
    "SupervisedDataConfig",
    "Task",
    "Verify",
    "describe_config",
    "dump_config",
    "load_config",
    "load_supervised",
]
