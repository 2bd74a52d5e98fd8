"""What users do between two steps: save, load, evaluate; rows fetched ahead must not be stale."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest

from tests.sharding.jobs import ODD, Job, build, result_of
from tests.support.shared_run import run_once
from tests.train_pipeline.runs import Run, assert_same_runs, batches_of, pipeline_of, plain_steps

IN_ONE = Job(placement={"*": 2, "one_row": 0}, tables=ODD, num_steps=9)
JOBS = {"one wave": IN_ONE, "waves": dataclasses.replace(IN_ONE, waves={"a": 1, "d": 1})}
LOADED_BEFORE, EVALUATED = 3, (5, 6)


def _train(job: Job, rank: int, world_size: int, num_micro_batches: int) -> Run:
    """By the plain loop where there are no micro-batches."""
    model, batches = build(job, rank, world_size), batches_of(job, rank, range(job.num_steps))
    start, left = copy.deepcopy(model.state_dict()), iter(batches)
    pipeline = pipeline_of(model, num_micro_batches=num_micro_batches or 1)
    outputs = []
    for step, batch in enumerate(batches):
        model.state_dict()  # as a checkpoint does
        if step == LOADED_BEFORE:
            model.load_state_dict(start)
        model.train(step not in EVALUATED)
        if num_micro_batches:
            outputs.append(pipeline.progress(left))
        else:
            outputs += plain_steps(model, [batch])
    if num_micro_batches:
        with pytest.raises(StopIteration):
            pipeline.progress(left)
        in_waves = " in 2 waves" if job.waves else ""
        assert pipeline.summary().startswith(f"ebc: interleaved{in_waves}\n")
    return result_of(model, []), outputs


def _run(rank: int, world_size: int) -> dict[Any, Run]:
    return {
        (name, number): _train(job, rank, world_size, number)
        for name, job in JOBS.items()
        for number in (0, 1, 3)
    }


@pytest.mark.parametrize("num_micro_batches", [1, 3])
@pytest.mark.parametrize("name", list(JOBS))
def test_saved_loaded_and_evaluated_between_steps(name: str, num_micro_batches: int) -> None:
    mine, plain = (
        [found[name, number] for found in run_once(_run, 2)] for number in (num_micro_batches, 0)
    )
    assert_same_runs(mine, plain)
