"""How many operators the host starts in a training step: on fast links and for small batches, these
are what a step costs.

Counted are operators that no other operator calls, on one of two ranks, in the middle of a run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from torch.profiler import ProfilerActivity, profile, record_function

from tests.sharding.jobs import Job, Table, build
from tests.support.shared_run import run_once
from tests.train_pipeline.drivers import Driver, make_driver
from tests.train_pipeline.runs import batches_of, run_to_the_end

TABLES = tuple(Table(f"t{number}", 8, 1000, (f"f{number}",)) for number in range(26))
STOCK = Job(placement={"*": "table_wise"}, tables=TABLES, batch_sizes=(128,))
OURS = Job(placement={"*": 50}, tables=TABLES, batch_sizes=(128,))
MOST: dict[Driver, int] = {(1, False): 480, (1, True): 565, (4, True): 1240}
"""Operators of a step by setting."""
NUM_WARM, NUM_COUNTED, NUM_LAST = 4, 3, 3
COUNTED = "a counted step"
NAMESPACES = ("aten", "fbgemm", "c10d", "torchrec")


def _count(job: Job, driver: Driver, rank: int, world_size: int) -> float:
    batches = iter(batches_of(job, rank, range(NUM_WARM + NUM_COUNTED + NUM_LAST)))
    pipeline = make_driver(driver, build(job, rank, world_size))
    for _ in range(NUM_WARM):
        pipeline.progress(batches)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        for _ in range(NUM_COUNTED):
            with record_function(COUNTED):
                pipeline.progress(batches)
        # a message of gloo ends in the profile that it started in
        run_to_the_end(pipeline, batches)
    events = profiler.events() or []
    steps = [event for event in events if event.name == COUNTED]
    assert len(steps) == NUM_COUNTED
    return sum(_is_counted(event, steps) for event in events) / NUM_COUNTED


def _is_counted(event: Any, steps: Sequence[Any]) -> bool:
    """Whether an operator of a counted step is called by no other operator."""
    if not _is_operator(event):
        return False
    caller = event.cpu_parent
    while caller is not None:
        if _is_operator(caller):
            return False
        caller = caller.cpu_parent
    return any(
        event.thread == step.thread
        and step.time_range.start <= event.time_range.start < step.time_range.end
        for step in steps
    )


def _is_operator(event: Any) -> bool:
    return event.name.partition("::")[0] in NAMESPACES


def _counts(rank: int, world_size: int) -> dict[Driver, float]:
    found = {driver: _count(OURS, driver, rank, world_size) for driver in MOST}
    return {None: _count(STOCK, None, rank, world_size), **found}


@pytest.mark.parametrize("driver", MOST)
def test_a_step_starts_no_more_operators(driver: Driver) -> None:
    counts = run_once(_counts, 2)[0]
    assert counts[None] > 100  # the profiler saw stock's step
    assert counts[driver] <= MOST[driver]
