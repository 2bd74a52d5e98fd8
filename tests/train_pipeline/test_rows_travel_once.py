"""Every row travels once per step and rank: ids, rows and gradients on the wire, counted by numpy.

A rank asks for the distinct cold rows of its batch that are at home elsewhere: one id out, one row
in, one gradient out, however often lookups, features, tables' features and micro-batches repeat
it, and whether it is fetched clean or dirty. Hot rows cost one sum over the rows that any rank
touches. The expected numbers come from the batches by plain numpy, never from the package; the
messages are read off PyTorch's dispatcher. All of it is exact. That rows which no rank used in the
step before are clean is a line of ``tests/test_worked_example.py``.

And what tables whose bags travel send.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from tests.sharding.jobs import Job, Table, build, make_batch
from tests.support.shared_run import run_once
from tests.support.wire import Message, MessageRecorder, elements
from tests.train_pipeline.runs import (
    DRIVERS,
    DRIVERS_OF,
    Driver,
    batches_of,
    make_driver,
    run_to_the_end,
)

TABLES = (
    Table("a", 8, 90, ("f0", "f1")),
    Table("b", 16, 30, ("f2", "f3"), mean=True),
    Table("c", 8, 40, ("f1", "f4")),
    Table("d", 4, 10, ("f5",)),
)
"""Two features share a table, one feature looks up two tables; three dims."""

NUM_STEPS, NUM_WARM = 4, 3
JOBS = {
    "hot": Job(placement={"*": 3}, tables=TABLES, batch_sizes=(20, 16), num_steps=NUM_STEPS),
    "no_hot": Job(placement={"*": 0}, tables=TABLES, batch_sizes=(20,), num_steps=NUM_STEPS),
    "one_asks": Job(placement={"*": 2}, tables=TABLES, batch_sizes=(0, 20), num_steps=NUM_STEPS),
}
"""Where one rank alone has samples, rows and gradients leave from different ranks."""

WORLD_SIZES = (2, 3)
FLOATS, IDS, MARKS, HEADER = torch.float32, torch.int32, torch.uint8, torch.int64


def _recorded(job: Job, driver: Driver, rank: int, world_size: int) -> list[Message]:
    """Messages of all steps but the first, in the second of which DDP makes new buckets."""
    pipeline = make_driver(driver, build(job, rank, world_size))
    run_to_the_end(pipeline, iter(batches_of(job, rank, range(NUM_WARM))))
    steps = range(NUM_WARM, NUM_WARM + job.num_steps)
    with MessageRecorder() as recorder:
        outputs = run_to_the_end(pipeline, iter(batches_of(job, rank, steps)))
    assert len(outputs) == job.num_steps
    return recorder.messages


def _warm_and_record(rank: int, world_size: int) -> dict[tuple[str, Driver], list[Message]]:
    return {
        (name, driver): _recorded(job, driver, rank, world_size)
        for name, job in _jobs(world_size).items()
        for driver in DRIVERS_OF[world_size]
    }


def _jobs(world_size: int) -> dict[str, Job]:
    one_asks = (*[0] * (world_size - 1), 20)
    return {**JOBS, "one_asks": dataclasses.replace(JOBS["one_asks"], batch_sizes=one_asks)}


@dataclasses.dataclass
class Travel:
    """Elements that each rank sends over a whole run, shape ``(W,)``, and what all ranks sum."""

    ids_W: np.ndarray
    row_elements_W: np.ndarray
    gradient_elements_W: np.ndarray
    hot_elements: int = 0
    lookups_W: Any = None


def _rows_of_table(job: Job, table: Table, rank: int, step: int) -> np.ndarray:
    """Every lookup of a rank's batch in one table, repeats and all."""
    features = make_batch(job, rank, step).sparse_features
    return np.concatenate([features[feature].values().numpy() for feature in table.features])


def _hot_rows(job: Job, table: Table) -> np.ndarray:
    """The rows that a job's plan makes hot: every third first."""
    by_thirds = sorted(range(table.rows), key=lambda row: (row % 3, row))
    return np.array(by_thirds[: int(job.placement["*"])], dtype=np.int64)


def _expected(job: Job, world_size: int, steps: Sequence[int]) -> Travel:
    zeros = [np.zeros(world_size, dtype=np.int64) for _ in range(4)]
    travel = Travel(*zeros[:3], lookups_W=zeros[3])
    for step in steps:
        for table in job.tables:
            hot = _hot_rows(job, table)
            block = -(-table.rows // world_size)  # stock row-wise homes
            touched: set[int] = set()
            for rank in range(world_size):
                lookups = _rows_of_table(job, table, rank, step)
                used = np.unique(lookups)
                touched |= set(used[np.isin(used, hot)].tolist())
                homes = used[~np.isin(used, hot)] // block
                incoming_W = np.bincount(homes, minlength=world_size)
                incoming_W[rank] = 0  # at home here
                travel.ids_W[rank] += incoming_W.sum()
                travel.gradient_elements_W[rank] += incoming_W.sum() * table.dim
                travel.row_elements_W += incoming_W * table.dim
                travel.lookups_W[rank] += lookups.size
            travel.hot_elements += len(touched) * table.dim
    return travel


CASES = [
    (world_size, name, driver)
    for world_size in WORLD_SIZES
    for name in JOBS
    for driver in DRIVERS_OF[world_size]
]


@pytest.mark.parametrize(("world_size", "name", "driver"), CASES, ids=str)
def test_every_row_travels_once(world_size: int, name: str, driver: Driver) -> None:
    job = _jobs(world_size)[name]
    expected = _expected(job, world_size, range(NUM_WARM, NUM_WARM + NUM_STEPS))
    for rank, by_case in enumerate(run_once(_warm_and_record, world_size)):
        messages = by_case[name, driver]
        assert elements(messages, IDS) == expected.ids_W[rank]
        sent = expected.row_elements_W[rank] + expected.gradient_elements_W[rank]
        assert elements(messages, FLOATS) == sent


@pytest.mark.parametrize(("world_size", "name", "driver"), CASES, ids=str)
def test_hot_rows_are_summed_once(world_size: int, name: str, driver: Driver) -> None:
    job = _jobs(world_size)[name]
    expected = _expected(job, world_size, range(NUM_WARM, NUM_WARM + NUM_STEPS))
    dense = 1 + sum(table.dim * len(table.features) for table in job.tables)
    for by_case in run_once(_warm_and_record, world_size):
        reduced = elements(by_case[name, driver], FLOATS, reduced=True)
        assert reduced == expected.hot_elements + NUM_STEPS * dense


@pytest.mark.parametrize(("world_size", "name", "driver"), CASES, ids=str)
def test_little_else_travels(world_size: int, name: str, driver: Driver) -> None:
    """A header of some words per step; with lookahead a mark of one byte per row asked for."""
    by_rank = [by_case[name, driver] for by_case in run_once(_warm_and_record, world_size)]
    ids = sum(elements(messages, IDS) for messages in by_rank)
    marks = sum(elements(messages, MARKS) for messages in by_rank)
    looks_ahead = driver is not None and driver[1]
    assert 0 < marks <= ids if looks_ahead else marks == 0
    num_chunks = driver[0] if driver is not None else 1
    # counts per dim and chunk, three numbers, hot bits; four flags before the step
    words = (3 * num_chunks + 8) * (world_size - 1)
    for messages in by_rank:
        known = elements(messages, IDS, FLOATS, MARKS, HEADER)
        assert known == sum(m.num_elements for m in messages if m.peer != -1)
        # one more than steps: the header that tells of the end of data; first, who has data
        assert elements(messages, HEADER) <= (NUM_STEPS + 1) * words + 4 * (world_size - 1)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_the_batches_repeat_rows(world_size: int) -> None:
    """Guards the comparison: without repeats, sending every lookup would pass as well."""
    for name, job in _jobs(world_size).items():
        expected = _expected(job, world_size, range(NUM_WARM, NUM_WARM + NUM_STEPS))
        assert expected.lookups_W.sum() > 3 * expected.ids_W.sum() > 0, name
        assert (expected.hot_elements > 0) == (job.placement["*"] != 0), name


BAG_TABLES = (Table("a", 8, 60, ("f0",)), Table("b", 16, 40, ("f1", "f2"), mean=True))
"""On two ranks ``a`` is at home on rank 0 and ``b`` on rank 1."""
FEATURES_AT_HOME, DIM = {0: ["f0"], 1: ["f1", "f2"]}, {0: 8, 1: 16}
BAG_JOB = Job(placement={"*": "bags"}, tables=BAG_TABLES, batch_sizes=(20, 12), num_steps=NUM_STEPS)


def _record(rank: int, world_size: int) -> dict[Driver, list[Message]]:
    return {driver: _recorded(BAG_JOB, driver, rank, world_size) for driver in DRIVERS}


@pytest.mark.parametrize("driver", DRIVERS)
def test_a_vector_travels_for_each_bag_and_its_gradient_back(driver: Driver) -> None:
    for rank, recorded in enumerate(run_once(_record, 2)):
        other = 1 - rank
        away, mine = len(FEATURES_AT_HOME[other]), len(FEATURES_AT_HOME[rank])
        vectors = BAG_JOB.batch_size(other) * mine * DIM[rank]
        gradients = BAG_JOB.batch_size(rank) * away * DIM[other]
        sent = elements(recorded[driver], torch.float32)
        assert sent == BAG_JOB.num_steps * (vectors + gradients)


@pytest.mark.parametrize("driver", DRIVERS)
def test_each_lookup_is_sent_once_and_each_bags_length(driver: Driver) -> None:
    for rank, recorded in enumerate(run_once(_record, 2)):
        away = FEATURES_AT_HOME[1 - rank]
        lengths = [
            batch.sparse_features[name].lengths()
            for batch in batches_of(BAG_JOB, rank, range(NUM_WARM, NUM_WARM + NUM_STEPS))
            for name in away
        ]
        expected = sum(int(bag_lengths.sum()) + bag_lengths.numel() for bag_lengths in lengths)
        assert elements(recorded[driver], torch.int32) == expected
