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
from functools import cache
from typing import Any

import pytest
import torch
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist

from tests.sharding.jobs import (
    CPU,
    OPTIMIZERS,
    Job,
    Result,
    Table,
    build,
    dense_optimizer,
    make_batch,
    result_of,
    train,
    whole,
)
from tests.support.dense_updates import OPTIMIZERS as NOT_IN_FBGEMM
from tests.train_pipeline.drivers import SETTINGS_OF
from tests.train_pipeline.runs import batches_of, pipeline_of, run_to_the_end
from torchrec_picasso.app.launch.run_ranks import RankError, run_ranks

RTOL, ATOL = 1e-4, 2e-5
NUM_STEPS = 5
WORLD_SIZES = (2, 3)
SETTINGS = [
    (world_size, *setting) for world_size in WORLD_SIZES for setting in SETTINGS_OF[world_size]
]

MIXED_DIMS = (
    Table("a", 8, 50, ("f0",)),
    Table("b", 16, 3, ("f1", "f2"), mean=True),
    Table("two_rows", 16, 2, ("f0", "f4")),
    Table("d", 4, 40, ("f5",), mean=True),
)
"""Two features of one table, one feature of two tables, fewer rows than ranks."""

ONE_DIM = (
    Table("a", 8, 60, ("f0",)),
    Table("b", 8, 12, ("f1", "f2")),
    Table("c", 8, 6, ("f3",), mean=True),
)
"""No table smaller than 3 ranks, one dim: stock row-wise is right on the CPU here only."""

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
        weighted = dataclasses.replace(base, tables=ONE_DIM, weighted=True, seed=1)
        found[f"{optimizer}/table_wise"] = Comparison(base, "table_wise")
        found[f"{optimizer}/weighted/row_wise"] = Comparison(weighted, "row_wise")
        bags = {"*": "bags"} if optimizer == "sgd" else {"*": "bags", "a": 2, "two_rows": 0}
        found[f"{optimizer}/bags/table_wise"] = Comparison(
            dataclasses.replace(base, placement=bags, batch_sizes=(16, 9, 0)), "table_wise"
        )
    _change(found, "adagrad/table_wise", batch_sizes=(16, 9, 0))
    _change(found, "adagrad/weighted/row_wise", placement={"*": 0})
    return found


def _change(comparisons: dict[str, Comparison], name: str, **changes: Any) -> None:
    old = comparisons[name]
    comparisons[name] = Comparison(dataclasses.replace(old.job, **changes), old.stock)


COMPARISONS = _comparisons()


def _losses(job: Job, rank: int, outputs: list[torch.Tensor]) -> list[float]:
    """The model's own formula; a pipeline gives predictions, not losses."""
    batches = batches_of(job, rank, range(job.num_steps))
    return [
        float(((output - batch.labels) ** 2).sum() / 6)
        for output, batch in zip(outputs, batches, strict=True)
    ]


def _stock(comparison: Comparison, rank: int, world_size: int) -> Result:
    job = dataclasses.replace(comparison.job, placement={"*": comparison.stock})
    model = build(job, rank, world_size)
    if comparison.stock == "row_wise":
        return result_of(model, train(model, job, rank, range(job.num_steps)))
    pipeline = TrainPipelineSparseDist(model, dense_optimizer(model), CPU)  # fused in backward
    outputs = run_to_the_end(pipeline, iter(batches_of(job, rank, range(job.num_steps))))
    return result_of(model, _losses(job, rank, outputs))


def _ours(
    job: Job, rank: int, world_size: int, num_micro_batches: int, lookahead: bool
) -> tuple[Result, str]:
    model = build(job, rank, world_size)
    pipeline = pipeline_of(
        model,
        num_micro_batches=num_micro_batches,
        lookahead=lookahead,
    )
    outputs = run_to_the_end(pipeline, iter(batches_of(job, rank, range(job.num_steps))))
    return result_of(model, _losses(job, rank, outputs)), pipeline.summary()


def _run(rank: int, world_size: int) -> dict[Any, Any]:
    results: dict[Any, Any] = {}
    for name, comparison in COMPARISONS.items():
        results[name, "stock"] = _stock(comparison, rank, world_size)
        for setting in SETTINGS_OF[world_size]:
            results[name, setting], summary = _ours(comparison.job, rank, world_size, *setting)
            assert summary.startswith("ebc: interleaved\n"), summary
    return results


@cache
def _once(world_size: int) -> list[dict[Any, Any]] | RankError:
    try:
        return run_ranks(_run, world_size, timeout_s=250)
    except RankError as error:  # remembered: the tests that share the run must not repeat it
        return error


def _results(world_size: int) -> list[dict[Any, Any]]:
    results = _once(world_size)
    if isinstance(results, RankError):
        raise results
    return results


@pytest.mark.parametrize(("world_size", "num_micro_batches", "lookahead"), SETTINGS)
@pytest.mark.parametrize("name", list(COMPARISONS))
def test_trains_as_stock(
    world_size: int, name: str, num_micro_batches: int, lookahead: bool
) -> None:
    by_rank = _results(world_size)
    ours = [rank[name, (num_micro_batches, lookahead)] for rank in by_rank]
    stock = [rank[name, "stock"] for rank in by_rank]
    for rank, (mine, its) in enumerate(zip(ours, stock, strict=True)):
        assert len(its.losses) == NUM_STEPS
        assert all(map(math.isfinite, its.losses))
        for step, pair in enumerate(zip(mine.losses, its.losses, strict=True)):
            assert pair[0] == pytest.approx(pair[1], rel=RTOL, abs=ATOL), (rank, step)
        torch.testing.assert_close(mine.dense, its.dense, rtol=RTOL, atol=ATOL)
    tables = {table.name for table in COMPARISONS[name].job.tables}
    for kind in ("weights", "states"):
        actual, expected = whole(ours, kind), whole(stock, kind)
        assert actual.keys() == expected.keys()
        if kind == "weights":
            assert {key.split(".")[-2] for key in expected} == tables
        torch.testing.assert_close(actual, expected, rtol=RTOL, atol=ATOL)


@pytest.mark.parametrize("name", list(COMPARISONS))
def test_the_comparison_is_of_something(name: str) -> None:
    """Training moves every table, so that a step not taken would show; some bags are empty."""
    by_rank = _results(2)
    job = COMPARISONS[name].job
    stock = [rank[name, "stock"] for rank in by_rank]
    first = whole([_untrained(job)], "weights")
    for key, trained in whole(stock, "weights").items():
        assert (trained - first[key]).abs().max() > 100 * (ATOL + RTOL * trained.abs().max()), key
    lengths = make_batch(job, 0, 0).sparse_features.lengths()
    assert (lengths == 0).any()
    assert (lengths > 1).any()


def _untrained(job: Job) -> Result:
    """What every run starts from."""
    (result,) = run_ranks(_start, 1, job, timeout_s=60)
    return result


def _start(rank: int, world_size: int, job: Job) -> Result:
    return result_of(build(dataclasses.replace(job, num_steps=0), rank, world_size), [])


def test_every_optimizer_is_compared() -> None:
    """Those that FBGEMM has on the CPU."""
    assert {c.job.optimizer for c in COMPARISONS.values()} == set(OPTIMIZERS) - {
        "lars",
        *NOT_IN_FBGEMM,
    }
