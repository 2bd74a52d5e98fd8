"""Settings as frozen dataclasses, read from YAML; all problems of a file are reported at once."""

from torchrec_picasso.app.config.load import load_config, parse_config
from torchrec_picasso.app.config.schema import (
    PLACEMENTS,
    CheckpointConfig,
    DataConfig,
    FeatureConfig,
    ModelConfig,
    OptimizerConfig,
    PipelineConfig,
    ShardingConfig,
    TrainConfig,
    WatchConfig,
)

__all__ = [
    "TrainConfig",
    "DataConfig",
    "FeatureConfig",
    "ModelConfig",
    "ShardingConfig",
    "OptimizerConfig",
    "PipelineConfig",
    "CheckpointConfig",
    "WatchConfig",
    "load_config",
    "parse_config",
    "PLACEMENTS",
]
