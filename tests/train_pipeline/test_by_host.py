"""Rows that travel by host train as under stock TorchRec; ranks of one machine pretend to be hosts.

2 x 2, 2 x 4 and 4 x 2 hosts and ranks; the plain loop, TorchRec's pipeline and ours with each
setting. Looking ahead changes no bit, nor does time: a relay sums gradients in a fixed order.
Random plans are those of ``test_exactness.py``, with rows by host.
"""

import dataclasses
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.planner.types import ParameterConstraints, Topology
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from tests.sharding.jobs import (
    ODD,
    OPTIMIZERS,
    PLAIN,
    Job,
    Model,
    build,
    load_whole,
    params_of,
    result_of,
)
from tests.support.hosts import pretend_hosts
from tests.support.placing import distribute
from tests.support.shared_run import run_once
from tests.train_pipeline import runs
from tests.train_pipeline.test_exactness import NUM_STEPS, Case, draw_case
from torchrec_picasso import HotColdEmbeddingBagCollectionSharder, hot_cold_planner
from torchrec_picasso.app.launch.run_ranks import run_ranks
from torchrec_picasso.exchange.all_to_all import Ranks

ROWS = Job(
    placement={"*": 2, "one_row": 1},
    tables=ODD,
    by_host=("*",),
    batch_sizes=(16, 9, 0, 5),
    num_steps=5,
)
JOBS = {
    "hot": ROWS,
    "cold": dataclasses.replace(ROWS, placement={"*": 0}, lopsided=True),
    "waves": dataclasses.replace(
        ROWS,
        tables=tuple(dataclasses.replace(table, mean=False) for table in ODD),
        waves={"b": 1, "d": 3},
        weighted=True,
    ),
    "mixed": dataclasses.replace(ROWS, placement={"*": 2, "b": "table_wise"}, tables=PLAIN),
}
SETTINGS = ((1, False), (1, True), (2, True), (4, False), (4, True))
SETTINGS_OF: dict[tuple[int, int], tuple[tuple[int, bool], ...]] = {
    (2, 2): SETTINGS,
    (2, 4): ((1, True), (4, True)),
    (4, 2): ((1, True), (4, True)),
}
"""By number of hosts, and of ranks on each."""
NAMES_OF = {(2, 2): tuple(JOBS), (2, 4): ("hot",), (4, 2): ("cold",)}
CASES = [
    (hosts, name, setting)
    for hosts, names in NAMES_OF.items()
    for name in names
    for setting in SETTINGS_OF[hosts]
]


def _train(rank: int, world_size: int, hosts: tuple[int, int]) -> dict[Any, runs.Run]:
    pretend_hosts(rank, hosts[1])
    found: dict[Any, runs.Run] = {}
    for name in NAMES_OF[hosts]:
        job = JOBS[name]
        batches = runs.batches_of(job, rank, range(job.num_steps))
        stock = dataclasses.replace(job, placement={"*": "table_wise"})
        for kind, each in (("stock", stock), ("plain", job)):
            model = build(each, rank, world_size)
            outputs = runs.plain_steps(model, batches)
            found[name, kind] = result_of(model, []), outputs
        for setting in SETTINGS_OF[hosts]:
            found[name, setting] = runs.train_job(job, setting, rank, world_size)
    if hosts == (2, 2):
        model, batches = _planned(ROWS, world_size), runs.batches_of(ROWS, rank, range(5))
        outputs = runs.run_to_the_end(runs.pipeline_of(model), iter(batches))
        found["planned"] = result_of(model, []), outputs
    job = JOBS[NAMES_OF[hosts][0]]
    found["SparseDist"] = runs.train_job(job, None, rank, world_size)
    with _often_late(rank):
        found["late"] = runs.train_job(job, (4, True), rank, world_size)
    return found


def _planned(job: Job, world_size: int) -> DistributedModelParallel:
    """The job's model as the planner places it, whose constraints request rows by host."""
    model, sharder = Model(job), HotColdEmbeddingBagCollectionSharder()
    start = {name: value.detach().clone() for name, value in model.state_dict().items()}
    optimizer = OPTIMIZERS[job.optimizer]
    apply_optimizer_in_backward(optimizer, model.ebc.parameters(), job.optimizer_kwargs)
    constraints = {
        table.name: ParameterConstraints(cache_params=params_of(1, table.rows, 0, by_host=True))
        for table in job.tables
    }
    planner = hot_cold_planner(Topology(world_size, "cpu"), constraints=constraints)
    plan = planner.collective_plan(model, [sharder], dist.group.WORLD)
    sharded = distribute(model, plan.plan, [sharder])
    load_whole(sharded, start)
    return sharded


@contextmanager
def _often_late(rank: int) -> Iterator[None]:
    """Within it a rank comes late to exchanges, others than the other ranks."""
    draw, start = random.Random(rank), Ranks.start_all_to_all

    def start_late(*args: Any) -> Any:
        time.sleep(draw.choice((0.0, 0.0, 0.01)))
        return start(*args)

    with mock.patch.object(Ranks, "start_all_to_all", start_late):
        yield


def _trained(hosts: tuple[int, int]) -> list[dict[Any, runs.Run]]:
    return run_once(_train, hosts[0] * hosts[1], hosts)


@pytest.mark.parametrize(("hosts", "name", "setting"), CASES)
def test_trains_as_stock(hosts: tuple[int, int], name: str, setting: tuple[int, bool]) -> None:
    runs.compare_runs(_trained(hosts), (name, setting), (name, "stock"))


@pytest.mark.parametrize("hosts", NAMES_OF)
def test_every_driver_trains_as_stock(hosts: tuple[int, int]) -> None:
    by_rank, names = _trained(hosts), NAMES_OF[hosts]
    for name in names:
        runs.compare_runs(by_rank, (name, "plain"), (name, "stock"))
    runs.compare_runs(by_rank, "SparseDist", (names[0], "plain"), rtol=0, atol=0)


def test_rows_by_host_may_be_requested_of_the_planner() -> None:
    by_rank = _trained((2, 2))
    runs.compare_runs(by_rank, "planned", ("hot", "stock"))
    assert all(of_rank["planned"][0].replicas for of_rank in by_rank)


@pytest.mark.parametrize("hosts", NAMES_OF)
def test_neither_time_nor_looking_ahead_changes_a_bit(hosts: tuple[int, int]) -> None:
    by_rank, names = _trained(hosts), NAMES_OF[hosts]
    runs.compare_runs(by_rank, "late", (names[0], (4, True)), rtol=0, atol=0)
    for name in names if hosts == (2, 2) else ():
        for num_micro_batches in (1, 4):
            keys = ((name, (num_micro_batches, ahead)) for ahead in (True, False))
            runs.compare_runs(by_rank, *keys, rtol=0, atol=0)


def by_host(case: Case) -> Case:
    """The same case with all hot/cold tables by host."""
    job, settings = case
    placement = {name: 0 if place == "bags" else place for name, place in job.placement.items()}
    sizes = (*job.batch_sizes, 4)
    return dataclasses.replace(
        job, placement=placement, batch_sizes=sizes, by_host=("*",)
    ), settings


def _train_both(
    rank: int, world_size: int, num_places: int, cases: list[Case]
) -> list[tuple[runs.Run, runs.Run]]:
    pretend_hosts(rank, num_places)
    found = []
    for job, settings in cases:
        batches = runs.batches_of(job, rank, range(NUM_STEPS))
        model = build(job, rank, world_size)
        outputs = runs.run_to_the_end(runs.pipeline_of(model, **settings), iter(batches))
        stock_model = build(
            dataclasses.replace(job, placement={"*": "table_wise"}), rank, world_size
        )
        stock_outputs = runs.plain_steps(stock_model, batches)
        found.append(((result_of(model, []), outputs), (result_of(stock_model, []), stock_outputs)))
    return found


def check_cases(seeds: list[str], world_size: int, num_places: int) -> None:
    """Compares random plans with stock; says which one differs."""
    cases = [by_host(draw_case(seed)) for seed in seeds]
    by_rank = run_ranks(_train_both, world_size, num_places, cases, timeout_s=600)
    for number, case in enumerate(cases):
        try:
            runs.compare_runs([of_rank[number] for of_rank in by_rank], 0, 1)
        except AssertionError as error:
            raise AssertionError(f"seed {seeds[number]}: {case}") from error


def test_random_plans_train_as_stock() -> None:
    check_cases([f"hosts/{number}" for number in range(8)], 4, 2)
