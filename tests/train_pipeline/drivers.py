"""The two drivers of one exchange: TorchRec's own pipeline, and ours with each of its settings."""

from typing import Any

import torch
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist

from tests.sharding.jobs import CPU, Job, build, dense_optimizer, result_of
from tests.train_pipeline.runs import Run, batches_of, default_dtype, pipeline_of, run_to_the_end

Driver = tuple[int, bool] | None
"""Micro-batches and lookahead of ours; ``None`` = ``TrainPipelineSparseDist``."""

SETTINGS_OF: dict[int, tuple[tuple[int, bool], ...]] = {
    2: ((1, False), (1, True), (2, True), (4, False), (4, True)),
    3: ((1, True), (4, True)),
}
"""By number of ranks. A third rank changes who sends to whom, and nothing of a setting: on three,
those that differ most."""
DRIVERS_OF: dict[int, tuple[Driver, ...]] = {n: (None, *of) for n, of in SETTINGS_OF.items()}
"""By number of ranks."""
DRIVERS = DRIVERS_OF[2]


def make_driver(driver: Driver, model: DistributedModelParallel) -> Any:
    if driver is None:
        return TrainPipelineSparseDist(model, dense_optimizer(model), CPU)
    num_micro_batches, lookahead = driver
    return pipeline_of(model, num_micro_batches=num_micro_batches, lookahead=lookahead)


def train_job(
    job: Job, driver: Driver, rank: int, world_size: int, dtype: torch.dtype = torch.float32
) -> Run:
    """What a new model's training leaves behind, and its outputs; ``dtype`` is torch's default."""
    model, batches = build(job, rank, world_size), batches_of(job, rank, range(job.num_steps))
    pipeline = make_driver(driver, model)
    with default_dtype(dtype):
        outputs = run_to_the_end(pipeline, iter(batches))
    assert driver is None or pipeline.summary().startswith("ebc: interleaved")
    return result_of(model, []), outputs
