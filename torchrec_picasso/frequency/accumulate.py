"""Counts a stream of ids in bounded memory: a dense vector, sorted rows, or heavy hitters.

A small table has a dense vector, one count per row: no sort, 2 to 15 ns per lookup. For a large
table the seen rows are kept sorted; ids are buffered, so that the cost of sorting stays
proportional to the lookups. Both are exact. When the sorted rows exceed their budget, only the most
frequent rows are kept (:func:`.counts.keep_heaviest`).

Shape letters: N lookups, R rows of the table, U rows counted.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from torchrec_picasso.frequency.counts import (
    ModelTable,
    TableCounts,
    add_counts,
    count_rows,
    keep_heaviest,
)

__all__ = ["MAX_ROWS_COUNTED", "CountAccumulator"]

MAX_ROWS_COUNTED = 1 << 20
"""Default number of rows of a large table with a count of their own: 16 MiB."""

_DENSE_ROWS_PER_SORTED = 4  # a dense count takes 8 bytes, a sorted row and its count 16

_MIN_PENDING_LOOKUPS = 1 << 19
"""Buffered ids are counted when there are this many, or as many as counted rows if those are
more."""


class CountAccumulator:
    """Counts the lookups of one table, chunk by chunk.

    Args:
        table: The table and its features.
        max_rows_counted: Maximum number of sorted rows; a dense vector may have 4 times as many.

    Cost:
        At most 32 bytes per row of ``max_rows_counted``, twice that while buffered ids are counted;
        5 to 50 ns per lookup.
    """

    def __init__(self, table: ModelTable, max_rows_counted: int = MAX_ROWS_COUNTED) -> None:
        num_embeddings = table.num_embeddings
        self._counter: _DenseCounter | _SortedCounter
        if (
            num_embeddings is not None
            and num_embeddings <= _DENSE_ROWS_PER_SORTED * max_rows_counted
        ):
            self._counter = _DenseCounter(table, num_embeddings)
        else:
            self._counter = _SortedCounter(table, max_rows_counted)

    def add(self, ids_N: Tensor) -> None:
        """Counts one lookup for each id.

        Args:
            ids_N: Row ids of the table, int32 or int64, shape ``(N,)``, any order, with repeats.
        """
        if ids_N.numel():
            self._counter.add(ids_N)

    def result(self) -> TableCounts:
        """Returns the counts of all ids so far; the counter must not be used afterwards."""
        return self._counter.result()


class _DenseCounter:
    """Counts with one int64 per row of the table."""

    def __init__(self, table: ModelTable, num_embeddings: int) -> None:
        self._table = table
        self._counts_R = torch.zeros(num_embeddings, dtype=torch.int64)

    def add(self, ids_N: Tensor) -> None:
        # expand: a source of N ones without N elements of memory
        self._counts_R.index_add_(0, ids_N, torch.ones((), dtype=torch.int64).expand(ids_N.numel()))

    def result(self) -> TableCounts:
        rows_U = self._counts_R.nonzero().flatten()
        return TableCounts(
            num_embeddings=self._counts_R.numel(),
            feature_names=self._table.feature_names,
            rows_U=rows_U,
            counts_U=self._counts_R[rows_U],
        )


class _SortedCounter:
    """Counts of seen rows; if more than ``max_rows`` are seen, of the most frequent rows."""

    def __init__(self, table: ModelTable, max_rows: int) -> None:
        self._table = table
        self._max_rows = max_rows
        self._rows_U: NDArray[np.int64] = np.empty(0, dtype=np.int64)
        self._counts_U: NDArray[np.int64] = np.empty(0, dtype=np.int64)
        self._largest_id = -1
        self._num_lookups = 0
        self._max_undercount = 0
        self._pending: list[NDArray[np.int64]] = []
        self._num_pending = 0

    def add(self, ids_N: Tensor) -> None:
        # copied: a view would keep the whole batch in memory
        self._pending.append(ids_N.numpy().astype(np.int64, copy=True))
        self._num_pending += ids_N.numel()
        if self._num_pending >= max(_MIN_PENDING_LOOKUPS, self._rows_U.size):
            self._count_pending()

    def result(self) -> TableCounts:
        self._count_pending()
        num_embeddings = self._table.num_embeddings
        return TableCounts(
            num_embeddings=self._largest_id + 1 if num_embeddings is None else num_embeddings,
            feature_names=self._table.feature_names,
            rows_U=torch.from_numpy(self._rows_U),
            counts_U=torch.from_numpy(self._counts_U),
            max_undercount=self._max_undercount,
            total_lookups=self._num_lookups if self._max_undercount else None,
        )

    def _count_pending(self) -> None:
        """Sorts and counts the buffered ids, and adds the counts to those of the seen rows."""
        if not self._pending:
            return
        rows, counts = count_rows(np.concatenate(self._pending))
        self._num_lookups += self._num_pending
        self._pending, self._num_pending = [], 0
        self._largest_id = max(self._largest_id, int(rows[-1]))
        rows, counts = add_counts(self._rows_U, self._counts_U, rows, counts)
        # every pass may lower all counts; the bound on missing lookups is the sum of the passes
        self._rows_U, self._counts_U, subtracted = keep_heaviest(rows, counts, self._max_rows)
        self._max_undercount += subtracted
