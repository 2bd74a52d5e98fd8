"""A run of few steps, small enough for tests."""

from pathlib import Path
from typing import Any

from torchrec_picasso.app.config import (
    CheckpointConfig,
    DataConfig,
    ModelConfig,
    ShardingConfig,
    TrainConfig,
)


def tiny_run(batch_size: int = 16, dim: int = 8, **settings: Any) -> TrainConfig:
    """A DLRM over four generated tables with 20 hot rows; ``settings`` are of the run."""
    return TrainConfig(
        data=DataConfig(batch_size=batch_size, row_scale=0.001, num_tables=4, heldout_steps=1),
        model=ModelConfig(embedding_dim=dim, dense_layers=(8,), over_layers=(8,)),
        **{"sharding": ShardingConfig(hot_rows=20), **settings},
    )


def checkpoints(folder: Path | str | None, every_steps: int, **more: Any) -> CheckpointConfig:
    return CheckpointConfig(
        folder=None if folder is None else str(folder), every_steps=every_steps, **more
    )
