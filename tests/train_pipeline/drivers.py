"""The two drivers of one exchange: TorchRec's own pipeline, and ours with each of its settings."""

from __future__ import annotations

from typing import Any

from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist

from tests.sharding.jobs import CPU, dense_optimizer
from tests.train_pipeline.runs import pipeline_of

Driver = tuple[int, bool] | None
"""Micro-batches and lookahead of ours; ``None`` = ``TrainPipelineSparseDist``."""

SETTINGS_OF: dict[int, tuple[tuple[int, bool], ...]] = {
    2: ((1, False), (1, True), (2, True), (4, False), (4, True)),
    3: ((1, True), (4, True)),
}
"""By number of ranks. A third rank changes who sends to whom, and nothing of a setting: on three,
those that differ most."""
DRIVERS: tuple[Driver, ...] = (None, *SETTINGS_OF[2])
DRIVERS_OF: dict[int, tuple[Driver, ...]] = {2: DRIVERS, 3: (None, *SETTINGS_OF[3])}
"""By number of ranks."""


def make_driver(driver: Driver, model: DistributedModelParallel) -> Any:
    """A pipeline that trains the model."""
    if driver is None:
        return TrainPipelineSparseDist(model, dense_optimizer(model), CPU)
    num_micro_batches, lookahead = driver
    return pipeline_of(model, num_micro_batches=num_micro_batches, lookahead=lookahead)
