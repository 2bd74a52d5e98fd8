"""Sequence tables against stock TorchRec: losses, weights, optimizer state; ranks 1 to 4.

An EmbeddingCollection and two EmbeddingBagCollections in one model, by the plain loop and by the
interleaved pipeline in 1, 2 and 4 micro-batches, looking ahead or not. Tolerances are those of
``test_against_stock``: float32 sums in another order, nothing else.
"""

import dataclasses
from typing import Any

import pytest
from torch import Tensor
from torchrec.datasets.utils import Batch
from torchrec.distributed import DistributedModelParallel

from tests.sharding.jobs import Result, assert_same_results
from tests.sharding.sequence_jobs import (
    TABLES_OF,
    Driver,
    SequenceJob,
    build_sequences,
    train_sequences,
)
from tests.support.shared_run import run_once
from tests.train_pipeline.runs import make_driver, pipeline_of, plain_steps, run_to_the_end

SETTINGS = [(1, False), (1, True), (2, True), (4, False), (4, True)]
"""Micro-batches and lookahead."""
UNEVEN = (16, 9, 1)
"""None without samples: stock cannot look up sequences for a rank that has none."""

BASE = SequenceJob(placement={"*": 2})
SGD = {"optimizer": "sgd", "optimizer_kwargs": {"lr": 0.2}}
JOBS: dict[str, SequenceJob] = {
    "no_hot": dataclasses.replace(BASE, placement={"*": 0}),
    "sequences_first": dataclasses.replace(
        BASE, features=("history", "target", "shops", "tags", "genres", "user", "more_tags")
    ),
    "some_hot": dataclasses.replace(BASE, batch_sizes=UNEVEN),
    "all_hot": dataclasses.replace(BASE, placement={"item": 40, "shop": 3, "*": 5}, **SGD),
    "indices": dataclasses.replace(BASE, need_indices=True, batch_sizes=UNEVEN),
    "weights": dataclasses.replace(BASE, weighted=True, **SGD),
    "in_waves": dataclasses.replace(BASE, waves={"shop": 1, "tag": 7}),
    "bags": dataclasses.replace(
        BASE,
        placement={"user": "bags", "genre": "bags", "*": 2},
        features=("user", "tags", "more_tags", "target", "genres", "history", "shops"),
        num_steps=6,
    ),
    "all_bags": dataclasses.replace(
        BASE,
        placement={"item": 1, "shop": 0, "*": "bags"},
        weighted=True,
        batch_sizes=UNEVEN,
        num_steps=6,
        **SGD,
    ),
    "by_host": dataclasses.replace(
        BASE, placement={"*": 3}, by_host=("*",), batch_sizes=(6, 3, 1, 5)
    ),
    "by_host_beside_bags": dataclasses.replace(
        BASE,
        placement={"*": 3, "user": "bags"},
        by_host=("item", "shop"),
        batch_sizes=(6, 3, 4, 5),
    ),
    "half_stock": dataclasses.replace(
        BASE, placement={"item": 2, "shop": "table_wise", "user": "table_wise", "*": 1}
    ),
}
"""Each is compared with stock table-wise under TrainPipelineSparseDist. In two of them a module's
features come first and in the order of its tables, which TorchRec does not reorder."""


def _sparse_dist(model: DistributedModelParallel, batches: list[Batch]) -> list[Tensor]:
    return run_to_the_end(make_driver(None, model), iter(batches))


def _interleaved(k: int, lookahead: bool) -> Driver:
    def drive(model: DistributedModelParallel, batches: list[Batch]) -> list[Tensor]:
        pipeline = pipeline_of(model, num_micro_batches=k, lookahead=lookahead)
        outputs = run_to_the_end(pipeline, iter(batches))
        interleaved = {line.split(" in ")[0] for line in pipeline.summary().splitlines()}
        assert interleaved >= {f"{path}: interleaved" for path in TABLES_OF}
        return outputs

    return drive


DRIVERS: dict[str, Driver] = {
    "plain": plain_steps,
    "SparseDist": _sparse_dist,
    **{f"K={k}, {ahead=}": _interleaved(k, ahead) for k, ahead in SETTINGS},
}
EXTREMES = ("SparseDist", "K=1, ahead=False", "K=4, ahead=True")
DRIVERS_OF = {
    1: dict.fromkeys(("some_hot", "all_hot", "bags"), ("plain", "K=2, ahead=True")),
    2: {
        **{name: EXTREMES for name, job in JOBS.items() if not job.by_host},
        "weights": ("plain", *EXTREMES),
        **dict.fromkeys(("some_hot", "bags"), tuple(DRIVERS)),
    },
    3: dict.fromkeys(("no_hot", "some_hot", "bags", "all_bags"), ("SparseDist", "K=2, ahead=True")),
    4: dict.fromkeys(
        ("by_host", "by_host_beside_bags"), ("SparseDist", "K=1, ahead=True", "K=4, ahead=True")
    ),
}
"""By number of ranks and job."""
CASES = [
    (world_size, name, driver)
    for world_size, by_job in DRIVERS_OF.items()
    for name, drivers in by_job.items()
    for driver in drivers
]


def _train(job: SequenceJob, rank: int, world_size: int, driver: Driver) -> Result:
    return train_sequences(build_sequences(job, world_size), job, rank, driver)


def _run(rank: int, world_size: int) -> dict[Any, Result]:
    results: dict[Any, Result] = {}
    for name, drivers in DRIVERS_OF[world_size].items():
        stock = dataclasses.replace(JOBS[name], placement={"*": "table_wise"})
        results[name, "stock"] = _train(stock, rank, world_size, _sparse_dist)
        for driver in drivers:
            results[name, driver] = _train(JOBS[name], rank, world_size, DRIVERS[driver])
    return results


@pytest.mark.parametrize(("world_size", "name", "driver"), CASES)
def test_sequences_train_as_stock(world_size: int, name: str, driver: str) -> None:
    ours, stock = (
        [found[name, each] for found in run_once(_run, world_size)] for each in (driver, "stock")
    )
    assert len(stock[0].losses) == JOBS[name].num_steps
    assert bool(ours[0].replicas) == (name != "no_hot")
    assert_same_results(ours, stock)
