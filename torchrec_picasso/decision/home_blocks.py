"""Where each table is cut into home blocks, so that all homes are asked for equally much.

Stock row-wise sharding gives every rank the same number of rows; when frequent rows lie together
(ids in order of frequency, or of age), one home answers most requests. Here the cuts follow the
cumulative expected load. Tables are cut one after the other, coarse ones first, and each cut aims
at the ranks' load so far: what a small table cannot balance, the next one does.

Blocks stay contiguous and in rank order, as TorchRec's row-wise shards are, so the checkpoint is
stock TorchRec's. A checkpoint tells blocks apart by where they start, so an empty one may not stand
before a full one: every rank gets a row while rows last, and what is empty comes last. A rank's
memory grows with its rows: ``evenness`` trades load for rows.

Shape letters: U rows seen, W ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

__all__ = ["HomeBlocks", "RowLoads", "balance_homes", "even_blocks", "filled_blocks"]


@dataclass(frozen=True, kw_only=True, eq=False)
class RowLoads:
    """Expected requests per step for the rows of one table.

    Args:
        num_embeddings: Rows of the table.
        rows_U: Rows with a load of their own, ascending, int64, shape ``(U,)``.
        load_U: Their loads, float64, shape ``(U,)``; 0 for hot rows, which nobody requests.
        spread_load: Load of all other requests together, spread evenly over the table.
    """

    num_embeddings: int
    rows_U: np.ndarray
    load_U: np.ndarray
    spread_load: float

    @property
    def total(self) -> float:
        """Requests of all rows."""
        return float(self.load_U.sum()) + self.spread_load

    def before(self, row: np.ndarray) -> np.ndarray:
        """Load of all rows below each given one."""
        ends_U1 = np.concatenate([[0.0], self.load_U.cumsum()])
        own = ends_U1[np.searchsorted(self.rows_U, row)]
        result: np.ndarray = own + row * (self.spread_load / self.num_embeddings)
        return result


@dataclass(frozen=True, kw_only=True)
class HomeBlocks:
    """The cuts of all tables.

    Args:
        block_rows_TW: Rows of each table at home on each rank, summing to the table's.
        max_over_mean: Expected requests at the busiest home over the mean.
        even_max_over_mean: The same with TorchRec's equal blocks.
    """

    block_rows_TW: tuple[tuple[int, ...], ...]
    max_over_mean: float
    even_max_over_mean: float


def even_blocks(num_embeddings: int, world_size: int) -> tuple[int, ...]:
    """TorchRec's row-wise blocks: ``ceil(rows / W)`` each while rows last."""
    size = -(-num_embeddings // world_size)
    starts = [min(num_embeddings, rank * size) for rank in range(world_size + 1)]
    return tuple(end - start for start, end in pairwise(starts))


def filled_blocks(num_embeddings: int, world_size: int) -> tuple[int, ...]:
    """TorchRec's row-wise blocks, or equal ones where those leave a rank without a row to have."""
    blocks = even_blocks(num_embeddings, world_size)
    if blocks[-1] or num_embeddings < world_size:
        return blocks
    size, larger = divmod(num_embeddings, world_size)
    return tuple(size + (rank < larger) for rank in range(world_size))


def balance_homes(
    tables: Sequence[RowLoads], world_size: int, evenness: float = 0.02
) -> HomeBlocks:
    """Cuts tables so that every rank is home to the same expected requests.

    Args:
        tables: Loads per table.
        world_size: Ranks.
        evenness: Weight of rows beside load, at least 0: no rank gets more than about
            ``(1 + evenness) / evenness`` times the mean of a table's rows.

    Returns:
        The cuts, and the balance they reach; those of :func:`filled_blocks` where they balance as
        well. No block is empty in a table with a row for every rank, and in a smaller one every
        row is a block of its own, with the empty ones last.

    Cost:
        O(U log U + T W log U) time.
    """
    even = [even_blocks(table.num_embeddings, world_size) for table in tables]
    filled = [filled_blocks(table.num_embeddings, world_size) for table in tables]
    even_balance = _max_over_mean(tables, even, world_size)
    filled_balance = _max_over_mean(tables, filled, world_size)
    weighted = [_with_rows(table, evenness) for table in tables]
    # A table whose largest row is heavy is coarse: later, finer ones make up for it
    order = sorted(
        range(len(tables)),
        key=lambda t: (-(weighted[t].load_U.max() if weighted[t].load_U.size else 0.0), t),
    )
    aims = np.arange(1, world_size) / world_size
    given = np.zeros(world_size - 1)  # load of the ranks below each cut, so far
    cuts: dict[int, np.ndarray] = {}
    total = 0.0
    for t in order:
        total += weighted[t].total
        cuts[t] = _with_rows_between(
            _cut(weighted[t], aims * total - given), tables[t].num_embeddings
        )
        given += weighted[t].before(cuts[t])
    balanced = []
    for t, table in enumerate(tables):
        edges = np.concatenate([[0], cuts[t], [table.num_embeddings]])
        balanced.append(tuple(int(n) for n in np.diff(edges)))
    balance = _max_over_mean(tables, balanced, world_size)
    if balance >= filled_balance:
        balanced, balance = filled, filled_balance
    return HomeBlocks(
        block_rows_TW=tuple(balanced), max_over_mean=balance, even_max_over_mean=even_balance
    )


def _with_rows(table: RowLoads, evenness: float) -> RowLoads:
    """Adds a load to every row, so that rows nobody requests are spread too."""
    return RowLoads(
        num_embeddings=table.num_embeddings,
        rows_U=table.rows_U,
        load_U=table.load_U,
        spread_load=table.spread_load + evenness * table.total + 1e-9,
    )


def _cut(table: RowLoads, targets: np.ndarray) -> np.ndarray:
    """Ascending rows such that the load below each is nearest to its target.

    The load below a row grows by jumps at rows with a load and linearly between them.
    """
    slope = table.spread_load / table.num_embeddings
    targets = np.maximum.accumulate(np.clip(targets, 0.0, table.total))
    below_U = table.before(table.rows_U)
    after_U = below_U + table.load_U
    # the last row with a load that lies wholly below the target, then on along the slope
    index = np.searchsorted(after_U, targets, side="right")
    start = (
        np.where(index > 0, table.rows_U[index - 1], 0) if after_U.size else np.zeros_like(index)
    )
    load_at_start = np.where(index > 0, after_U[index - 1], 0.0) if after_U.size else 0.0
    row = start + (targets - load_at_start) / slope
    if after_U.size:
        # the next loaded row is the one that would cross the target: stop before or behind it
        inside = index < after_U.size
        following = np.minimum(index, after_U.size - 1)
        blocked = inside & (row >= table.rows_U[following])
        closer_behind = after_U[following] - targets < targets - below_U[following]
        row = np.where(blocked, table.rows_U[following] + closer_behind, row)
    cut = np.clip(np.rint(row), 0, table.num_embeddings).astype(np.int64)
    result: np.ndarray = np.maximum.accumulate(cut)
    return result


def _with_rows_between(cut: np.ndarray, num_embeddings: int) -> np.ndarray:
    """Moves ascending cuts apart, so that no block between them is empty while rows last."""
    before = np.arange(1, len(cut) + 1)  # the ranks below each cut, which have a row each
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
