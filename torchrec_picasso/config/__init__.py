"""Settings as frozen dataclasses, and YAML files checked into them with every problem at once."""

from torchrec_picasso.config.load import load_config, parse_config
from torchrec_picasso.config.schema import (
    CARDINALITY_NAMES,
    PLACEMENTS,
    CheckpointConfig,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    ShardingConfig,
    TrainConfig,
)

__all__ = [
    "TrainConfig",
    "DataConfig",
    "ModelConfig",
    "ShardingConfig",
    "OptimizerConfig",
    "CheckpointConfig",
    "load_config",
    "parse_config",
    "PLACEMENTS",
    "CARDINALITY_NAMES",
]
