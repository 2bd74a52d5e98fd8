"""Interleaved training against the plain loop: losses, weights, state; K 1, 2, 4; 2 and 3 ranks.

The plain loop is the same model step by step, whose own equality with stock TorchRec is
``tests/sharding/test_exactness.py``. Micro-batches sum gradients in another order, hence the
tolerance; looking ahead changes no bit.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
from torchrec.datasets.utils import Batch

from tests.sharding.jobs import (
    CPU,
    ODD,
    PLAIN,
    Job,
    Result,
    build,
    dense_optimizer,
    make_batch,
    result_of,
    train,
    whole,
)
from tests.train_pipeline.drivers import SETTINGS_OF
from torchrec_picasso import InterleavedTrainPipeline
from torchrec_picasso.app.launch.run_ranks import RankError, run_ranks

RTOL, ATOL = 1e-4, 2e-5
NUM_STEPS = 5
JOBS = {
    "rowwise_adagrad": Job(placement={"*": 2, "one_row": 1}, tables=ODD, num_steps=NUM_STEPS),
    "sgd": Job(
        placement={"*": 0},
        tables=PLAIN,
        optimizer="sgd",
        optimizer_kwargs={"lr": 0.01},
        num_steps=NUM_STEPS,
    ),
    "uneven": Job(
        placement={"*": 3, "one_row": 0, "two_rows": 2},
        tables=ODD,
        batch_sizes=(16, 9, 0),
        num_steps=NUM_STEPS,
    ),
    "mixed": Job(placement={"*": 2, "b": "table_wise"}, tables=PLAIN, num_steps=NUM_STEPS),
    "weighted": Job(
        placement={"*": 4},
        tables=tuple(dataclasses.replace(table, mean=False) for table in PLAIN),
        weighted=True,
        num_steps=NUM_STEPS,
    ),
    "waves": Job(
        placement={"*": 2, "one_row": 1},
        tables=ODD,
        waves={"a": 1, "b": 2, "two_rows": 2, "d": 1},
        num_steps=NUM_STEPS,
    ),
    "waves_weighted_uneven": Job(
        placement={"*": 2, "one_row": 0},
        tables=tuple(dataclasses.replace(table, mean=False) for table in ODD),
        waves={"b": 1, "d": 3},
        weighted=True,
        batch_sizes=(16, 9, 0),
        num_steps=NUM_STEPS,
    ),
    "waves_half_wire": Job(
        placement={"*": 2}, tables=PLAIN, waves={"b": 1}, wire="fp16", num_steps=NUM_STEPS
    ),
    "half_wire": Job(placement={"*": 2}, tables=ODD[:2], wire="fp16", num_steps=NUM_STEPS),
}
JOBS["two_tables"] = dataclasses.replace(JOBS["rowwise_adagrad"], two_tables=True)
JOBS_OF = {2: tuple(JOBS), 3: ("rowwise_adagrad", "uneven", "waves", "waves_weighted_uneven")}
"""By number of ranks."""
CASES = [(world_size, name) for world_size, names in JOBS_OF.items() for name in names]
HALF = (5e-3, 1e-3)  # a sum may round to the next of 11 bits
TOLERANCES = {"half_wire": HALF, "waves_half_wire": HALF}
SETTINGS = [(world_size, *setting) for world_size in JOBS_OF for setting in SETTINGS_OF[world_size]]
CASES_AND_SETTINGS = [
    (world_size, name, *setting)
    for world_size, name in CASES
    for setting in SETTINGS_OF[world_size]
]


def _batches(job: Job, rank: int) -> Iterator[Batch]:
    return iter([make_batch(job, rank, step) for step in range(job.num_steps)])


def _interleaved(
    job: Job, rank: int, world_size: int, num_micro_batches: int, lookahead: bool
) -> Result:
    model = build(job, rank, world_size)
    pipeline = InterleavedTrainPipeline(
        model,
        dense_optimizer(model),
        CPU,
        num_micro_batches=num_micro_batches,
        lookahead=lookahead,
        loss_reduction="sum",
    )
    batches, outputs = _batches(job, rank), []
    while True:
        try:
            outputs.append(pipeline.progress(batches))
        except StopIteration:
            break
    assert len(outputs) == job.num_steps
    losses = [
        float(((output - batch.labels) ** 2).sum() / 6)
        for output, batch in zip(outputs, _batches(job, rank))
    ]
    return result_of(model, losses)


def _run(rank: int, world_size: int, jobs: dict[str, Job]) -> dict[Any, Result]:
    results: dict[Any, Result] = {}
    for name, job in jobs.items():
        model = build(job, rank, world_size)
        results[name, "plain"] = result_of(model, train(model, job, rank, range(job.num_steps)))
        for num_micro_batches, lookahead in SETTINGS_OF[world_size]:
            results[name, num_micro_batches, lookahead] = _interleaved(
                job, rank, world_size, num_micro_batches, lookahead
            )
    results["again"] = _interleaved(jobs["rowwise_adagrad"], rank, world_size, 4, True)
    return results


def _trained(world_size: int) -> list[dict[Any, Result]]:
    results = _once(world_size)
    if isinstance(results, RankError):
        raise results
    return results


@cache
def _once(world_size: int) -> list[dict[Any, Result]] | RankError:
    try:
        return run_ranks(
            _run, world_size, {name: JOBS[name] for name in JOBS_OF[world_size]}, timeout_s=280
        )
    except RankError as error:  # remembered: the tests that share the run must not repeat it
        return error


def _assert_close(mine: list[Result], its: list[Result], rtol: float, atol: float) -> None:
    for kind in ("weights", "states"):
        torch.testing.assert_close(whole(mine, kind), whole(its, kind), rtol=rtol, atol=atol)
    for my, other in zip(mine, its):
        torch.testing.assert_close(my.dense, other.dense, rtol=rtol, atol=atol)
        torch.testing.assert_close(my.losses, other.losses, rtol=rtol, atol=atol)


@pytest.mark.parametrize(
    ("world_size", "name", "num_micro_batches", "lookahead"), CASES_AND_SETTINGS
)
def test_trains_as_the_plain_loop(
    world_size: int, name: str, num_micro_batches: int, lookahead: bool
) -> None:
    by_rank = _trained(world_size)
    mine = [rank[name, num_micro_batches, lookahead] for rank in by_rank]
    plain = [rank[name, "plain"] for rank in by_rank]
    _assert_close(mine, plain, *TOLERANCES.get(name, (RTOL, ATOL)))
    for replicas in zip(*(result.replicas for result in mine)):
        for replica in replicas[1:]:
            torch.testing.assert_close(replica, replicas[0], rtol=0, atol=0)


@pytest.mark.parametrize(
    ("world_size", "name", "num_micro_batches"),
    [
        (world_size, name, k)
        for world_size, name, k, ahead in CASES_AND_SETTINGS
        if not ahead and (k, True) in SETTINGS_OF[world_size]
    ],
)
def test_looking_ahead_changes_nothing(world_size: int, name: str, num_micro_batches: int) -> None:
    by_rank = _trained(world_size)
    ahead = [rank[name, num_micro_batches, True] for rank in by_rank]
    _assert_close(ahead, [rank[name, num_micro_batches, False] for rank in by_rank], 0, 0)


@pytest.mark.parametrize(("world_size", "num_micro_batches", "lookahead"), SETTINGS)
def test_waves_train_the_same_model(
    world_size: int, num_micro_batches: int, lookahead: bool
) -> None:
    by_rank = _trained(world_size)
    waves, in_one = (
        [rank[name, num_micro_batches, lookahead] for rank in by_rank]
        for name in ("waves", "rowwise_adagrad")
    )
    _assert_close(waves, in_one, RTOL, ATOL)


@pytest.mark.parametrize(("num_micro_batches", "lookahead"), SETTINGS_OF[2])
def test_replicas_in_a_table_of_their_own_change_nothing(
    num_micro_batches: int, lookahead: bool
) -> None:
    by_rank = _trained(2)
    one, two = (
        [rank[name, num_micro_batches, lookahead] for rank in by_rank]
        for name in ("rowwise_adagrad", "two_tables")
    )
    _assert_close(two, one, 0, 0)
    for mine, its in zip(two, one):
        torch.testing.assert_close(mine.replicas, its.replicas, rtol=0, atol=0)


@pytest.mark.parametrize("world_size", [2, 3])
def test_the_same_settings_give_the_same_bits(world_size: int) -> None:
    by_rank = _trained(world_size)
    again = [rank["again"] for rank in by_rank]
    _assert_close(again, [rank["rowwise_adagrad", 4, True] for rank in by_rank], 0, 0)
