"""Hot/cold training against stock TorchRec: losses, weights, optimizer state; ranks 1, 2 and 3.

Also with replicas in a table of their own, which changes no bit.

Both sides start from the same weights and see the same skewed, jagged batches. They may differ by
the order of float32 sums only: a row's gradient is summed per rank first here, per lookup there.
Twelve steps at most at learning rate 0.1 amplify one rounding (6e-8 relative) by less than 1e3,
hence the tolerance. What needs no sum over ranks, the replicas, is bit-equal.
"""

import dataclasses
import math
from typing import Any

import pytest
import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    SplitTableBatchedEmbeddingBagsCodegen,
)

from tests.sharding.jobs import (
    ODD,
    PLAIN,
    Job,
    Result,
    Table,
    assert_same_results,
    build,
    run_jobs,
    train,
)
from tests.support.shared_run import run_once
from torchrec_picasso.app.launch.run_ranks import run_ranks

WIRE_RTOL, WIRE_ATOL = 2e-2, 2e-2
"""Rows and gradients rounded to 16 bits on the wire, against an unrounded run."""

NUM_STEPS = 4
UNEVEN = (6, 4, 0)


def _summed(tables: tuple[Table, ...]) -> tuple[Table, ...]:
    return tuple(dataclasses.replace(table, mean=False) for table in tables)


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
        "odd": dataclasses.replace(base, tables=ODD),
        "odd_sgd_uneven": dataclasses.replace(
            base, tables=ODD, optimizer="sgd", optimizer_kwargs={"lr": 0.01}, batch_sizes=UNEVEN
        ),
        "odd_weighted": dataclasses.replace(base, tables=_summed(ODD), weighted=True),
    }


PLACEMENTS: dict[str, dict[str, Any]] = {
    "table_wise": {"*": "table_wise"},
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
    1: ("table_wise", "no_hot", "some_hot", "mixed", "rows_and_bags", "some_hot_apart"),
    2: tuple(PLACEMENTS),
    3: (
        *("table_wise", "no_hot", "some_hot", "all_hot", "mixed", "lopsided_homes"),
        *("in_waves", "bags", "rows_and_bags"),
    ),
}
"""By number of ranks."""
FEW_VARIANTS = ("rowwise_adagrad", "odd", "odd_sgd_uneven", "odd_weighted")
OF_LAYOUT = (
    *("in_waves", "beside_row_wise", "lopsided_homes", "rows_bags_and_stock", *IN_TWO_TABLES),
)
"""These differ from others in who holds which row, as one rank and three do from two; that changes
nothing of an optimizer, so they train few variants."""
OURS = tuple(name for name in PLACEMENTS if name != "table_wise")


def _placed(variant: str, placement: str) -> Job | None:
    job = _variants()[variant]
    if placement == "beside_row_wise" and job.batch_sizes == UNEVEN:
        return None  # gloo gathers no gradients of batches of different size
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


def _variants_of(world_size: int, placement: str) -> list[str]:
    return list(FEW_VARIANTS if world_size != 2 or placement in OF_LAYOUT else _variants())


def _cases(placements: tuple[str, ...]) -> list[tuple[int, str, str]]:
    return [
        (world_size, placement, variant)
        for world_size, trained in PLACEMENTS_OF.items()
        for placement in placements
        if placement in trained
        for variant in _variants_of(world_size, placement)
        if _placed(variant, placement) is not None
    ]


def _run(rank: int, world_size: int) -> dict[str, Result]:
    jobs = {
        f"{variant}/{placement}": job
        for placement in PLACEMENTS_OF[world_size]
        for variant in _variants_of(world_size, placement)
        if (job := _placed(variant, placement)) is not None
    }
    return run_jobs(rank, world_size, jobs)


def _trained(world_size: int, variant: str, placement: str) -> list[Result]:
    return [found[f"{variant}/{placement}"] for found in run_once(_run, world_size)]


@pytest.mark.parametrize(("world_size", "placement", "variant"), _cases(OURS))
def test_equals_stock_table_wise(world_size: int, placement: str, variant: str) -> None:
    stock = _trained(world_size, variant, "table_wise")
    assert all(math.isfinite(loss) for on_rank in stock for loss in on_rank.losses)
    assert_same_results(_trained(world_size, variant, placement), stock)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("placement", ["some_hot", "all_hot"])
def test_there_are_replicas(world_size: int, placement: str) -> None:
    """Guards the comparison of their bits on all ranks."""
    for variant in _variants_of(world_size, placement):
        replicas = _trained(world_size, variant, placement)[0].replicas
        assert replicas
        assert all(tensor.numel() for tensor in replicas)


@pytest.mark.parametrize(("world_size", "placement", "variant"), _cases(tuple(IN_TWO_TABLES)))
def test_replicas_of_their_own_change_no_bit(world_size: int, placement: str, variant: str) -> None:
    apart = _trained(world_size, variant, placement)
    together = _trained(world_size, variant, IN_TWO_TABLES[placement])
    assert_same_results(apart, together, rtol=0, atol=0)
    for mine, its in zip(apart, together):
        torch.testing.assert_close(mine.replicas, its.replicas, rtol=0, atol=0)


def test_losses_fall() -> None:
    """Guards the comparison: a job that learns nothing would compare anything as equal."""
    losses = _trained(2, "rowwise_adagrad", "some_hot")[0].losses
    assert sum(losses[-3:]) < sum(losses[:3])


def _packs(rank: int, world_size: int) -> list[list[tuple[list[str], str]]]:
    """Of tables of one memory and of two: which tables are a pack, and their kernel."""
    found = []
    for name in ("one memory", "two memories"):
        (lookup,) = build(MORE_JOBS[name], rank, world_size).module.ebc._lookups
        tables = [kernel.config.embedding_tables for kernel in lookup._emb_modules]
        found.append([([t.name for t in each], each[0].compute_kernel.value) for each in tables])
    return found


BAGS = Job(
    placement={"*": "bags"},
    tables=(Table("a", 8, 60, ("f0",)), Table("b", 16, 40, ("f1", "f2"), mean=True)),
    batch_sizes=(20, 12),
    num_steps=4,
)
ONE_MEMORY = Job(placement={"*": 2}, num_steps=NUM_STEPS)
MORE_JOBS = {
    "one memory": ONE_MEMORY,
    "two memories": dataclasses.replace(ONE_MEMORY, kernel_of_table={"b": "fused_uvm"}),
    **{
        f"{name}, {wire}": dataclasses.replace(job, wire=wire)
        for name, job in {
            "rows": dataclasses.replace(ONE_MEMORY, num_steps=10),
            "bags": BAGS,
        }.items()
        for wire in (None, "fp16", "bf16")
    },
}


def _more(rank: int, world_size: int) -> dict[str, Result]:
    return run_jobs(rank, world_size, MORE_JOBS)


def _results_of_more(name: str) -> list[Result]:
    return [found[name] for found in run_once(_more, 2)]


def test_tables_of_two_memories_share_no_pack_and_train_alike() -> None:
    ((one, two),) = run_ranks(_packs, 1, timeout_s=60)
    assert one == [(["a", "b", "c"], "fused")]
    assert two == [(["a", "c"], "fused"), (["b"], "fused_uvm")]
    assert_same_results(_results_of_more("two memories"), _results_of_more("one memory"))


@pytest.mark.parametrize("wire", ["fp16", "bf16"])
@pytest.mark.parametrize("what", ["rows", "bags"])
def test_wire_precision(what: str, wire: str) -> None:
    exact, rounded = _results_of_more(f"{what}, None"), _results_of_more(f"{what}, {wire}")
    assert rounded[0].losses != exact[0].losses
    assert rounded[1].losses != exact[1].losses
    assert_same_results(rounded, exact, WIRE_RTOL, WIRE_ATOL)


STEPLESS: dict[str, Job] = {
    f"{where}, {two_tables=}, samples {sizes}": Job(
        placement={"*": where},
        tables=_summed(PLAIN),  # stock cannot form a mean over no samples
        batch_sizes=sizes,
        num_steps=4,
        two_tables=two_tables,
    )
    for where, two_tables in (("table_wise", False), (0, False), (2, False), (2, True))
    for sizes in ((0, 0), (6, 0), (1, 1))
}


def _steps_counted(rank: int, world_size: int) -> dict[str, set[int]]:
    """Returns what the kernels of every job count as steps, for the bias correction of Adam."""
    counted = {}
    for name, job in STEPLESS.items():
        model = build(job, rank, world_size)
        train(model, job, rank, range(job.num_steps))
        modules = [module for lookup in model.module.ebc._lookups for module in lookup.modules()]
        kernels = [m for m in modules if isinstance(m, SplitTableBatchedEmbeddingBagsCodegen)]
        counted[name] = {int(kernel.iter) for kernel in kernels}
    return counted


def test_steps_without_rows_count_as_in_stock() -> None:
    for counted in run_ranks(_steps_counted, 2, timeout_s=60):
        assert counted == {name: {4} for name in STEPLESS}
