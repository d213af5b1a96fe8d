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
    Carrier,
    MegatronRoleConfig,
    Offload,
    Recompute,
    RewardConfig,
    RolesConfig,
    RolloutConfig,
    SandboxConfig,
    Sleep,
    Verify,
)
from megappo.config.run import DataConfig, PoolConfig, RunConfig

__all__ = [
    "Carrier",
    "Config",
    "ConfigError",
    "CorrectionConfig",
    "DataConfig",
    "DynamicSamplingConfig",
    "GuardConfig",
    "KLConfig",
    "KLEstimator",
    "KeepBestConfig",
    "MegatronRoleConfig",
    "Offload",
    "OptimizerConfig",
    "OverlongConfig",
    "PPOConfig",
    "PoolConfig",
    "Recompute",
    "RewardConfig",
    "RolesConfig",
    "RolloutConfig",
    "RunConfig",
    "SandboxConfig",
    "Sleep",
    "Verify",
    "describe_config",
    "dump_config",
    "load_config",
]
