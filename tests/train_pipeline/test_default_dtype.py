"""torch's default dtype is the dense part's: tables and what is exchanged stay what they are."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from tests.sharding.jobs import ODD, PLAIN, Job, build, result_of
from tests.train_pipeline.drivers import Driver, make_driver
from tests.train_pipeline.runs import Run, assert_same_runs, batches_of, run_to_the_end
from torchrec_picasso.app.launch.run_ranks import run_ranks

ROWS = Job(placement={"*": 4}, weighted=True, optimizer="adagrad")
BAGS = Job(placement={"*": "bags"}, tables=PLAIN)
ODD_ROWS = Job(placement={"*": 2, "one_row": 0}, tables=ODD)
PAIRS = {
    "rows": (ROWS, dataclasses.replace(ROWS, placement={"*": "row_wise"})),
    "bags": (BAGS, dataclasses.replace(BAGS, placement={"*": "table_wise"})),
    "odd": (ODD_ROWS, dataclasses.replace(ODD_ROWS, placement={"*": "table_wise"})),
}
DRIVERS: tuple[Driver, ...] = (None, (1, True), (3, True))


def _train(job: Job, driver: Driver, rank: int, world_size: int) -> Run:
    model, batches = build(job, rank, world_size), batches_of(job, rank, range(4))
    pipeline = make_driver(driver, model)
    torch.set_default_dtype(torch.float64)
    try:
        outputs = run_to_the_end(pipeline, iter(batches))
        return result_of(model, []), outputs
    finally:
        torch.set_default_dtype(torch.float32)


def _beside_stock(rank: int, world_size: int) -> dict[Any, Run]:
    found: dict[Any, Run] = {}
    for name, (job, stock) in PAIRS.items():
        found[name] = _train(stock, None, rank, world_size)
        for driver in DRIVERS:
            found[name, driver] = _train(job, driver, rank, world_size)
    return found


def test_tables_train_as_in_stock_under_a_default_of_double() -> None:
    by_rank = run_ranks(_beside_stock, 2, timeout_s=100)
    for name in PAIRS:
        expected = [of_rank[name] for of_rank in by_rank]
        for driver in DRIVERS:
            assert_same_runs([of_rank[name, driver] for of_rank in by_rank], expected)
