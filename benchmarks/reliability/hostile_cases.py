"""Hostile cases as data: a random plan, random jagged batches, and what of them is bad, by number.

A case is drawn from a seed, the number of ranks and its own number, so that every rank draws the
same and one case can be made again alone. Tensors are made later, by rank.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

__all__ = ["BATCH_KINDS", "FAULTS", "Case", "Fault", "TableSpec", "draw_case"]

BATCH_KINDS = (
    "random",
    "no samples",
    "no ids",
    "one id",
    "all ids",
    "ends",
    "million",
)
"""What the features of a rank's batch hold; ``million``: one bag has as many ids."""

FAULTS = (
    "id -1",
    "id num_rows",
    "largest id",
    "smallest id",
    "value missing",
    "value too many",
    "length negative",
    "lengths negative, sum right",
    "length missing",
    "weight nan",
    "weight inf",
    "weight missing",
)

NUM_STEPS, NUM_STEPS_AFTER = 3, 2
_DRIVERS = ("pipeline", "pipeline", "pipeline", "loop", "sparse_dist")
_OPTIMIZERS = ("sgd", "adagrad", "rowwise_adagrad")
_NUM_ROWS = (1, 2, 3, 7, 12, 60, 500)
_BATCH_SIZES = (0, 1, 2, 3, 7, 16, 64)
_DIMS = (4, 8, 16)


@dataclass(frozen=True)
class TableSpec:
    """A table and where it is.

    Args:
        name: Of the table; its features are the name and a number.
        rows: How many.
        dim: Columns.
        form: ``rows``, ``bags`` or ``stock``, table-wise then.
        num_features: Features that look it up.
        mean: Whether bags are averaged.
        rank: Home of ``bags`` and ``stock``.
        blocks_W: Rows at home on each rank, of ``rows``.
        hot_rows: Those with replicas.
        wave: Of its pack.
    """

    name: str
    rows: int
    dim: int
    form: str
    num_features: int
    mean: bool
    rank: int
    blocks_W: tuple[int, ...]
    hot_rows: tuple[int, ...]
    wave: int

    @property
    def features(self) -> list[str]:
        """Names of the features that look it up."""
        return [f"{self.name}_{number}" for number in range(self.num_features)]


@dataclass(frozen=True)
class Fault:
    """What is bad: which kind, of which feature, on which ranks, in which step."""

    kind: str
    feature: str
    ranks: tuple[int, ...]
    step: int


@dataclass(frozen=True)
class Case:
    """One training, with all that is drawn of it."""

    name: str
    seed: str
    world_size: int
    bags: tuple[TableSpec, ...]
    sequences: tuple[TableSpec, ...]
    weighted: bool
    index_dtype: str
    length_dtype: str
    kinds_SW: tuple[tuple[str, ...], ...]
    """Kind of each rank's batch by step; those behind ``NUM_STEPS`` follow a fault."""
    sizes_SW: tuple[tuple[int, ...], ...]
    ends_W: tuple[int, ...]
    """Steps after which each rank's data ends; it goes on with empty batches."""
    driver: str
    optimizer: str
    options: Mapping[str, Any] = field(default_factory=dict)
    """Of the pipeline."""
    fault: Fault | None = None

    @property
    def tables(self) -> tuple[TableSpec, ...]:
        """Pooled ones, then sequences."""
        return self.bags + self.sequences

    def __str__(self) -> str:
        tables = " ".join(
            f"{t.name}:{t.form}{t.rows}x{t.dim}/{len(t.hot_rows)}@{t.blocks_W}" for t in self.tables
        )
        kinds = "; ".join(", ".join(of_ranks) for of_ranks in self.kinds_SW)
        return (
            f"{self.driver} {dict(self.options)} {self.optimizer} {self.index_dtype} {tables}; "
            f"batches {kinds}; sizes {self.sizes_SW}; ends {self.ends_W}; {self.fault}"
        )


def draw_case(seed: int, world_size: int, number: int) -> Case:
    """Draws a case; the first of each world size has a million ids in one bag.

    Args:
        seed: Of all cases.
        world_size: Ranks.
        number: Which case, from 0 on. Every third has a fault.
    """
    text = f"{seed}/{world_size}/{number}"
    draw = random.Random(text)
    bags = [_table(draw, f"b{i}", world_size, pooled=True) for i in range(draw.randint(1, 3))]
    sequences = [_table(draw, f"s{i}", world_size, pooled=False) for i in range(draw.randint(1, 2))]
    sequences = [replace(table, dim=sequences[0].dim) for table in sequences]
    takes_empty = all(table.form != "stock" for table in sequences)  # TorchRec's own take none
    if not any(table.form != "stock" for table in bags + sequences):
        bags[0] = _table(draw, "b0", world_size, pooled=True, forms=("rows", "bags"))
    weighted = draw.random() < 0.3
    driver = draw.choice(_DRIVERS)
    fault = _fault(draw, bags, sequences, world_size, weighted) if number % 3 == 2 else None
    num_steps = NUM_STEPS + (NUM_STEPS_AFTER if fault else 0)
    kinds = [_kinds(draw, world_size) for _ in range(num_steps)]
    sizes = [tuple(draw.choice(_BATCH_SIZES) for _ in range(world_size)) for _ in kinds]
    if not takes_empty:
        kinds = [tuple("no ids" if k == "no samples" else k for k in of_step) for of_step in kinds]
        sizes = [tuple(max(1, size) for size in of_step) for of_step in sizes]
    if number == 0:
        kinds[1] = ("million", *kinds[1][1:])
    ends = [num_steps] * world_size
    if fault is None and driver == "pipeline" and takes_empty and draw.random() < 0.3:
        ends = [draw.randint(0 if rank else num_steps, num_steps) for rank in range(world_size)]
        draw.shuffle(ends)
    if fault is not None:
        sizes[fault.step] = tuple(max(2, size) for size in sizes[fault.step])
        kinds[fault.step] = ("random",) * world_size
    return Case(
        name=f"w{world_size}/{number}",
        seed=text,
        world_size=world_size,
        bags=tuple(bags),
        sequences=tuple(sequences),
        weighted=weighted,
        index_dtype=draw.choice(("int32", "int64")),
        length_dtype=draw.choice(("int32", "int64")),
        kinds_SW=tuple(kinds),
        sizes_SW=tuple(sizes),
        ends_W=tuple(ends),
        driver=driver,
        optimizer=draw.choice(_OPTIMIZERS),
        options=_options(draw) if driver == "pipeline" else {},
        fault=fault,
    )


def _table(
    draw: random.Random,
    name: str,
    world_size: int,
    pooled: bool,
    forms: Sequence[str] = (),
) -> TableSpec:
    rows = draw.choice(_NUM_ROWS)
    form = draw.choice(
        forms or (("rows", "rows", "bags", "stock") if pooled else ("rows", "stock"))
    )
    hot = {
        "none": (),
        "all": tuple(range(rows)),
        "ends": tuple({0, rows - 1}),
        "some": tuple(draw.sample(range(rows), draw.randint(0, rows))),
    }[draw.choice(("none", "all", "ends", "some"))]
    return TableSpec(
        name=name,
        rows=rows,
        dim=draw.choice(_DIMS),
        form=form,
        num_features=draw.choice((1, 1, 2)),
        mean=pooled and draw.random() < 0.4,
        rank=draw.randrange(world_size),
        blocks_W=_blocks(draw, rows, world_size),
        hot_rows=hot if form == "rows" else (),
        wave=draw.choice((0, 0, 1)) if form == "rows" else 0,
    )


def _blocks(draw: random.Random, rows: int, world_size: int) -> tuple[int, ...]:
    """Rows of each rank: stock's equal blocks, any cut, or all on one rank."""
    how = draw.choice(("stock", "any", "one"))
    if how == "one":
        home = draw.randrange(world_size)
        return tuple(rows if rank == home else 0 for rank in range(world_size))
    if how == "any":
        cuts = sorted(draw.randint(0, rows) for _ in range(world_size - 1))
        return tuple(end - start for start, end in zip([0, *cuts], [*cuts, rows]))
    most = -(-rows // world_size)
    return tuple(max(0, min(most, rows - rank * most)) for rank in range(world_size))


def _kinds(draw: random.Random, world_size: int) -> tuple[str, ...]:
    """Kinds of a step: each rank its own, the same on all, or all ranks empty but one."""
    how = draw.choice(("each", "each", "same", "one"))
    usual = BATCH_KINDS[:-1]
    if how == "same":
        return (draw.choice(usual),) * world_size
    if how == "one":
        alone = draw.randrange(world_size)
        return tuple(
            draw.choice(usual[2:]) if rank == alone else "no samples" for rank in range(world_size)
        )
    return tuple(draw.choice(usual) for _ in range(world_size))


def _options(draw: random.Random) -> dict[str, Any]:
    """Default settings half of the time, else fixed ones."""
    if draw.random() < 0.5:
        return {}
    options: dict[str, Any] = {"num_micro_batches": draw.choice((1, 2, 3, 4, 9))}
    if draw.random() < 0.7:
        options["lookahead"] = draw.random() < 0.5
    if draw.random() < 0.4:
        options["refresh_every"] = draw.choice((1, 2))
    if draw.random() < 0.3:
        options["verify_every"] = 1
    return options


def _fault(
    draw: random.Random,
    bags: Sequence[TableSpec],
    sequences: Sequence[TableSpec],
    world_size: int,
    weighted: bool,
) -> Fault:
    """A fault in what a hot/cold table is asked for: stock tables check nothing."""
    pooled = [table for table in bags if table.form != "stock"]
    kinds = FAULTS if weighted and pooled else FAULTS[:-3]
    kind = draw.choice(kinds)
    tables = (
        pooled
        if kind.startswith("weight")
        else pooled + [table for table in sequences if table.form != "stock"]
    )
    ranks = draw.choice(([draw.randrange(world_size)], range(world_size)))
    return Fault(
        kind=kind,
        feature=draw.choice(draw.choice(tables).features),
        ranks=tuple(ranks),
        step=draw.randrange(NUM_STEPS),
    )
