"""Hot/cold training against stock TorchRec: losses, weights, optimizer state; ranks 1, 2 and 3.

Also with replicas in a table of their own, which changes no bit.

Both sides start from the same weights and see the same skewed, jagged batches. They may differ by
the order of float32 sums only: a row's gradient is summed per rank first here, per lookup there.
Twelve steps at most at learning rate 0.1 amplify one rounding (6e-8 relative) by less than 1e3,
hence the tolerance. What needs no sum over ranks, the replicas, is bit-equal.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from functools import cache
from typing import Any

import pytest
import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    SplitTableBatchedEmbeddingBagsCodegen,
)

from tests.sharding.jobs import ODD, PLAIN, Job, Result, Table, build, run_jobs, train, whole
from torchrec_picasso.app.launch.run_ranks import RankError, run_ranks

RTOL, ATOL = 1e-4, 2e-5
WIRE_RTOL, WIRE_ATOL = 2e-2, 2e-2
"""Rows and gradients rounded to 16 bits on the wire, against an unrounded run."""

NUM_STEPS = 4
UNEVEN = (6, 4, 0)


def _summed(tables: tuple[Table, ...]) -> tuple[Table, ...]:
    return tuple(dataclasses.replace(table, mean=False) for table in tables)


ROW_WISE_ONLY = ("weighted_mean",)
"""Stock divides a weighted mean by the sum of weights row-wise, by the count table-wise."""


def _variants() -> dict[str, Job]:
    """The jobs, each trained by every placement below."""
    base = Job(placement={}, num_steps=NUM_STEPS)
    with_lr = {"lr": 0.1}
    return {
        "sgd": dataclasses.replace(base, optimizer="sgd"),
        "adagrad": dataclasses.replace(base, optimizer="adagrad"),
        "rowwise_adagrad": base,
        "schedule": dataclasses.replace(base, lr_decay=0.7, num_steps=6),
        "per_table": dataclasses.replace(
            base,
            optimizer="adagrad",
            optimizer_kwargs=with_lr,
            kwargs_of_table={"b": {"lr": 0.02}, "c": {"eps": 1e-2}},
        ),
        "weighted": dataclasses.replace(base, weighted=True, tables=_summed(PLAIN)),
        "weighted_mean": dataclasses.replace(base, weighted=True),
        "odd": dataclasses.replace(base, tables=ODD),
        "odd_sgd_uneven": dataclasses.replace(
            base, tables=ODD, optimizer="sgd", optimizer_kwargs={"lr": 0.01}, batch_sizes=UNEVEN
        ),
        "odd_weighted": dataclasses.replace(base, tables=_summed(ODD), weighted=True),
    }


PLACEMENTS: dict[str, dict[str, Any]] = {
    "table_wise": {"*": "table_wise"},
    "row_wise": {"*": "row_wise"},
    "no_hot": {"*": 0},
    "some_hot": {"*": 2, "one_row": 1},
    "all_hot": {},
    "mixed": {"a": 5, "b": "table_wise", "c": 2, "one_row": 0, "two_rows": 1, "d": "table_wise"},
    "lopsided_homes": {"*": 2, "one_row": 0},
    "in_waves": {"*": 2, "one_row": 1},
    "beside_row_wise": {"*": 2, "one_row": 1, "c": "row_wise", "d": "row_wise"},
    "bags": {"*": "bags"},
    "rows_and_bags": {"a": 3, "b": "bags", "c": "bags", "one_row": 1, "two_rows": "bags", "d": 0},
    "rows_bags_and_stock": {"*": "bags", "a": 2, "c": "table_wise", "d": "table_wise"},
}
WAVES = {"a": 2, "b": 1, "d": 1}
IN_TWO_TABLES = {"some_hot_apart": "some_hot", "lopsided_apart": "lopsided_homes"}
"""Placements whose replicas are a table of their own; by those they shall equal."""
PLACEMENTS |= {name: PLACEMENTS[like] for name, like in IN_TWO_TABLES.items()}
PLACEMENTS_OF = {
    1: ("table_wise", "row_wise", "no_hot", "some_hot", "mixed", "rows_and_bags", "some_hot_apart"),
    2: tuple(PLACEMENTS),
    3: (
        *("table_wise", "row_wise", "no_hot", "some_hot", "all_hot", "mixed", "lopsided_homes"),
        *("in_waves", "bags", "rows_and_bags"),
    ),
}
"""By number of ranks."""
FEW_VARIANTS = ("sgd", "rowwise_adagrad", "odd", "odd_sgd_uneven", "odd_weighted")
"""On three ranks: a third one changes who is at home where, and nothing of an optimizer."""
OURS = (
    *("no_hot", "some_hot", "all_hot", "mixed", "in_waves", "beside_row_wise", "lopsided_homes"),
    *("bags", "rows_and_bags", "rows_bags_and_stock"),
    *IN_TWO_TABLES,
)


def _placed(variant: str, placement: str) -> Job | None:
    job = _variants()[variant]
    if placement == "beside_row_wise" and len(job.tables) > 3:
        return None  # stock row-wise averages a feature of two tables wrong
    if len(job.tables) > 3 and placement == "row_wise":
        return None  # stock row-wise on CPU is wrong for 0-row shards beside other dims
    if placement == "all_hot":
        places: dict[str, Any] = {table.name: table.rows for table in job.tables}
    else:
        places = PLACEMENTS[placement]
    return dataclasses.replace(
        job,
        placement=places,
        waves=WAVES if placement == "in_waves" else {},
        lopsided=placement.startswith("lopsided"),
        two_tables=placement in IN_TWO_TABLES,
    )


def _variants_of(world_size: int) -> list[str]:
    return list(_variants() if world_size < 3 else FEW_VARIANTS)


def _cases(
    placements: tuple[str, ...], variants: Iterable[str] | None = None
) -> list[tuple[int, str, str]]:
    return [
        (world_size, placement, variant)
        for world_size, trained in PLACEMENTS_OF.items()
        for placement in placements
        if placement in trained
        for variant in _variants_of(world_size)
        if variants is None or variant in variants
    ]


Results = dict[tuple[str, str], list[Result]]


def _results(world_size: int) -> Results:
    results = _trained(world_size)
    if isinstance(results, RankError):
        raise results
    return results


@cache
def _trained(world_size: int) -> Results | RankError:
    jobs = {
        f"{variant}/{placement}": job
        for variant in _variants_of(world_size)
        for placement in PLACEMENTS_OF[world_size]
        if (job := _placed(variant, placement)) is not None
    }
    try:
        by_rank = run_ranks(run_jobs, world_size, jobs, timeout_s=280)
    except RankError as error:  # remembered: the tests that share the run must not repeat it
        return error
    return {tuple(name.split("/")): [rank[name] for rank in by_rank] for name in jobs}


@pytest.mark.parametrize(
    ("world_size", "placement", "variant"), _cases(OURS, set(_variants()) - set(ROW_WISE_ONLY))
)
def test_equals_stock_table_wise(world_size: int, placement: str, variant: str) -> None:
    results = _results(world_size)
    if (variant, placement) not in results:
        pytest.skip("stock TorchRec cannot train its part of this placement, see _placed")
    stock, ours = results[variant, "table_wise"], results[variant, placement]
    for rank in range(world_size):
        assert all(map(math.isfinite, stock[rank].losses))
        torch.testing.assert_close(
            ours[rank].losses, stock[rank].losses, rtol=RTOL, atol=ATOL, msg=f"losses, rank {rank}"
        )
    for kind in ("weights", "states"):
        actual, expected = whole(ours, kind), whole(stock, kind)
        assert actual.keys() == expected.keys()
        for name in expected:
            torch.testing.assert_close(
                actual[name],
                expected[name],
                rtol=RTOL,
                atol=ATOL,
                msg=lambda m, name=name: f"{name}: {m}",
            )
    for name, expected in stock[0].dense.items():
        torch.testing.assert_close(ours[0].dense[name], expected, rtol=RTOL, atol=ATOL)


@pytest.mark.parametrize(
    ("world_size", "placement", "variant"),
    _cases(
        ("no_hot", "some_hot", "all_hot"),
        [variant for variant, job in _variants().items() if len(job.tables) == 3],
    ),
)
def test_equals_stock_row_wise_shard_by_shard(
    world_size: int, placement: str, variant: str
) -> None:
    results = _results(world_size)
    for stock, ours in zip(results[variant, "row_wise"], results[variant, placement]):
        torch.testing.assert_close(ours.losses, stock.losses, rtol=RTOL, atol=ATOL)
        for kind in ("weights", "states"):
            actual, expected = getattr(ours, kind), getattr(stock, kind)
            assert list(actual) == list(expected)
            torch.testing.assert_close(actual, expected, rtol=RTOL, atol=ATOL)


@pytest.mark.parametrize(
    ("world_size", "variant"),
    [(world_size, variant) for world_size in (2, 3) for variant in _variants_of(world_size)],
)
def test_replicas_are_bit_equal_across_ranks(world_size: int, variant: str) -> None:
    for placement in ("some_hot", "all_hot"):
        first, *others = [r.replicas for r in _results(world_size)[variant, placement]]
        assert first
        assert all(tensor.numel() for tensor in first)
        for other in others:
            assert all(torch.equal(mine, its) for mine, its in zip(first, other))


@pytest.mark.parametrize(("world_size", "placement", "variant"), _cases(tuple(IN_TWO_TABLES)))
def test_replicas_in_a_table_of_their_own_change_no_bit(
    world_size: int, placement: str, variant: str
) -> None:
    results = _results(world_size)
    for mine, its in zip(results[variant, placement], results[variant, IN_TWO_TABLES[placement]]):
        assert mine.losses == its.losses
        for kind in ("weights", "states", "dense", "replicas"):
            torch.testing.assert_close(getattr(mine, kind), getattr(its, kind), rtol=0, atol=0)


def test_losses_fall() -> None:
    """Guards the comparison: a job that learns nothing would compare anything as equal."""
    losses = _results(2)["rowwise_adagrad", "some_hot"][0].losses
    assert sum(losses[-3:]) < sum(losses[:3])


def _packs(rank: int, world_size: int, job: Job) -> list[tuple[list[str], str]]:
    (lookup,) = build(job, rank, world_size).module.ebc._lookups
    return [
        (
            [table.name for table in kernel.config.embedding_tables],
            kernel.config.embedding_tables[0].compute_kernel.value,
        )
        for kernel in lookup._emb_modules
    ]


def test_tables_of_two_memories_share_no_pack_and_train_alike() -> None:
    one = Job(placement={"*": 2}, num_steps=4)
    two = dataclasses.replace(one, kernel_of_table={"b": "fused_uvm"})
    assert run_ranks(_packs, 1, one, timeout_s=60) == [[(["a", "b", "c"], "fused")]]
    packs = [(["a", "c"], "fused"), (["b"], "fused_uvm")]
    assert run_ranks(_packs, 1, two, timeout_s=60) == [packs]
    for rank in run_ranks(run_jobs, 2, {"one": one, "two": two}, timeout_s=60):
        mine, its = dataclasses.asdict(rank["two"]), dataclasses.asdict(rank["one"])
        for kind in ("losses", "weights", "states", "dense"):
            torch.testing.assert_close(mine[kind], its[kind], rtol=RTOL, atol=ATOL)


def _steps_counted(rank: int, world_size: int, jobs: dict[str, Job]) -> dict[str, set[int]]:
    """What the kernels of every job count as steps, for the bias correction of Adam's like."""
    counted = {}
    for name, job in jobs.items():
        model = build(job, rank, world_size)
        train(model, job, rank, range(job.num_steps))
        modules = [module for lookup in model.module.ebc._lookups for module in lookup.modules()]
        kernels = [m for m in modules if isinstance(m, SplitTableBatchedEmbeddingBagsCodegen)]
        counted[name] = {int(kernel.iter) for kernel in kernels}
    return counted


@pytest.mark.parametrize("batch_sizes", [(0, 0), (6, 0), (1, 1)])
def test_steps_without_rows_count_as_in_stock(batch_sizes: tuple[int, ...]) -> None:
    places: dict[str, Any] = {"stock": "table_wise", "no_hot": 0, "hot": 2}
    jobs = {
        name: Job(
            placement={"*": place},
            tables=_summed(PLAIN),  # stock cannot form a mean over no samples
            batch_sizes=batch_sizes,
            num_steps=4,
        )
        for name, place in places.items()
    }
    jobs["two_tables"] = dataclasses.replace(jobs["hot"], two_tables=True)
    for counted in run_ranks(_steps_counted, 2, jobs, timeout_s=60):
        assert counted == {name: {4} for name in jobs}


@pytest.mark.parametrize("wire", ["fp16", "bf16"])
def test_wire_precision(wire: str) -> None:
    exact = Job(placement={"*": 2})
    jobs = {"exact": exact, "rounded": dataclasses.replace(exact, wire=wire)}
    by_rank = run_ranks(run_jobs, 2, jobs, timeout_s=120)
    for rank in by_rank:
        assert rank["rounded"].losses != rank["exact"].losses
        torch.testing.assert_close(
            rank["rounded"].losses, rank["exact"].losses, rtol=WIRE_RTOL, atol=WIRE_ATOL
        )
