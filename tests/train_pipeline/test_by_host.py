"""Rows that travel by host train as under stock TorchRec; ranks of one machine pretend to be hosts.

2 x 2, 2 x 4 and 4 x 2 hosts and ranks; the plain loop, TorchRec's pipeline and ours with each
setting. Looking ahead changes no bit, nor does time: a relay sums gradients in a fixed order.
Random plans are those of ``test_exactness.py``, with rows by host. What else a run does, by host
too: refreshes, writes, prepared ids, data that ends, bad ids, ranks that fail, in their own files.
"""

import dataclasses
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.planner.types import ParameterConstraints, Topology
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from tests.sharding.jobs import (
    OPTIMIZERS,
    Job,
    Model,
    build,
    load_whole,
    params_of,
    result_of,
)
from tests.support.placing import distribute
from tests.support.shared_run import run_once
from tests.train_pipeline import runs, test_exactness
from torchrec_picasso import HotColdEmbeddingBagCollectionSharder, hot_cold_planner
from torchrec_picasso.app.launch.run_ranks import run_ranks
from torchrec_picasso.exchange.all_to_all import Ranks


def _by_host(job: Job, *batch_sizes: int) -> Job:
    """The same job with all hot/cold tables by host, on four ranks or more."""
    placement = {name: 0 if place == "bags" else place for name, place in job.placement.items()}
    sizes = batch_sizes or (*job.batch_sizes, 4)
    return dataclasses.replace(job, placement=placement, batch_sizes=sizes, by_host=("*",))


JOBS = {
    name: _by_host(test_exactness.JOBS[name], 16, 9, 0, 5)
    for name in ("rows", "waves_weighted_uneven", "mixed")
}
ROWS = JOBS["rows"]
JOBS["cold"] = dataclasses.replace(ROWS, placement={"*": 0}, lopsided=True)
SETTINGS_OF = {
    (2, 2): runs.SETTINGS_OF[2],
    (2, 4): runs.SETTINGS_OF[3],
    (4, 2): runs.SETTINGS_OF[3],
}
"""By number of hosts, and of ranks on each."""
NAMES_OF = {(2, 2): tuple(JOBS), (2, 4): ("rows",), (4, 2): ("rows", "cold")}
CASES = [
    (hosts, name, setting)
    for hosts, names in NAMES_OF.items()
    for name in names
    for setting in SETTINGS_OF[hosts]
]


def _train(rank: int, world_size: int, hosts: tuple[int, int]) -> dict[Any, runs.Run]:
    found: dict[Any, runs.Run] = {}
    for name in NAMES_OF[hosts]:
        job = dataclasses.replace(JOBS[name], num_places=hosts[1])
        stock = dataclasses.replace(job, placement={"*": "table_wise"})
        for kind, each in (("stock", stock), ("plain", job)):
            found[name, kind] = runs.plain_run(each, rank, world_size)
        for setting in SETTINGS_OF[hosts]:
            found[name, setting] = runs.train_job(job, setting, rank, world_size)
    if hosts == (2, 2):  # on hosts of the jobs before
        model, batches = _planned(ROWS, world_size), runs.batches_of(ROWS, rank, range(5))
        outputs = runs.run_to_the_end(runs.pipeline_of(model), iter(batches))
        found["planned"] = result_of(model, []), outputs
    job = dataclasses.replace(JOBS[NAMES_OF[hosts][0]], num_places=hosts[1])
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
    runs.compare_runs(by_rank, "planned", ("rows", "stock"))
    assert all(on_rank["planned"][0].replicas for on_rank in by_rank)


@pytest.mark.parametrize("hosts", NAMES_OF)
def test_neither_time_nor_looking_ahead_changes_a_bit(hosts: tuple[int, int]) -> None:
    by_rank, names = _trained(hosts), NAMES_OF[hosts]
    runs.compare_runs(by_rank, "late", (names[0], (4, True)), rtol=0, atol=0)
    for name in names if hosts == (2, 2) else ():
        for num_micro_batches in (1, 4):
            keys = ((name, (num_micro_batches, ahead)) for ahead in (True, False))
            runs.compare_runs(by_rank, *keys, rtol=0, atol=0)


SEEDS_OF = {(2, 2): range(6), (2, 4): (6, 22, 51), (4, 2): (7, 19, 29)}


@pytest.mark.parametrize("hosts", SEEDS_OF)
def test_random_plans_train_as_stock(hosts: tuple[int, int]) -> None:
    def by_host(job: Job) -> Job:
        return dataclasses.replace(_by_host(job), num_places=hosts[1])

    seeds = [f"hosts/{number}" for number in SEEDS_OF[hosts]]
    assert any(
        len(job.tables) > 1
        and any(isinstance(place, int) and place for place in job.placement.values())
        and settings.get("lookahead")
        and "refresh" in settings
        for job, settings in map(test_exactness.draw_case, seeds)
    )
    test_exactness.check_cases(seeds, hosts[0] * hosts[1], by_host)


SMALL = Job(placement={"*": 4}, by_host=("*",))


def _look_away(rank: int, world_size: int, job: Job, with_graph: bool) -> list[Tensor]:
    """An evaluation by hand; rank 1 looks at what its second lookup gives, and at nothing else."""
    model, outputs = build(job, rank, world_size).eval(), []
    with torch.set_grad_enabled(with_graph):
        for step, batch in enumerate(runs.batches_of(job, rank, range(4))):
            if rank == 1 and step != 1:
                model.module.ebc(batch.sparse_features)
            else:
                outputs.append(model(batch)[1].detach())
    dist.barrier()
    return outputs


@pytest.mark.parametrize("with_graph", [False, True])
def test_a_rank_that_does_not_look_at_its_rows_passes_on_those_of_others(with_graph: bool) -> None:
    stock = dataclasses.replace(SMALL, placement={"*": "table_wise"})
    mine, its = (run_ranks(_look_away, 4, job, with_graph, timeout_s=60) for job in (SMALL, stock))
    torch.testing.assert_close(mine, its)
