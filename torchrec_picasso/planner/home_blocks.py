"""Splits tables into home blocks with equal expected load.

Stock row-wise sharding gives all ranks the same number of rows. If frequent rows have adjacent ids
(ids in order of frequency or age), one rank gets most requests. Here the block boundaries follow
the cumulative expected load. Tables are split one after another, those with the heaviest rows
first, and each split considers the loads of the ranks so far: a later table compensates the
imbalance of earlier tables.

Blocks are contiguous and in rank order, like TorchRec's row-wise shards, so checkpoints are those
of stock TorchRec. A checkpoint identifies blocks by their first row, so an empty block must not
precede a non-empty one: each rank gets a row if there are enough rows, and empty blocks come last.
A small load of every row limits the rows, and so the memory, of a rank.

Shape letters: U rows with a load of their own, T tables, W ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

__all__ = ["HomeBlocks", "RowLoads", "balance_homes", "even_blocks", "filled_blocks"]

_EVENNESS = 0.02
"""Additional load of all rows of a table, relative to its load: no rank gets more than about 51
times the mean of a table's rows."""


@dataclass(frozen=True, kw_only=True, eq=False)
class RowLoads:
    """Expected load per step of the rows of one table, in any unit."""

    num_embeddings: int
    rows_U: np.ndarray
    """Rows with a load of their own, ascending, int64, shape ``(U,)``."""
    load_U: np.ndarray
    """Load of each of these rows, float64, shape ``(U,)``; 0 for hot rows."""
    spread_load: float
    """Sum of all other load, spread evenly over the table."""

    @property
    def total(self) -> float:
        """Sum of the load of all rows."""
        return float(self.load_U.sum()) + self.spread_load

    def before(self, row: np.ndarray) -> np.ndarray:
        """Returns the sum of the load of all rows below each given row, in the shape of ``row``."""
        ends_U1 = np.concatenate([[0.0], self.load_U.cumsum()])
        own = ends_U1[np.searchsorted(self.rows_U, row)]
        result: np.ndarray = own + row * (self.spread_load / self.num_embeddings)
        return result


@dataclass(frozen=True, kw_only=True)
class HomeBlocks:
    """Home blocks of all tables, and their balance."""

    block_rows_TW: tuple[tuple[int, ...], ...]
    """Number of home rows of each table on each rank."""
    max_over_mean: float
    """Load of the busiest rank divided by the mean over ranks."""
    even_max_over_mean: float
    """The same with TorchRec's equal blocks."""


def even_blocks(num_embeddings: int, world_size: int) -> tuple[int, ...]:
    """Returns TorchRec's row-wise blocks: ``ceil(rows / W)`` each; the last ones may be smaller."""
    size = -(-num_embeddings // world_size)
    starts = [min(num_embeddings, rank * size) for rank in range(world_size + 1)]
    return tuple(end - start for start, end in pairwise(starts))


def filled_blocks(num_embeddings: int, world_size: int) -> tuple[int, ...]:
    """Returns TorchRec's row-wise blocks, or equal blocks if those leave a rank without rows."""
    blocks = even_blocks(num_embeddings, world_size)
    if blocks[-1] or num_embeddings < world_size:
        return blocks
    size, larger = divmod(num_embeddings, world_size)
    return tuple(size + (rank < larger) for rank in range(world_size))


def balance_homes(tables: Sequence[RowLoads], world_size: int) -> HomeBlocks:
    """Splits tables into home blocks so that all ranks have the same expected load.

    The blocks are those of :func:`filled_blocks` if their balance is at least as good. No block is
    empty if the table has a row for every rank; in a smaller table each row is a block, and empty
    blocks come last. O(U log U + T W log U) time.
    """
    even = [even_blocks(table.num_embeddings, world_size) for table in tables]
    filled = [filled_blocks(table.num_embeddings, world_size) for table in tables]
    even_balance = _max_over_mean(tables, even, world_size)
    filled_balance = _max_over_mean(tables, filled, world_size)
    # a load of every row limits the number of rows per rank
    weighted = [
        replace(table, spread_load=table.spread_load + _EVENNESS * table.total + 1e-9)
        for table in tables
    ]
    # heaviest rows first: tables of lighter rows can compensate their imbalance
    order = sorted(
        range(len(tables)),
        key=lambda t: (-(weighted[t].load_U.max() if weighted[t].load_U.size else 0.0), t),
    )
    aims = np.arange(1, world_size) / world_size
    given = np.zeros(world_size - 1)  # load so far of the ranks below each boundary
    cuts: dict[int, np.ndarray] = {}
    total = 0.0
    for t in order:
        total += weighted[t].total
        cut = _cut(weighted[t], aims * total - given)
        cuts[t] = _with_rows_between(cut, tables[t].num_embeddings)
        given += weighted[t].before(cuts[t])
    balanced = [
        tuple(np.diff(cuts[t], prepend=0, append=table.num_embeddings).tolist())
        for t, table in enumerate(tables)
    ]
    balance = _max_over_mean(tables, balanced, world_size)
    if balance >= filled_balance:
        balanced, balance = filled, filled_balance
    return HomeBlocks(
        block_rows_TW=tuple(balanced), max_over_mean=balance, even_max_over_mean=even_balance
    )


def _cut(table: RowLoads, targets: np.ndarray) -> np.ndarray:
    """Finds ascending rows for which the load of all lower rows, which jumps at rows with a load of
    their own and is linear between them, is nearest to the targets."""
    slope = table.spread_load / table.num_embeddings
    targets = np.maximum.accumulate(np.clip(targets, 0.0, table.total))
    below_U = table.before(table.rows_U)
    after_U = below_U + table.load_U
    # start at the last loaded row whose load is below the target, and continue along the slope
    index = np.searchsorted(after_U, targets, side="right")
    start, load_at_start = (np.append(0.0, x_U)[index] for x_U in (table.rows_U, after_U))
    row = start + (targets - load_at_start) / slope
    # if the next loaded row would cross the target, cut before or after it
    following = np.append(table.rows_U, table.num_embeddings)[index]
    below, after = (np.append(x_U, np.inf)[index] for x_U in (below_U, after_U))
    row = np.where(row >= following, following + (after - targets < targets - below), row)
    cut = np.clip(np.rint(row), 0, table.num_embeddings).astype(np.int64)
    result: np.ndarray = np.maximum.accumulate(cut)
    return result


def _with_rows_between(cut: np.ndarray, num_embeddings: int) -> np.ndarray:
    """Moves ascending boundaries so that no block is empty if there are enough rows."""
    before = np.arange(1, len(cut) + 1)  # ranks below each boundary: the least rows below it
    spare = num_embeddings - len(cut) - 1
    if spare < 0:
        return np.minimum(before, num_embeddings)
    result: np.ndarray = np.maximum.accumulate(cut - before).clip(0, spare) + before
    return result


def _max_over_mean(
    tables: Sequence[RowLoads], blocks: Sequence[Sequence[int]], world_size: int
) -> float:
    loads_W = np.zeros(world_size)
    for table, rows_W in zip(tables, blocks):
        edges = np.concatenate([[0], np.cumsum(rows_W)])
        loads_W += np.diff(table.before(edges))
    mean = float(loads_W.mean())
    return float(loads_W.max()) / mean if mean else 1.0
