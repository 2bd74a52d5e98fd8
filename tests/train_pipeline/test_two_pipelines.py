"""Two pipelines over one model: each sees the other's updates, or is refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torchrec.distributed.train_pipeline import EvalPipelineSparseDist, TrainPipelineSparseDist

from tests.sharding.jobs import ATOL, CPU, PLAIN, RTOL, Job, build, dense_optimizer, result_of
from tests.support.shared_run import run_once
from tests.train_pipeline.runs import (
    Run,
    batches_of,
    compare_runs,
    pipeline_of,
    plain_steps,
    run_to_the_end,
)
from torchrec_picasso import CompatError

JOB = Job(placement={"*": 2, "a": 0}, tables=PLAIN)
NUM_STEPS = 6
"""Of each pipeline."""


def _in_turn(rank: int, world_size: int) -> dict[Any, Run]:
    """Two pipelines with data of their own take steps in turn; the witness is the plain loop."""
    batches = batches_of(JOB, rank, range(2 * NUM_STEPS))
    found = {}
    for number in (1, 2):
        model = build(JOB, rank, world_size)
        pipelines = [pipeline_of(model, num_micro_batches=number) for _ in range(2)]
        readers = [iter(batches[::2]), iter(batches[1::2])]
        outputs = [
            pipeline.progress(reader)
            for _ in range(NUM_STEPS)
            for pipeline, reader in zip(pipelines, readers)
        ]
        found[number] = result_of(model, []), outputs
    plain = build(JOB, rank, world_size)
    outputs = plain_steps(plain, batches)
    return {**found, "plain": (result_of(plain, []), outputs)}


@pytest.mark.parametrize("number", [1, 2])
def test_rows_fetched_ahead_are_not_older_than_the_other_pipelines_update(number: int) -> None:
    compare_runs(run_once(_in_turn, 2), number, "plain")


def _evaluate(model: Any, batches: list[Any]) -> Any:
    model.eval()
    with torch.no_grad():
        evaluation = EvalPipelineSparseDist(model, dense_optimizer(model), CPU)
        outputs = run_to_the_end(evaluation, iter(batches))
    evaluation.detach()
    model.train()
    return [output for _, output in outputs] if isinstance(outputs[0], tuple) else outputs


def _beside_torchrecs(rank: int, world_size: int) -> tuple[list[str], Any, Any]:
    """TorchRec's pipeline takes over a model from ours, and ours from TorchRec's."""
    batches = batches_of(JOB, rank, range(9))
    told = []
    for torchrecs_first in (True, False):
        model = build(JOB, rank, world_size)
        ours, stock = (
            pipeline_of(model),
            TrainPipelineSparseDist(model, dense_optimizer(model), CPU),
        )
        first, second = (stock, ours) if torchrecs_first else (ours, stock)
        reader = iter(batches)
        for pipeline in (first, first, second):
            pipeline.progress(reader)
        with pytest.raises(CompatError) as caught:
            first.progress(reader)
        told.append(str(caught.value))
    evaluated = []
    for make in (
        pipeline_of,
        lambda model: TrainPipelineSparseDist(model, dense_optimizer(model), CPU),
    ):
        model = build(JOB, rank, world_size)
        pipeline = make(model)
        for _ in range(2):
            run_to_the_end(pipeline, iter(batches[:6]))
            pipeline.detach()
            evaluated.append(_evaluate(model, batches[6:]))
            pipeline.attach(model)
    return told, evaluated[:2], evaluated[2:]


def test_a_model_that_another_pipeline_took_is_refused_by_name() -> None:
    for told, _, _ in run_once(_beside_torchrecs, 2):
        by_torchrecs, by_ours = told
        assert "or outside a step of the pipeline that runs it" in by_torchrecs
        assert "another pipeline has replaced its forward; call detach()" in by_ours


def test_torchrecs_evaluation_of_a_detached_model_is_equal() -> None:
    for _, mine, expected in run_once(_beside_torchrecs, 2):
        torch.testing.assert_close(mine, expected, rtol=RTOL, atol=ATOL)
