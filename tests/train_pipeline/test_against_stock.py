"""Interleaved training directly against stock TorchRec: K 1, 2, 4, looking ahead or not, 2-3 ranks.

Samples as they come and in order: a loss needs each output at its sample's place.

What is compared: the loss of every step, every table's weights and optimizer state, and the dense
weights. The stock side is TorchRec's own sharder with TorchRec's own drivers, on the same first
weights and batches: table-wise under ``TrainPipelineSparseDist``, row-wise by the plain loop. No
line of this package runs there.

Tolerance: float32 sums in another order, nothing else. Stock sums a row's gradient lookup by
lookup, we sum it per micro-batch and rank first; a rounding is 6e-8 relative, and six steps
amplify it by less than 1e3. A term near zero keeps the absolute error of its sum, hence ATOL.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from tests.sharding.jobs import (
    ATOL,
    OPTIMIZERS,
    PLAIN,
    RTOL,
    Job,
    Model,
    Result,
    Table,
    assert_same_results,
    build,
    make_batch,
    result_of,
    train,
    whole,
)
from tests.support.dense_updates import OPTIMIZERS as NOT_IN_FBGEMM
from tests.support.shared_run import run_once
from tests.train_pipeline.drivers import SETTINGS_OF, Driver, make_driver
from tests.train_pipeline.runs import batches_of, losses_of, run_to_the_end

NUM_STEPS = 5

MIXED_DIMS = (
    Table("a", 8, 50, ("f0",)),
    Table("b", 16, 3, ("f1", "f2"), mean=True),
    Table("two_rows", 16, 2, ("f0", "f4")),
    Table("d", 4, 40, ("f5",), mean=True),
)
"""Two features of one table, one feature of two tables, fewer rows than ranks."""

OPTIMIZER_KWARGS = {
    "sgd": {"lr": 0.5},
    "adagrad": {"lr": 0.1, "eps": 1e-2},
    "rowwise_adagrad": {"lr": 0.1, "eps": 1e-2},
}
"""With Adagrad's usual epsilon of 1e-8, a first gradient that cancels to nearly zero would move its
weight by the learning rate times whatever share of it is rounding."""

HOT: dict[str, Any] = {"*": 2, "b": 1}


@dataclasses.dataclass(frozen=True)
class Comparison:
    """A job of ours and the stock placement that it is compared with."""

    job: Job
    stock: str


def _comparisons() -> dict[str, Comparison]:
    """Each optimizer against both stock placements.

    Weighted means are compared row-wise only: there stock divides by the sum of weights, as an
    unsharded table does; table-wise it divides by the count.
    """
    found = {}
    for optimizer, kwargs in OPTIMIZER_KWARGS.items():
        base = Job(
            placement=HOT,
            tables=MIXED_DIMS,
            optimizer=optimizer,
            optimizer_kwargs=kwargs,
            num_steps=NUM_STEPS,
        )
        # stock row-wise is right on the CPU here only: one dim, no table smaller than 3 ranks
        weighted = dataclasses.replace(base, tables=PLAIN, weighted=True, seed=1)
        found[f"{optimizer}/table_wise"] = Comparison(base, "table_wise")
        found[f"{optimizer}/weighted/row_wise"] = Comparison(weighted, "row_wise")
        bags = {"*": "bags"} if optimizer == "sgd" else {"*": "bags", "a": 2, "two_rows": 0}
        found[f"{optimizer}/bags/table_wise"] = Comparison(
            dataclasses.replace(base, placement=bags, batch_sizes=(16, 9, 0)), "table_wise"
        )
    for name, changes in (
        ("adagrad/table_wise", {"batch_sizes": (16, 9, 0)}),
        ("adagrad/weighted/row_wise", {"placement": {"*": 0}}),
    ):
        old = found[name]
        found[name] = Comparison(dataclasses.replace(old.job, **changes), old.stock)
    return found


COMPARISONS = _comparisons()
COMPARED_ON = {2: tuple(COMPARISONS), 3: tuple(n for n in COMPARISONS if "rowwise_adagrad" in n)}
"""By number of ranks: a third one changes nothing of an optimizer."""
CASES = [
    (world_size, name, setting)
    for world_size, names in COMPARED_ON.items()
    for name in names
    for setting in SETTINGS_OF[world_size]
]


def _stock(comparison: Comparison, rank: int, world_size: int) -> Result:
    job = dataclasses.replace(comparison.job, placement={"*": comparison.stock})
    if comparison.stock == "row_wise":
        model = build(job, rank, world_size)
        return result_of(model, train(model, job, rank, range(job.num_steps)))
    return _by_pipeline(None, job, rank, world_size)[0]  # fused in backward


def _by_pipeline(driver: Driver, job: Job, rank: int, world_size: int) -> tuple[Result, Any]:
    model, batches = build(job, rank, world_size), batches_of(job, rank, range(job.num_steps))
    pipeline = make_driver(driver, model)
    outputs = run_to_the_end(pipeline, iter(batches))
    return result_of(model, losses_of(outputs, batches)), pipeline


def _run(rank: int, world_size: int) -> dict[Any, Any]:
    results: dict[Any, Any] = {}
    for name in COMPARED_ON[world_size]:
        comparison = COMPARISONS[name]
        results[name, "stock"] = _stock(comparison, rank, world_size)
        for setting in SETTINGS_OF[world_size]:
            found, pipeline = _by_pipeline(setting, comparison.job, rank, world_size)
            results[name, setting], summary = found, pipeline.summary()
            assert summary.startswith("ebc: interleaved\n"), summary
    return results


@pytest.mark.parametrize(("world_size", "name", "setting"), CASES)
def test_trains_as_stock(world_size: int, name: str, setting: tuple[int, bool]) -> None:
    by_rank = run_once(_run, world_size)
    ours, stock = ([rank[name, of] for rank in by_rank] for of in (setting, "stock"))
    for its in stock:
        assert len(its.losses) == NUM_STEPS
        assert all(map(math.isfinite, its.losses))
    tables = {table.name for table in COMPARISONS[name].job.tables}
    assert {key.split(".")[-2] for key in whole(stock, "weights")} == tables
    assert_same_results(ours, stock)


@pytest.mark.parametrize("name", list(COMPARISONS))
def test_the_comparison_is_of_something(name: str) -> None:
    """Training moves every table, so that a step not taken would show; some bags are empty."""
    job = COMPARISONS[name].job
    first = Model(job).state_dict()
    stock = [rank[name, "stock"] for rank in run_once(_run, 2)]
    for key, trained in whole(stock, "weights").items():
        assert (trained - first[key]).abs().max() > 100 * (ATOL + RTOL * trained.abs().max()), key
    lengths = make_batch(job, 0, 0).sparse_features.lengths()
    assert (lengths == 0).any()
    assert (lengths > 1).any()


def test_every_optimizer_is_compared() -> None:
    """Those that FBGEMM has on the CPU."""
    assert {c.job.optimizer for c in COMPARISONS.values()} == set(OPTIMIZERS) - {
        "lars",
        *NOT_IN_FBGEMM,
    }
