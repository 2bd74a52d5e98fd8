"""Interleaved training against the plain loop: losses, weights, state; K 1, 2, 4; 2 and 3 ranks.

Of what ``test_against_stock.py`` leaves out: waves, bags depth first, stock tables beside, other
precisions on the wire, replicas in a table of their own; and of what is the same to the bit. The
plain loop's own equality with stock TorchRec is ``tests/sharding/test_exactness.py``. Micro-batches
sum gradients in another order, hence the tolerance; looking ahead changes no bit.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from tests.sharding.jobs import (
    ATOL,
    ODD,
    PLAIN,
    RTOL,
    Job,
    Result,
    assert_same_results,
    build,
    result_of,
)
from tests.support.shared_run import run_once
from tests.train_pipeline.drivers import SETTINGS_OF, make_driver
from tests.train_pipeline.runs import batches_of, losses_of, plain_steps, run_to_the_end

ODD_ROWS = Job(placement={"*": 2, "one_row": 1}, tables=ODD, num_steps=5)
JOBS = {
    "rows": ODD_ROWS,
    "two_tables": dataclasses.replace(ODD_ROWS, two_tables=True),
    "mixed": Job(placement={"*": 2, "b": "table_wise"}, tables=PLAIN, num_steps=5),
    "waves": dataclasses.replace(ODD_ROWS, waves={"a": 1, "b": 2, "two_rows": 2, "d": 1}),
    "waves_weighted_uneven": Job(
        placement={"*": 2, "one_row": 0},
        tables=tuple(dataclasses.replace(table, mean=False) for table in ODD),
        waves={"b": 1, "d": 3},
        weighted=True,
        batch_sizes=(16, 9, 0),
        num_steps=5,
    ),
    "bags": Job(  # two micro-batches run depth first, in three waves
        placement={"*": "bags"}, tables=ODD, weighted=True, batch_sizes=(16, 9, 0), num_steps=5
    ),
    "waves_half_wire": Job(
        placement={"*": 2}, tables=ODD[:2], waves={"b": 1}, wire="fp16", num_steps=5
    ),
}
JOBS_OF = {2: tuple(JOBS), 3: ("rows", "waves_weighted_uneven")}
"""By number of ranks."""
TOLERANCES = {"waves_half_wire": (5e-3, 1e-3)}  # a sum may round to the next of 11 bits
CASES = [
    (world_size, name, setting)
    for world_size, names in JOBS_OF.items()
    for name in names
    for setting in SETTINGS_OF[world_size]
]


def _train(job: Job, rank: int, world_size: int, setting: Any) -> Result:
    """By the pipeline, by the plain loop (``None``), or by TorchRec's pipeline (``()``)."""
    model, batches = build(job, rank, world_size), batches_of(job, rank, range(job.num_steps))
    if setting is None:
        outputs = plain_steps(model, batches)
    else:
        outputs = run_to_the_end(make_driver(setting or None, model), iter(batches))
    return result_of(model, losses_of(outputs, batches))


def _run(rank: int, world_size: int) -> dict[Any, Result]:
    found: dict[Any, Result] = {
        (name, setting): _train(JOBS[name], rank, world_size, setting)
        for name in JOBS_OF[world_size]
        for setting in (None, *SETTINGS_OF[world_size])
    }
    for name, setting in (("again", (4, True)), ("SparseDist", ())):
        found[name] = _train(ODD_ROWS, rank, world_size, setting)
    return found


def _of_ranks(world_size: int, *keys: Any) -> list[list[Result]]:
    return [[found[key] for found in run_once(_run, world_size)] for key in keys]


@pytest.mark.parametrize(("world_size", "name", "setting"), CASES)
def test_trains_as_the_plain_loop(world_size: int, name: str, setting: tuple[int, bool]) -> None:
    mine, plain = _of_ranks(world_size, (name, setting), (name, None))
    assert_same_results(mine, plain, *TOLERANCES.get(name, (RTOL, ATOL)))


@pytest.mark.parametrize(
    ("world_size", "name", "num_micro_batches"),
    [(size, name, k) for size, name, (k, ahead) in CASES if size == 2 and not ahead],
)
def test_looking_ahead_changes_nothing(world_size: int, name: str, num_micro_batches: int) -> None:
    keys = ((name, (num_micro_batches, ahead)) for ahead in (True, False))
    assert_same_results(*_of_ranks(world_size, *keys), rtol=0, atol=0)


@pytest.mark.parametrize("setting", SETTINGS_OF[2])
def test_replicas_in_a_table_of_their_own_change_nothing(setting: tuple[int, bool]) -> None:
    one, two = _of_ranks(2, ("rows", setting), ("two_tables", setting))
    assert_same_results(two, one, rtol=0, atol=0)
    for mine, its in zip(two, one):
        torch.testing.assert_close(mine.replicas, its.replicas, rtol=0, atol=0)


@pytest.mark.parametrize("world_size", [2, 3])
def test_the_same_settings_give_the_same_bits(world_size: int) -> None:
    again, first = _of_ranks(world_size, "again", ("rows", (4, True)))
    assert_same_results(again, first, rtol=0, atol=0)


def test_torchrecs_pipeline_gives_the_bits_of_the_plain_loop() -> None:
    assert_same_results(*_of_ranks(2, "SparseDist", ("rows", None)), rtol=0, atol=0)
