"""A hot set that changes while a model trains: the training stays that of a plain loop.

Batches prefer low ids, while the first hot set is every third row, so rows change places in nearly
every look. What was counted goes on under another plan: other hot rows, homes and ranks. Also
beside what else a run does: sequences, evaluation, detaching, a second pipeline, data that ends
sooner on one rank, and bags."""

import dataclasses
import logging
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torchrec.datasets.utils import Batch
from torchrec.distributed import DistributedModelParallel

from tests.sharding import jobs
from tests.sharding.jobs import Result, assert_same_results
from tests.sharding.sequence_jobs import SequenceJob, build_sequences, train_sequences
from tests.support.shared_run import run_once
from tests.train_pipeline.runs import (
    Driver,
    batches_of,
    make_driver,
    pipeline_of,
    plain_steps,
    run_to_the_end,
)
from torchrec_picasso import HotRowRefresher, InterleavedTrainPipeline, PicassoError, Refresh
from torchrec_picasso.app.launch.run_ranks import run_ranks
from torchrec_picasso.rows.hot_rows import SavedUses
from torchrec_picasso.storage import row_storage

OFTEN = Refresh(every_steps=2, half_life_steps=2, deviations=0.0, most_moved=1.0, check_steps=None)
JOBS = {
    "rows": jobs.Job(placement={"*": 6}),
    "adagrad_uneven": jobs.Job(
        placement={"*": 3, "one_row": 1, "two_rows": 0},
        tables=jobs.ODD,
        optimizer="adagrad",
        batch_sizes=(16, 9, 0),
    ),
    "waves": jobs.Job(
        placement={"*": 5, "b": 2},
        waves={"b": 1},
        optimizer="partial_rowwise_adam",
        optimizer_kwargs={"lr": 0.1, "eps": 1e-2},
    ),
    "mixed": jobs.Job(placement={"*": 5, "b": "table_wise", "c": "bags"}),
    "without_hosts": jobs.Job(placement={"*": 6}, batch_sizes=(16, 9, 3, 5)),
    "by_host": jobs.Job(placement={"*": 6}, batch_sizes=(16, 9, 3, 5), by_host=("*",)),
    "weighted_two_tables": jobs.Job(
        placement={"*": 4},
        tables=tuple(dataclasses.replace(table, mean=False) for table in jobs.PLAIN),
        weighted=True,
        two_tables=True,
    ),
}
DRIVERS: tuple[Driver, ...] = (None, (1, False), (2, True), (4, True))
HOSTS = ("without_hosts", "by_host")
CASES = [
    *((2, name, driver) for name in JOBS if name not in HOSTS for driver in DRIVERS),
    *((3, name, driver) for name in ("rows", "adagrad_uneven") for driver in (None, (4, True))),
    *((4, name, driver) for name in HOSTS for driver in (None, (1, True), (4, True))),
]


@dataclasses.dataclass
class Run:
    result: jobs.Result
    num_moved: int
    hot_rows: dict[str, list[int]]
    replicas_are_homes: bool
    num_logged: int


def _train(job: jobs.Job, rank: int, world_size: int, driver: Driver) -> Run:
    model, batches = jobs.build(job, rank, world_size), batches_of(job, rank, range(job.num_steps))
    left, moved = iter(batches), []
    logged = _log_of("torchrec_picasso.rows.refresher")
    if driver is None:
        pipeline, refresher = make_driver(None, model), HotRowRefresher(model, OFTEN)
        for _ in batches:
            pipeline.progress(left)
            moved.append(refresher.step())
        hot_rows = refresher.hot_rows()
    else:
        k, lookahead = driver
        pipeline = pipeline_of(model, num_micro_batches=k, lookahead=lookahead, refresh=OFTEN)
        for _ in batches:
            pipeline.progress(left)
            if pipeline.last_refresh not in moved:
                moved.append(pipeline.last_refresh)
        hot_rows = pipeline.hot_rows()
    return Run(
        result=jobs.result_of(model, []),
        num_moved=sum(looked.num_moved for looked in moved if looked),
        hot_rows={name: rows.tolist() for name, rows in hot_rows.items()},
        replicas_are_homes=_replicas_are_homes(model),
        num_logged=sum(each.getMessage().startswith("hot set refreshed: ") for each in logged),
    )


def _log_of(name: str) -> list[logging.LogRecord]:
    """Returns a list that gets what a logger of this process says from now on."""
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logger = logging.getLogger(name)
    logger.handlers = [handler]
    logger.setLevel(logging.INFO)
    return records


def _replicas_are_homes(model: Any) -> bool:
    """Whether this rank's own hot rows are what its replicas are."""
    return all(
        torch.equal(rows.replicas[row_H >= 0], rows.homes[row_H[row_H >= 0]])
        for storage in jobs.storages_of(model)
        for row_H in [storage.hot_homes.own_row_H]
        for rows in storage.tables.per_row()
    )


def _run(rank: int, world_size: int) -> dict[Any, Any]:
    found: dict[Any, Any] = {}
    for size, name, driver in CASES:
        if size == world_size:
            # entering rows fill their replicas one by one
            with mock.patch.object(row_storage, "_MOST_SENT", 1 if driver == (4, True) else 100):
                found[name, driver] = _train(JOBS[name], rank, world_size, driver)
    for name in dict.fromkeys(name for name, _ in found):
        model = jobs.build(JOBS[name], rank, world_size)
        jobs.train(model, JOBS[name], rank, range(JOBS[name].num_steps))
        found[name, "plain"] = jobs.result_of(model, [])
    return found


@pytest.mark.parametrize(("world_size", "name", "driver"), CASES, ids=str)
def test_trains_as_the_plain_loop(world_size: int, name: str, driver: Driver) -> None:
    by_rank = run_once(_run, world_size)
    runs = [found[name, driver] for found in by_rank]
    jobs.assert_same_results(
        [run.result for run in runs], [found[name, "plain"] for found in by_rank]
    )
    assert runs[0].num_moved > 4
    assert all(run.hot_rows == runs[0].hot_rows for run in runs)
    assert all(run.replicas_are_homes for run in runs)
    assert all(run.num_logged for run in runs)


@pytest.mark.parametrize("driver", [None, (1, True), (4, True)], ids=str)
def test_ranks_that_ask_are_counted_not_hosts(driver: Driver) -> None:
    for found in run_once(_run, 4):
        flat, mine = (found[name, driver] for name in HOSTS)
        assert (mine.hot_rows, mine.num_moved) == (flat.hot_rows, flat.num_moved)


JOB = jobs.Job(placement={"*": 3, "one_row": 1}, tables=jobs.ODD)
SELDOM = Refresh(every_steps=1000, check_steps=None)


def uses_by_row(saved: SavedUses | None) -> dict[str, dict[int, float]]:
    """Uses by row; those that there are."""
    return {
        name: {int(row): float(use) for row, use in zip(rows, uses) if use}
        for name, (rows, uses) in saved.uses_by_table.items()
    }


def counted(rank: int, world_size: int) -> SavedUses:
    pipeline = pipeline_of(jobs.build(JOB, rank, world_size), refresh=SELDOM)
    batches = iter(batches_of(JOB, rank, range(5)))
    for _ in range(5):
        pipeline.progress(batches)
    saved = pipeline.saved_uses()
    assert saved is not None
    return saved


def count_on(rank: int, world_size: int, saved: SavedUses, num_hot: int) -> Any:
    job = dataclasses.replace(JOB, placement={"*": num_hot, "one_row": 0})
    model = jobs.build(job, rank, world_size)
    model.eval()  # nothing is counted
    pipeline = pipeline_of(model, refresh=SELDOM)
    assert pipeline.saved_uses() is None
    pipeline.restore_uses(saved)
    pipeline.progress(iter(batches_of(job, rank, range(1))))
    again = pipeline.saved_uses()
    return uses_by_row(again), again.num_batches


@pytest.mark.parametrize(("world_size", "num_hot"), [(2, 6), (3, 5)])
def test_uses_go_on_under_another_plan(world_size: int, num_hot: int) -> None:
    first, second = run_ranks(counted, 2, timeout_s=60)
    expected = uses_by_row(first)
    assert expected == uses_by_row(second)
    assert sum(map(len, expected.values())) > 10
    assert first.num_batches > 0
    for found, num_batches in run_ranks(count_on, world_size, first, num_hot, timeout_s=60):
        assert num_batches == first.num_batches
        for name, uses in found.items():
            assert uses == pytest.approx(expected.get(name, {})), name
        assert set(found) >= {name for name, uses in expected.items() if uses} - {"one_row"}


LOOKS = Refresh(every_steps=2, half_life_steps=2, deviations=0.0, check_steps=None)
SEQUENCES = SequenceJob(
    placement={"item": 6, "shop": 1, "user": "bags", "tag": 2, "genre": 3},
    num_steps=9,
    batch_sizes=(6, 3),
)
NOT_TRAINED = range(3, 5)
Steps = Callable[[DistributedModelParallel, list[Batch]], list[Tensor]]
MOVED: dict[str, int] = {}
"""By driver, on this rank."""


def _pipeline(model: DistributedModelParallel, **settings: Any) -> InterleavedTrainPipeline:
    return pipeline_of(model, **{"num_micro_batches": 2, "lookahead": True, **settings})


def _stepwise(
    name: str, pipeline: Any, batches: list[Batch], look: Callable[[int], list[Any]]
) -> list[Tensor]:
    """Outputs; counts the rows that moved by what ``look`` gives after each step."""
    outputs, left, moved = [], iter(batches), 0
    for step, _ in enumerate(batches):
        outputs.append(pipeline.progress(left))
        moved += sum(found.num_moved for found in look(step) if found)
    MOVED[name] = moved
    return outputs


def _by_itself(model: DistributedModelParallel, batches: list[Batch]) -> list[Tensor]:
    pipeline = _pipeline(model, refresh=LOOKS)
    return _stepwise("by_itself", pipeline, batches, lambda step: [pipeline.last_refresh])


def _with_trial(model: DistributedModelParallel, batches: list[Batch]) -> list[Tensor]:
    """Settings are tried on the same steps; coverage is checked in each."""
    often = dataclasses.replace(LOOKS, check_steps=1)
    pipeline = _pipeline(model, num_micro_batches=None, lookahead=None, refresh=often)
    outputs = run_to_the_end(pipeline, iter(batches))
    assert pipeline.last_refresh is not None
    return outputs


def _by_hand(model: DistributedModelParallel, batches: list[Batch]) -> list[Tensor]:
    """Somebody else changes hot rows between the steps of a pipeline that changes none."""
    pipeline, refresher = _pipeline(model, refresh=None), HotRowRefresher(model, LOOKS)
    outputs = _stepwise("by_hand", pipeline, batches, lambda step: [refresher.step()])
    assert pipeline.last_refresh is None
    assert _listed(pipeline.hot_rows()) == _listed(refresher.hot_rows())
    return outputs


def _detached(model: DistributedModelParallel, batches: list[Batch]) -> list[Tensor]:
    pipeline, refresher = _pipeline(model, refresh=None), HotRowRefresher(model, LOOKS)

    def look(step: int) -> list[Any]:
        if step % 3 != 1:
            return []
        pipeline.detach()
        found = [refresher.step() for _ in range(2)]
        pipeline.attach()
        return found

    return _stepwise("detached", pipeline, batches, look)


def _sparse_dist(model: DistributedModelParallel, batches: list[Batch]) -> list[Tensor]:
    pipeline, refresher = make_driver(None, model), HotRowRefresher(model, LOOKS)
    return _stepwise("sparse_dist", pipeline, batches, lambda step: [refresher.step()])


WAYS: dict[str, Steps] = {
    "by_itself": _by_itself,
    "with_trial": _with_trial,
    "by_hand": _by_hand,
    "detached": _detached,
    "sparse_dist": _sparse_dist,
}


def _evaluating(model: DistributedModelParallel, batches: list[Batch]) -> list[Tensor]:
    pipeline = _pipeline(model, refresh=LOOKS)
    outputs, left = [], iter(batches)
    for step, _ in enumerate(batches):
        model.train(step not in NOT_TRAINED)
        outputs.append(pipeline.progress(left))
    return outputs


def _plain_evaluating(model: DistributedModelParallel, batches: list[Batch]) -> list[Tensor]:
    outputs = []
    for step, batch in enumerate(batches):
        model.train(step not in NOT_TRAINED)
        outputs += plain_steps(model, [batch])
    return outputs


def _listed(rows: dict[str, Tensor]) -> dict[str, list[int]]:
    return {name: each.tolist() for name, each in rows.items()}


def _run_sequences(rank: int, world_size: int) -> tuple[dict[str, Result], dict[str, int], str]:
    drivers = {
        **WAYS,
        "evaluating": _evaluating,
        "plain": plain_steps,
        "plain_evaluating": _plain_evaluating,
    }
    found = {
        name: train_sequences(build_sequences(SEQUENCES, world_size), SEQUENCES, rank, driver)
        for name, driver in drivers.items()
    }
    return found, MOVED, _backward_over_a_change(rank, world_size)


def _backward_over_a_change(rank: int, world_size: int) -> str:
    """Returns what is said of hot rows that change between a forward and its backward."""
    job = dataclasses.replace(SEQUENCES, num_steps=1)
    model = build_sequences(job, world_size)
    refresher = HotRowRefresher(model, dataclasses.replace(LOOKS, every_steps=1))
    said = ""

    def drive(model: DistributedModelParallel, batches: list[Batch]) -> list[Tensor]:
        nonlocal said
        for _ in range(2):
            outputs = plain_steps(model, batches)
        loss, _ = model(batches[0])
        found = refresher.step()
        assert found.num_moved
        try:
            loss.backward()
        except PicassoError as error:
            said = str(error)
        return outputs

    train_sequences(model, job, rank, drive)
    return said


@pytest.mark.parametrize("name", [*WAYS, "evaluating"])
def test_sequences_train_as_the_plain_loop(name: str) -> None:
    plain = "plain_evaluating" if name == "evaluating" else "plain"
    runs, expected = (
        [found[each] for found, *_ in run_once(_run_sequences, 2)] for each in (name, plain)
    )
    assert_same_results(runs, expected)


def test_rows_did_move() -> None:
    moved, other = (each for _, each, _ in run_once(_run_sequences, 2))
    assert moved == other
    assert moved.keys() == {"by_itself", "by_hand", "detached", "sparse_dist"}
    assert min(moved.values()) > 2


def test_a_change_within_a_step_is_refused() -> None:
    for _, _, said in run_once(_run_sequences, 2):
        assert said.startswith("hot rows changed between a forward and its backward")
