"""Hot/cold tables run unchanged in TorchRec's pipelines, bit-equal to the plain loop."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torchrec.distributed.train_pipeline import (
    EvalPipelineSparseDist,
    TrainPipelineBase,
    TrainPipelineSparseDist,
)
from torchrec.distributed.train_pipeline.train_pipelines import TrainPipelineSparseDistLite

from tests.sharding.jobs import (
    CPU,
    ODD,
    Job,
    assert_same_results,
    build,
    dense_optimizer,
    result_of,
)
from tests.support.shared_run import run_once
from tests.train_pipeline.runs import batches_of, plain_steps, run_to_the_end

JOB = Job(placement={"*": 2, "one_row": 1}, tables=ODD, batch_sizes=(6, 4), num_steps=8)
PIPELINES = (TrainPipelineBase, TrainPipelineSparseDist, TrainPipelineSparseDistLite)


def _run(rank: int, world_size: int) -> dict[Any, Any]:
    batches = batches_of(JOB, rank, range(JOB.num_steps))
    model = build(JOB, rank, world_size)
    plain_steps(model, batches)
    found: dict[Any, Any] = {"plain": result_of(model, [])}
    for kind in PIPELINES:
        trained = build(JOB, rank, world_size)
        pipeline = kind(trained, dense_optimizer(trained), CPU)
        assert len(run_to_the_end(pipeline, iter(batches))) == JOB.num_steps
        found[kind] = result_of(trained, [])
        if kind is TrainPipelineSparseDist:
            assert len(pipeline._pipelined_modules) == 1, "its exchange of ids is pipelined"
    model.eval()
    found["plain evaluated"] = plain_steps(model, batches)
    evaluation = EvalPipelineSparseDist(model, dense_optimizer(model), CPU)
    outputs = run_to_the_end(evaluation, iter(batches))
    found["evaluated"] = [of[1] if isinstance(of, tuple) else of for of in outputs]
    return found


@pytest.mark.parametrize("kind", PIPELINES)
def test_trains_as_the_plain_loop(kind: type) -> None:
    piped, plain = ([found[of] for found in run_once(_run, 2)] for of in (kind, "plain"))
    assert_same_results(piped, plain, rtol=0, atol=0)


def test_evaluates_as_the_plain_loop() -> None:
    for found in run_once(_run, 2):
        assert len(found["evaluated"]) == JOB.num_steps
        torch.testing.assert_close(found["evaluated"], found["plain evaluated"], rtol=0, atol=0)
