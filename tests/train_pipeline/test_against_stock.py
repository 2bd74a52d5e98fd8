"""Interleaved training directly against stock TorchRec: K 1, 2, 4, looking ahead or not, 2-3 ranks.

Samples as they come and in order: a loss needs each output at its sample's place.

What is compared: the output of every step, every table's weights and optimizer state, and the dense
weights. The stock side is TorchRec's own sharder with TorchRec's own drivers, on the same first
weights and batches: table-wise under ``TrainPipelineSparseDist``, row-wise by the plain loop. No
line of this package runs there. Of optimizers that stock cannot run on the CPU the witness is the
whole model on every rank, with FBGEMM's formulas and gradients averaged over ranks.

Some train under another default dtype, which is the dense part's: tables stay what they are.

Tolerance: float32 sums in another order, nothing else. Stock sums a row's gradient lookup by
lookup, we sum it per micro-batch and rank first; a rounding is 6e-8 relative, and six steps
amplify it by less than 1e3. A term near zero keeps the absolute error of its sum, hence ATOL.
"""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from tests.sharding import jobs
from tests.support.dense_updates import OPTIMIZERS as NOT_IN_FBGEMM
from tests.support.dense_updates import train_unsharded
from tests.support.shared_run import run_once
from tests.train_pipeline.runs import (
    DRIVERS_OF,
    SETTINGS_OF,
    Driver,
    Run,
    batches_of,
    compare_runs,
    default_dtype,
    plain_steps,
    train_job,
)

NUM_STEPS = 5

MIXED_DIMS = (
    jobs.Table("a", 8, 50, ("f0",)),
    jobs.Table("b", 16, 3, ("f1", "f2"), mean=True),
    jobs.Table("two_rows", 16, 2, ("f0", "f4")),
    jobs.Table("d", 4, 40, ("f5",), mean=True),
)
"""Two features of one table, one feature of two tables, fewer rows than ranks."""

FOUR_ROWS = (
    jobs.Table("a", 8, 50, ("f0",)),
    jobs.Table("b", 16, 4, ("f1", "f2"), mean=True),
    jobs.Table("c", 16, 20, ("f0", "f3")),
)

OPTIMIZER_KWARGS = {
    "sgd": {"lr": 0.5},
    "adagrad": {"lr": 0.1, "eps": 1e-2},
    "rowwise_adagrad": {"lr": 0.1, "eps": 1e-2},
    "adam": {"lr": 0.1, "eps": 1e-2, "beta1": 0.8, "weight_decay": 0.1},
    "partial_rowwise_lamb": {"lr": 0.05, "eps": 1e-2, "beta2": 0.9},
}
"""With Adagrad's usual epsilon of 1e-8, a first gradient that cancels to nearly zero would move its
weight by the learning rate times whatever share of it is rounding."""

HOT: dict[str, Any] = {"*": 2, "b": 1}


@dataclass(frozen=True)
class Comparison:
    """A job of ours, and the stock placement that it is compared with, or ``unsharded``."""

    job: jobs.Job
    stock: str
    dtype: torch.dtype = torch.float32
    """torch's default while it trains."""

    def drivers(self, world_size: int) -> tuple[Driver, ...]:
        """Of ours; TorchRec's pipeline over hot/cold tables is one of them at times."""
        is_plain = self.stock != "unsharded" and self.dtype is torch.float32
        return (SETTINGS_OF if is_plain else DRIVERS_OF)[world_size]


def _comparisons() -> dict[str, Comparison]:
    """Each optimizer against both stock placements.

    Weighted means are compared row-wise only: there stock divides by the sum of weights, as an
    unsharded table does; table-wise it divides by the count.
    """
    found = {}
    for optimizer, kwargs in OPTIMIZER_KWARGS.items():
        base = jobs.Job(
            placement=HOT,
            tables=MIXED_DIMS,
            optimizer=optimizer,
            optimizer_kwargs=kwargs,
            num_steps=NUM_STEPS,
        )
        if optimizer in NOT_IN_FBGEMM:
            changes: dict[str, Any] = {"placement": {"*": 2}, "batch_sizes": (16, 9, 0)}
            if optimizer != "adam":
                changes = {"placement": {"a": 2, "b": "bags", "c": 0}, "batch_sizes": (5, 8)}
            job = replace(base, tables=FOUR_ROWS, **changes)
            found[f"{optimizer}/unsharded"] = Comparison(job, "unsharded")
            continue
        # stock row-wise is right on the CPU here only: one dim, no table smaller than 3 ranks
        weighted = replace(base, tables=jobs.PLAIN, weighted=True, seed=1)
        found[f"{optimizer}/table_wise"] = Comparison(base, "table_wise")
        found[f"{optimizer}/weighted/row_wise"] = Comparison(weighted, "row_wise")
        bags = {"*": "bags"} if optimizer == "sgd" else {"*": "bags", "a": 2, "two_rows": 0}
        job = replace(base, placement=bags, batch_sizes=(16, 9, 0))
        found[f"{optimizer}/bags/table_wise"] = Comparison(job, "table_wise")
    base = found["adagrad/table_wise"].job
    shared = replace(MIXED_DIMS[-1], features=("f1", "f5"))
    job = replace(base, tables=(*MIXED_DIMS[:-1], shared), placement={**HOT, "d": "row_wise"})
    found["adagrad/means of a feature, one row_wise"] = Comparison(job, "table_wise")
    for name, changes in (
        ("adagrad/table_wise", {"batch_sizes": (16, 9, 0)}),
        ("adagrad/weighted/row_wise", {"placement": {"*": 0}}),
    ):
        found[name] = replace(found[name], job=replace(found[name].job, **changes))
    for name in (
        *("rowwise_adagrad/table_wise", "rowwise_adagrad/weighted/row_wise"),
        "adagrad/bags/table_wise",
    ):
        found[f"{name}/double"] = replace(found[name], dtype=torch.float64)
    return found


COMPARISONS = _comparisons()
COMPARED_ON = {
    2: tuple(COMPARISONS),
    3: tuple(
        name
        for name, each in COMPARISONS.items()
        if each.stock == "unsharded" or ("rowwise" in name and each.dtype is torch.float32)
    ),
}
"""By number of ranks: a third one changes nothing of an optimizer that stock has."""
CASES = [
    (world_size, name, driver)
    for world_size, names in COMPARED_ON.items()
    for name in names
    for driver in COMPARISONS[name].drivers(world_size)
]


def _stock(comparison: Comparison, rank: int, world_size: int) -> Run:
    job = replace(comparison.job, placement={"*": comparison.stock})
    batches = batches_of(job, rank, range(job.num_steps))
    if comparison.stock == "unsharded":
        optimizer = {"name": job.optimizer, **job.optimizer_kwargs}
        return train_unsharded(jobs.Model(job), batches, job.tables, **optimizer)
    if comparison.stock == "row_wise":
        model = jobs.build(job, rank, world_size)
        with default_dtype(comparison.dtype):
            outputs = plain_steps(model, batches)
        return jobs.result_of(model, []), outputs
    return train_job(job, None, rank, world_size, comparison.dtype)  # fused in backward


def _run(rank: int, world_size: int) -> dict[Any, Run]:
    found: dict[Any, Run] = {}
    for name in COMPARED_ON[world_size]:
        each = COMPARISONS[name]
        found[name, "stock"] = _stock(each, rank, world_size)
        for driver in each.drivers(world_size):
            found[name, driver] = train_job(each.job, driver, rank, world_size, each.dtype)
    return found


@pytest.mark.parametrize(("world_size", "name", "driver"), CASES)
def test_trains_as_stock(world_size: int, name: str, driver: Driver) -> None:
    by_rank = run_once(_run, world_size)
    stock = [on_rank[name, "stock"] for on_rank in by_rank]
    for _, outputs in stock:
        assert len(outputs) == NUM_STEPS
        assert all(output.isfinite().all() for output in outputs)
    tables = {table.name for table in COMPARISONS[name].job.tables}
    weights = jobs.whole([result for result, _ in stock], "weights")
    assert {key.split(".")[-2] for key in weights} == tables
    compare_runs(by_rank, (name, driver), (name, "stock"))


@pytest.mark.parametrize("name", list(COMPARISONS))
def test_the_comparison_is_of_something(name: str) -> None:
    """Training moves every table, so that a step not taken would show; some bags are empty."""
    job = COMPARISONS[name].job
    first = jobs.Model(job).state_dict()
    stock = [on_rank[name, "stock"][0] for on_rank in run_once(_run, 2)]
    for key, trained in jobs.whole(stock, "weights").items():
        assert (trained - first[key]).abs().max() > 100 * (
            jobs.ATOL + jobs.RTOL * trained.abs().max()
        ), key
    lengths = jobs.make_batch(job, 0, 0).sparse_features.lengths()
    assert (lengths == 0).any()
    assert (lengths > 1).any()


def test_every_optimizer_is_compared() -> None:
    """FBGEMM's on the CPU."""
    compared = {c.job.optimizer for c in COMPARISONS.values() if c.stock != "unsharded"}
    assert compared == set(jobs.OPTIMIZERS) - {"lars", *NOT_IN_FBGEMM}
