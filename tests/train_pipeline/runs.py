"""One job trained by the plain loop, by TorchRec's own pipeline, and by ours with each setting."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torchrec.datasets.utils import Batch
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.train_pipeline import TrainPipeline, TrainPipelineSparseDist

from tests.sharding import jobs
from tests.sharding.jobs import ATOL, RTOL
from tests.support.placing import CPU
from torchrec_picasso import InterleavedTrainPipeline
from torchrec_picasso.batches.split import split_batch


def batches_of(job: jobs.Job, rank: int, steps: Iterable[int]) -> list[Batch]:
    return [jobs.make_batch(job, rank, step) for step in steps]


def empty_of(job: jobs.Job) -> Batch:
    """A batch of no samples."""
    batch = jobs.make_batch(job, 0, 0)
    return split_batch(batch, [0, len(batch.labels)])[0]


def pipeline_of(model: DistributedModelParallel, **settings: Any) -> InterleavedTrainPipeline:
    settings = {"loss_reduction": "sum", "optimizer": jobs.dense_optimizer(model), **settings}
    return InterleavedTrainPipeline(model, device=CPU, **settings)


def run_to_the_end(pipeline: TrainPipeline, batches: Iterator[Batch]) -> list[Tensor]:
    """Returns what every step of ours or of TorchRec's gives, until ``StopIteration``."""
    outputs = []
    while True:
        try:
            outputs.append(pipeline.progress(batches))
        except StopIteration:
            return outputs


def plain_steps(
    model: DistributedModelParallel,
    batches: Sequence[Batch],
    optimizer: torch.optim.Optimizer | None = None,
    before_step: Callable[[int], None] = lambda step: None,
) -> list[Tensor]:
    """The plain loop; without gradients if the model is in evaluation."""
    optimizer = optimizer or jobs.dense_optimizer(model)
    outputs = []
    for step, batch in enumerate(batches):
        before_step(step)
        if not model.training:
            with torch.no_grad():
                outputs.append(model(batch)[1])
            continue
        model.fused_optimizer.zero_grad()
        optimizer.zero_grad()
        loss, output = model(batch)
        loss.backward()
        optimizer.step()
        outputs.append(output)
    return outputs


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Makes a dtype torch's default meanwhile."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


Run = tuple[jobs.Result, list[Tensor]]
"""What a run leaves behind on a rank, and the output of each step."""


def plain_run(job: jobs.Job, rank: int, world_size: int, steps: Iterable[int] | None = None) -> Run:
    """Returns what the plain loop leaves behind of a new model, and its outputs."""
    model = jobs.build(job, rank, world_size)
    outputs = plain_steps(model, batches_of(job, rank, steps or range(job.num_steps)))
    return jobs.result_of(model, []), outputs


def compare_runs(
    by_rank: Sequence[Any], mine: Any, expected: Any, rtol: float = RTOL, atol: float = ATOL
) -> None:
    """Compares two of the runs that each rank has, by their keys."""
    results, outputs = zip(*(on_rank[mine] for on_rank in by_rank))
    expected_results, expected_outputs = zip(*(on_rank[expected] for on_rank in by_rank))
    jobs.assert_same_results(results, expected_results, rtol, atol)
    torch.testing.assert_close(outputs, expected_outputs, rtol=rtol, atol=atol)


Driver = tuple[int, bool] | None
"""Micro-batches and lookahead of ours; ``None`` = ``TrainPipelineSparseDist``."""

SETTINGS_OF: dict[int, tuple[tuple[int, bool], ...]] = {
    2: ((1, False), (1, True), (2, True), (4, False), (4, True)),
    3: ((1, True), (4, True)),
}
"""By number of ranks. A third rank changes who sends to whom, and nothing of a setting: on three,
those that differ most."""
DRIVERS_OF: dict[int, tuple[Driver, ...]] = {n: (None, *each) for n, each in SETTINGS_OF.items()}
"""By number of ranks."""
DRIVERS = DRIVERS_OF[2]


def make_driver(driver: Driver, model: DistributedModelParallel) -> Any:
    if driver is None:
        return TrainPipelineSparseDist(model, jobs.dense_optimizer(model), CPU)
    num_micro_batches, lookahead = driver
    return pipeline_of(model, num_micro_batches=num_micro_batches, lookahead=lookahead)


def train_job(
    job: jobs.Job, driver: Driver, rank: int, world_size: int, dtype: torch.dtype = torch.float32
) -> Run:
    """Returns what a new model's training leaves, and its outputs; ``dtype`` is torch's default."""
    model, batches = jobs.build(job, rank, world_size), batches_of(job, rank, range(job.num_steps))
    pipeline = make_driver(driver, model)
    with default_dtype(dtype):
        outputs = run_to_the_end(pipeline, iter(batches))
    assert driver is None or pipeline.summary().startswith("ebc: interleaved")
    return jobs.result_of(model, []), outputs
