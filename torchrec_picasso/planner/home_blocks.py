"""Splits tables into home blocks with equal expected load.

Stock row-wise sharding gives all ranks the same number of rows. If frequent rows have adjacent ids
(ids in order of frequency or age), one rank gets most requests. Here the block boundaries follow
the cumulative expected load. Tables are split one after another, those with the heaviest rows
first, and each split considers the loads of the ranks so far: a later table compensates the
imbalance of earlier tables. Equal loads may need very unequal numbers of rows: if the largest rank
has no memory for them, loads give way.

Ids may drift: new rows are asked for, and blocks cut by what was asked for before may be worse than
equal ones. So blocks cut by the earlier half of the sample must be better in the later half, too.

Blocks are contiguous and in rank order, like TorchRec's row-wise shards, so checkpoints are those
of stock TorchRec. A checkpoint identifies blocks by their first row, so an empty block must not
precede a non-empty one: each rank gets a row if there are enough rows, and empty blocks come last.

Shape letters: S ranges of rows, U rows with a load of their own, T tables, W ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from torchrec_picasso.cost.stock import over_mean
from torchrec_picasso.frequency.counts import range_size

_EVENNESS = (0.02, 0.1, 0.25, 0.5, 1.0, 2.0)
"""Additional load of all rows of a table, relative to its load, which limits the rows, and so the
memory, of a rank: at most 51 times the mean of a table's rows with the first one, which is taken if
memory allows, 1.5 times with the last one."""


@dataclass(frozen=True, kw_only=True, eq=False)
class RowLoads:
    """Expected load per step of the rows of one table, in any unit."""

    num_embeddings: int
    rows_U: np.ndarray
    """Rows with a load of their own, ascending, int64, shape ``(U,)``."""
    load_U: np.ndarray
    """Load of each of these rows, float64, shape ``(U,)``; 0 for hot rows."""
    gap_load_U1: np.ndarray
    """Load of the rows before, between and after these rows, float64, shape ``(U + 1,)``; 0 where
    there are none."""
    spread_load: float
    """Load that is spread evenly over the table."""
    row_bytes: float = 0.0
    """Memory of a row, with optimizer state."""
    halves: Sequence[Sequence[int]] = ()
    """As in :class:`.TableCounts`."""

    @property
    def total(self) -> float:
        """Sum of the load of all rows."""
        return float(self.load_U.sum() + self.gap_load_U1.sum()) + self.spread_load

    def in_half(self, number: int) -> RowLoads:
        """Estimates the loads of the earlier or of the later half of the sample."""
        if not self.halves or not self.rows_U.size:
            return self
        halves_2S = np.asarray(self.halves, dtype=np.float64)
        shares_2S = halves_2S / np.maximum(1, halves_2S.sum(1, keepdims=True))
        # a range's share of the half's lookups, over its mean share of both
        factor_S = 2 * shares_2S[number] / np.maximum(1e-12, shares_2S.sum(0))
        factor_U = factor_S[self.rows_U // range_size(self.num_embeddings)]
        gap_factor_U1 = np.append(factor_U[:1], factor_U)  # of the row before
        loads = {"load_U": self.load_U * factor_U, "gap_load_U1": self.gap_load_U1 * gap_factor_U1}
        return replace(self, **loads)

    def load_below(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns boundaries between rows, ascending, and the load of all rows below each.

        The first boundary is 0, the last the number of rows; others are before and after each row
        with a load of its own, so the load is linear from one boundary to the next.
        """
        inner = np.stack([self.rows_U, self.rows_U + 1], axis=1).ravel()
        boundaries = np.concatenate([[0], inner, [self.num_embeddings]])
        own = np.zeros(boundaries.size)
        own[1::2], own[2::2] = self.gap_load_U1, self.load_U
        return boundaries, own.cumsum() + boundaries * (self.spread_load / self.num_embeddings)


@dataclass(frozen=True, kw_only=True)
class HomeBlocks:
    """Home blocks of all tables, and their balance."""

    block_rows_TW: tuple[tuple[int, ...], ...]
    """Number of home rows of each table on each rank."""
    load_W: tuple[float, ...]
    """Load of each rank."""
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


def balance_homes(
    tables: Sequence[RowLoads], world_size: int, spare_bytes: float = float("inf")
) -> HomeBlocks:
    """Splits tables into home blocks so that all ranks have the same expected load.

    The blocks are those of :func:`filled_blocks` if their balance is at least as good, in the
    sample or in its later half, or if other blocks give a rank ``spare_bytes`` more than the mean.
    No block is empty if the table has a row for every rank; in a smaller table each row is a block,
    and empty blocks come last. O(U log U + T W log U) time.
    """
    even = [even_blocks(table.num_embeddings, world_size) for table in tables]
    blocks = [filled_blocks(table.num_embeddings, world_size) for table in tables]
    row_bytes_T1 = np.array([[table.row_bytes] for table in tables])
    for evenness in _EVENNESS:
        balanced = _balanced(tables, world_size, evenness)
        bytes_W = (np.array(balanced) * row_bytes_T1).sum(0)
        if bytes_W.max() - bytes_W.mean() <= spare_bytes:
            earlier, later = ([table.in_half(half) for table in tables] for half in (0, 1))
            by_earlier = _balanced(earlier, world_size, evenness)
            if over_mean(_loads(later, by_earlier)) < over_mean(_loads(later, blocks)):
                blocks = min(blocks, balanced, key=lambda cut: over_mean(_loads(tables, cut)))
            break
    load_W = _loads(tables, blocks)
    return HomeBlocks(
        block_rows_TW=tuple(blocks),
        load_W=tuple(load_W.tolist()),
        max_over_mean=over_mean(load_W),
        even_max_over_mean=over_mean(_loads(tables, even)),
    )


def _balanced(
    tables: Sequence[RowLoads], world_size: int, evenness: float
) -> list[tuple[int, ...]]:
    """Splits tables at equal shares of their load and of ``evenness`` times it in all rows; tables
    without load in equal blocks."""
    spread = [table.spread_load + evenness * table.total for table in tables]
    weighted = [replace(table, spread_load=load) for table, load in zip(tables, spread)]
    # heaviest rows first: tables of lighter rows can compensate their imbalance
    heaviest = [table.load_U.max(initial=0.0) for table in weighted]
    order = sorted(range(len(tables)), key=lambda t: (-heaviest[t], t))
    balanced = [filled_blocks(table.num_embeddings, world_size) for table in tables]
    given, total = np.zeros(world_size - 1), 0.0  # load so far of the ranks below each cut
    for t in (t for t in order if tables[t].total):
        boundaries, load_below = weighted[t].load_below()
        total += weighted[t].total
        aims = np.arange(1, world_size) / world_size * total - given
        # the row below which the load is nearest to the aim, and at least a row for each rank
        cut = np.rint(np.interp(np.maximum.accumulate(aims), load_below, boundaries))
        cut = _with_rows_between(cut.astype(np.int64), tables[t].num_embeddings)
        given += np.interp(cut, boundaries, load_below)
        sizes = np.diff(cut, prepend=0, append=tables[t].num_embeddings)
        balanced[t] = tuple(sizes.tolist())
    return balanced


def _with_rows_between(cut: np.ndarray, num_embeddings: int) -> np.ndarray:
    """Moves ascending boundaries so that no block is empty if there are enough rows."""
    before = np.arange(1, len(cut) + 1)  # ranks below each boundary: the least rows below it
    spare = num_embeddings - len(cut) - 1
    if spare < 0:
        return np.minimum(before, num_embeddings)
    return np.maximum.accumulate(cut - before).clip(0, spare) + before


def _loads(tables: Sequence[RowLoads], blocks: Sequence[Sequence[int]]) -> NDArray[np.float64]:
    """Returns the load of each rank, shape ``(W,)``."""
    each = [
        np.diff(np.interp(np.cumsum(rows_W), *table.load_below()), prepend=0.0)
        for table, rows_W in zip(tables, blocks)
    ]
    return np.sum(each, axis=0)
