"""A hot set that changes while a model trains: the training stays that of a plain loop.

Batches prefer low ids, while the first hot set is every third row, so rows change places in nearly
every look.
"""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Any

import pytest
import torch
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist

from tests.sharding.jobs import (
    CPU,
    ODD,
    PLAIN,
    Job,
    Result,
    build,
    dense_optimizer,
    result_of,
    storages_of,
    train,
    whole,
)
from tests.train_pipeline.runs import ATOL, RTOL, batches_of, pipeline_of
from torchrec_picasso import HotRowRefresher, Refresh
from torchrec_picasso.app.launch.run_ranks import RankError, run_ranks

OFTEN = Refresh(every_steps=2, half_life_steps=2, deviations=0.0, most_moved=1.0, check_steps=None)
JOBS = {
    "rows": Job(placement={"*": 6}),
    "adagrad_uneven": Job(
        placement={"*": 3, "one_row": 1, "two_rows": 0},
        tables=ODD,
        optimizer="adagrad",
        batch_sizes=(16, 9, 0),
    ),
    "waves": Job(
        placement={"*": 5, "b": 2},
        waves={"b": 1},
        optimizer="partial_rowwise_adam",
        optimizer_kwargs={"lr": 0.1, "eps": 1e-2},
    ),
    "mixed": Job(placement={"*": 5, "b": "table_wise", "c": "bags"}),
    "weighted_two_tables": Job(
        placement={"*": 4},
        tables=tuple(dataclasses.replace(table, mean=False) for table in PLAIN),
        weighted=True,
        two_tables=True,
    ),
}
DRIVERS: tuple[Any, ...] = ("sparse_dist", (1, False), (2, True), (4, True))
CASES = [(2, name, driver) for name in JOBS for driver in DRIVERS] + [
    (3, name, driver)
    for name in ("rows", "adagrad_uneven")
    for driver in ("sparse_dist", (4, True))
]


@dataclasses.dataclass
class Run:
    result: Result
    num_moved: int
    hot_rows: dict[str, list[int]]
    replicas_are_homes: bool


def _train(job: Job, rank: int, world_size: int, driver: Any) -> Run:
    model = build(job, rank, world_size)
    batches = batches_of(job, rank, range(job.num_steps))
    moved, refreshed = 0, None
    if driver == "sparse_dist":
        pipeline = TrainPipelineSparseDist(model, dense_optimizer(model), CPU)
        refresher = HotRowRefresher(model, OFTEN)
        left = iter(batches)
        for _ in batches:
            pipeline.progress(left)
            refreshed = refresher.step()
            moved += refreshed.num_moved if refreshed else 0
        hot_rows = refresher.hot_rows()
    else:
        pipeline = pipeline_of(
            model, num_micro_batches=driver[0], lookahead=driver[1], refresh=OFTEN
        )
        left = iter(batches)
        seen = None
        for _ in batches:
            pipeline.progress(left)
            if pipeline.last_refresh is not seen:
                seen = pipeline.last_refresh
                moved += seen.num_moved
        hot_rows = pipeline.hot_rows()
    result = result_of(model, [])
    return Run(
        result=result,
        num_moved=moved,
        hot_rows={name: rows.tolist() for name, rows in hot_rows.items()},
        replicas_are_homes=_replicas_are_homes(model),
    )


def _replicas_are_homes(model: Any) -> bool:
    """Whether this rank's own hot rows are what its replicas are."""
    return all(
        torch.equal(
            rows.replicas[storage._hot_homes.own_slots()], rows.homes[storage._hot_homes.own_rows_h]
        )
        for module in model.modules()
        for lookup in getattr(module, "_lookups", [])
        if hasattr(lookup, "_packs")
        for storage in storages_of(lookup)
        for rows in storage.tables.per_row()
    )


def _run(rank: int, world_size: int, names: tuple[str, ...]) -> dict[Any, Any]:
    found: dict[Any, Any] = {}
    for name in names:
        job = JOBS[name]
        model = build(job, rank, world_size)
        train(model, job, rank, range(job.num_steps))
        found[name, "plain"] = result_of(model, [])
        for _, case, driver in (c for c in CASES if c[0] == world_size and c[1] == name):
            found[case, driver] = _train(job, rank, world_size, driver)
    return found


@cache
def _once(world_size: int) -> list[dict[Any, Any]] | RankError:
    names = tuple(dict.fromkeys(name for size, name, _ in CASES if size == world_size))
    try:
        return run_ranks(_run, world_size, names, timeout_s=200)
    except RankError as error:
        return error


@pytest.mark.parametrize(("world_size", "name", "driver"), CASES)
def test_trains_as_the_plain_loop(world_size: int, name: str, driver: Any) -> None:
    by_rank = _once(world_size)
    if isinstance(by_rank, RankError):
        raise by_rank
    runs = [rank[name, driver] for rank in by_rank]
    plain = [rank[name, "plain"] for rank in by_rank]
    for kind in ("weights", "states"):
        torch.testing.assert_close(
            whole([run.result for run in runs], kind), whole(plain, kind), rtol=RTOL, atol=ATOL
        )
    torch.testing.assert_close(runs[0].result.dense, plain[0].dense, rtol=RTOL, atol=ATOL)
    assert runs[0].num_moved > 4
    assert all(run.hot_rows == runs[0].hot_rows for run in runs)
    assert all(run.replicas_are_homes for run in runs)
    for replicas in zip(*(run.result.replicas for run in runs)):
        for replica in replicas[1:]:
            torch.testing.assert_close(replica, replicas[0], rtol=0, atol=0)
