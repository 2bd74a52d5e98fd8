"""One job trained by the plain loop and by the interleaved pipeline, from given batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torchrec.datasets.utils import Batch
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.train_pipeline import TrainPipeline

from tests.sharding.jobs import (
    ATOL,
    CPU,
    RTOL,
    Job,
    Result,
    assert_same_results,
    dense_optimizer,
    make_batch,
)
from torchrec_picasso import InterleavedTrainPipeline
from torchrec_picasso.batches.split import split_batch


def batches_of(job: Job, rank: int, steps: Iterable[int]) -> list[Batch]:
    return [make_batch(job, rank, step) for step in steps]


def empty_of(job: Job) -> Batch:
    """A batch of no samples."""
    batch = make_batch(job, 0, 0)
    return split_batch(batch, [0, len(batch.labels)])[0]


def pipeline_of(model: DistributedModelParallel, **settings: Any) -> InterleavedTrainPipeline:
    settings = {"loss_reduction": "sum", "optimizer": dense_optimizer(model), **settings}
    return InterleavedTrainPipeline(model, device=CPU, **settings)


def run_to_the_end(pipeline: TrainPipeline, batches: Iterator[Batch]) -> list[Tensor]:
    """What every step of ours or of TorchRec's gives, until ``StopIteration``."""
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
    optimizer = optimizer or dense_optimizer(model)
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


Run = tuple[Result, list[Tensor]]
"""What a run leaves behind on a rank, and the output of each step."""


def assert_same_runs(mine: list[Run], expected: list[Run]) -> None:
    """Compares two runs, a pair per rank."""
    results, outputs = zip(*mine)
    expected_results, expected_outputs = zip(*expected)
    assert_same_results(results, expected_results)
    torch.testing.assert_close(outputs, expected_outputs, rtol=RTOL, atol=ATOL)


def losses_of(outputs: Sequence[Tensor], batches: Sequence[Batch]) -> list[float]:
    """By the formula of the jobs' models; a pipeline gives predictions, not losses."""
    return [
        float(((output - batch.labels) ** 2).sum() / 6)
        for output, batch in zip(outputs, batches, strict=True)
    ]
