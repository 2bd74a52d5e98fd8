"""Interleaved training against the plain loop: outputs, weights, state; K 1, 2, 4; 2 and 3 ranks.

Of what ``test_against_stock.py`` leaves out: waves, bags depth first, stock tables beside, other
precisions on the wire, replicas in a table of their own; and of what is the same to the bit. The
plain loop's own equality with stock TorchRec is ``tests/sharding/test_exactness.py``. Micro-batches
sum gradients in another order, hence the tolerance; looking ahead changes no bit.
"""

import dataclasses
from typing import Any

import pytest
import torch

from tests.sharding.jobs import ATOL, ODD, PLAIN, RTOL, Job, build, result_of
from tests.support.shared_run import run_once
from tests.train_pipeline.drivers import SETTINGS_OF, train_job
from tests.train_pipeline.runs import Run, batches_of, compare_runs, plain_steps

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


def _plain(job: Job, rank: int, world_size: int) -> Run:
    model = build(job, rank, world_size)
    outputs = plain_steps(model, batches_of(job, rank, range(job.num_steps)))
    return result_of(model, []), outputs


def _run(rank: int, world_size: int) -> dict[Any, Run]:
    found: dict[Any, Run] = {}
    for name in JOBS_OF[world_size]:
        found[name, "plain"] = _plain(JOBS[name], rank, world_size)
        for setting in SETTINGS_OF[world_size]:
            found[name, setting] = train_job(JOBS[name], setting, rank, world_size)
    for name, driver in (("again", (4, True)), ("SparseDist", None)):
        found[name] = train_job(ODD_ROWS, driver, rank, world_size)
    return found


@pytest.mark.parametrize(("world_size", "name", "setting"), CASES)
def test_trains_as_the_plain_loop(world_size: int, name: str, setting: tuple[int, bool]) -> None:
    rtol, atol = TOLERANCES.get(name, (RTOL, ATOL))
    by_rank = run_once(_run, world_size)
    compare_runs(by_rank, (name, setting), (name, "plain"), rtol=rtol, atol=atol)


@pytest.mark.parametrize(
    ("world_size", "name", "num_micro_batches"),
    [(size, name, k) for size, name, (k, ahead) in CASES if size == 2 and not ahead],
)
def test_looking_ahead_changes_nothing(world_size: int, name: str, num_micro_batches: int) -> None:
    keys = ((name, (num_micro_batches, ahead)) for ahead in (True, False))
    compare_runs(run_once(_run, world_size), *keys, rtol=0, atol=0)


@pytest.mark.parametrize("setting", SETTINGS_OF[2])
def test_replicas_in_a_table_of_their_own_change_nothing(setting: tuple[int, bool]) -> None:
    by_rank = run_once(_run, 2)
    compare_runs(by_rank, ("two_tables", setting), ("rows", setting), rtol=0, atol=0)
    for found in by_rank:
        two, one = (found[name, setting][0].replicas for name in ("two_tables", "rows"))
        torch.testing.assert_close(two, one, rtol=0, atol=0)


@pytest.mark.parametrize("world_size", [2, 3])
def test_the_same_settings_give_the_same_bits(world_size: int) -> None:
    compare_runs(run_once(_run, world_size), "again", ("rows", (4, True)), rtol=0, atol=0)


def test_torchrecs_pipeline_gives_the_bits_of_the_plain_loop() -> None:
    compare_runs(run_once(_run, 2), "SparseDist", ("rows", "plain"), rtol=0, atol=0)
