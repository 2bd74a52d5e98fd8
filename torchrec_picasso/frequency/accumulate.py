"""Counts a stream of ids in bounded memory: a dense vector, sorted rows, or heavy hitters and tail.

A small table has a dense vector, one int32 per row: no sort, 2 to 15 ns a lookup. A large one keeps
the rows seen, sorted, and ids wait in a buffer so that re-sorting stays proportional to the
lookups. Both are exact. A dense vector is chosen where it takes no more memory than the budget of
sorted rows (4 bytes a row against 16). When sorted rows outgrow that budget, the frequent ones stay
and a sample of the tail is kept beside them.

Shape letters: N lookups, U rows counted.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from torchrec_picasso.frequency.counts import TableCounts
from torchrec_picasso.frequency.heavy_hitters import keep_heaviest
from torchrec_picasso.frequency.sums import count_rows, sum_sorted
from torchrec_picasso.frequency.table import ModelTable
from torchrec_picasso.frequency.tail import MAX_SAMPLED_ROWS, TailSample

__all__ = ["MAX_ROWS_COUNTED", "CountAccumulator"]

MAX_ROWS_COUNTED = 1 << 20
"""Rows that a table counts one by one, sorted: 16 MiB."""

_DENSE_ROWS_PER_SORTED = 4  # 16 bytes of a sorted row and its count, 4 of a dense count
_INT32_MAX = (1 << 31) - 1

# Pending ids are folded in when they reach this many or the rows counted, whichever is more.
_MIN_PENDING_LOOKUPS = 1 << 19


class CountAccumulator:
    """Counts the lookups of one table, chunk by chunk.

    Args:
        table: The table and its features.
        max_rows_counted: Rows counted one by one; a dense vector may have 4 times as many.
        max_rows_sampled: Rows of the tail's sample.

    Cost:
        Memory of at most 16 bytes per row of ``max_rows_counted`` and as much again while folding;
        5 to 50 ns per lookup.
    """

    def __init__(
        self,
        table: ModelTable,
        max_rows_counted: int = MAX_ROWS_COUNTED,
        max_rows_sampled: int = MAX_SAMPLED_ROWS,
    ) -> None:
        self._table = table
        self._lookups = dict.fromkeys(table.feature_names, 0)
        self._bags = dict.fromkeys(table.feature_names, 0)
        num_embeddings = table.num_embeddings
        self._counter: _DenseCounter | _SortedCounter
        if (
            num_embeddings is not None
            and num_embeddings <= _DENSE_ROWS_PER_SORTED * max_rows_counted
        ):
            self._counter = _DenseCounter(num_embeddings)
        else:
            is_small = num_embeddings is not None and num_embeddings <= _INT32_MAX
            self._counter = _SortedCounter(
                np.dtype(np.int32 if is_small else np.int64), max_rows_counted, max_rows_sampled
            )

    def add(self, feature: str, ids_N: Tensor, num_bags: int) -> None:
        """Counts one lookup for each id.

        Args:
            feature: The feature of the table that looks them up.
            ids_N: Row ids of the table, int32 or int64, shape ``(N,)``, any order, repeats welcome.
            num_bags: Samples that they are the lookups of, those without lookups included.
        """
        self._lookups[feature] += ids_N.numel()
        self._bags[feature] += num_bags
        if ids_N.numel():
            self._counter.add(ids_N)

    def result(self) -> TableCounts:
        """The counts of all ids so far; once, because it hands over the memory."""
        counted = self._counter.take()
        num_embeddings = self._table.num_embeddings
        return TableCounts(
            num_embeddings=counted.num_rows if num_embeddings is None else num_embeddings,
            feature_names=self._table.feature_names,
            rows_U=counted.rows_U,
            counts_U=counted.counts_U,
            max_undercount=counted.max_undercount,
            tail=counted.tail,
            total_lookups=None if counted.tail is None else sum(self._lookups.values()),
            feature_lookups=tuple(self._lookups.values()),
            feature_bags=tuple(self._bags.values()),
        )


@dataclass(frozen=True, kw_only=True)
class _Counted:
    """What a counter knows; ``num_rows`` is the smallest table that holds every id."""

    num_rows: int
    rows_U: Tensor
    counts_U: Tensor
    max_undercount: float = 0
    tail: TailSample | None = None


class _DenseCounter:
    """One count per row of the table."""

    def __init__(self, num_embeddings: int) -> None:
        self._counts_R = torch.zeros(num_embeddings, dtype=torch.int32)
        self._num_lookups = 0

    def add(self, ids_N: Tensor) -> None:
        self._num_lookups += ids_N.numel()
        if self._num_lookups > _INT32_MAX:
            self._counts_R = self._counts_R.long()
        one = torch.ones((), dtype=self._counts_R.dtype)
        self._counts_R.index_add_(0, ids_N, one.expand(ids_N.numel()))

    def take(self) -> _Counted:
        num_rows = self._counts_R.numel()
        rows_U = self._counts_R.nonzero().flatten()
        counts_U = self._counts_R[rows_U].long()
        del self._counts_R
        return _Counted(num_rows=num_rows, rows_U=rows_U, counts_U=counts_U)


class _SortedCounter:
    """Rows seen and their counts; from ``max_rows`` on, the frequent ones and a sample."""

    def __init__(self, dtype: np.dtype[np.integer], max_rows: int, max_sampled: int) -> None:
        self._max_rows = max_rows
        self._max_sampled = max_sampled
        self._largest = -1
        self._rows_U: NDArray[np.integer] = np.empty(0, dtype=dtype)
        self._counts_U: NDArray[np.number] = np.empty(0, dtype=np.int64)
        self._max_undercount: float = 0
        self._tail: TailSample | None = None
        self._pending: list[NDArray[np.integer]] = []
        self._num_pending = 0

    def add(self, ids_N: Tensor) -> None:
        # a copy, because the ids may be a view of a whole batch
        self._pending.append(ids_N.numpy().astype(self._rows_U.dtype, copy=True))
        self._num_pending += ids_N.numel()
        if self._num_pending >= max(_MIN_PENDING_LOOKUPS, self._rows_U.size):
            self._fold()

    def take(self) -> _Counted:
        self._fold()
        rows_U, counts_U = self._rows_U.astype(np.int64), self._counts_U
        del self._rows_U, self._counts_U
        return _Counted(
            num_rows=self._largest + 1,
            rows_U=torch.from_numpy(rows_U),
            counts_U=torch.from_numpy(counts_U),
            max_undercount=self._max_undercount,
            tail=self._tail,
        )

    def _fold(self) -> None:
        if not self._pending:
            return
        rows, counts = count_rows(np.concatenate(self._pending))
        self._pending, self._num_pending = [], 0
        self._largest = max(self._largest, int(rows[-1]))
        if self._tail is not None:
            self._tail = self._tail.add(*_tensors(rows, counts), self._max_sampled)
        all_rows, sums = sum_sorted(self._rows_U, self._counts_U, rows, counts)
        if all_rows.size > self._max_rows and self._tail is None:  # sums are still exact
            self._tail = TailSample.of(*_tensors(all_rows, sums), max_rows=self._max_sampled)
        self._rows_U, self._counts_U, subtracted = keep_heaviest(all_rows, sums, self._max_rows)
        self._max_undercount += subtracted


def _tensors(rows: NDArray[np.integer], counts: NDArray[np.number]) -> tuple[Tensor, Tensor]:
    return torch.from_numpy(rows.astype(np.int64)), torch.from_numpy(counts)
