"""Counts the lookups of one table in bounded memory: exactly, or of its most frequent rows.

A small table has a dense vector, one count per row: no sort, 2 to 15 ns per lookup. For a large
table the seen rows are kept sorted; ids are buffered, so that the cost of sorting stays
proportional to the lookups. Both are exact. When the sorted rows exceed their budget, only the most
frequent rows (heavy hitters) are kept, and each count may be too low by at most ``max_undercount``
lookups. NumPy sorts ids, in 4 to 10 ns per id; torch's sort takes 40 ns.

Source: Misra and Gries 1982; Agarwal et al. 2012, Mergeable Summaries, section 3.1
(:func:`keep_heaviest`).

Shape letters: N lookups, R rows of the table, U and V counted rows.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from torchrec_picasso.frequency.spectrum import CountSpectrum

__all__ = [
    *("MAX_ROWS_COUNTED", "LookupCounter", "ModelTable", "TableCounts"),
    *("add_counts", "count_rows", "keep_heaviest", "lookup_counter"),
]

MAX_ROWS_COUNTED = 1 << 20
"""Default number of rows of a large table with a count of their own: 16 MiB."""

_DENSE_ROWS_PER_SORTED = 4  # a dense count takes 8 bytes, a sorted row and its count 16

_MIN_PENDING_LOOKUPS = 1 << 19
"""Buffered ids are counted when there are this many, or as many as counted rows if those are
more."""

_Vector = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class ModelTable:
    """An embedding table whose lookups are counted.

    Args:
        name: Table name.
        num_embeddings: Number of rows; ``None`` = the largest seen id plus 1.
        feature_names: Features of the table.
    """

    name: str
    num_embeddings: int | None
    feature_names: tuple[str, ...]

    @property
    def row_range(self) -> str:
        """Range of the table's row ids, for messages."""
        return "0 and up" if self.num_embeddings is None else f"0..{self.num_embeddings - 1}"

    def id_outside(self, ids_N: Tensor) -> int | None:
        """Returns an id that is no row of the table, or ``None`` if all are rows."""
        if not ids_N.numel():
            return None
        smallest, largest = (int(x) for x in torch.aminmax(ids_N))
        if smallest < 0:
            return smallest
        is_inside = self.num_embeddings is None or largest < self.num_embeddings
        return None if is_inside else largest


@dataclass(frozen=True, kw_only=True, eq=False)
class TableCounts:
    """Lookup counts of one table.

    Args:
        num_embeddings: Number of rows of the table.
        feature_names: Features of the table, in the model's order.
        rows_U: Counted rows, ascending, int64, shape ``(U,)``.
        counts_U: Number of lookups of each row, above 0, int64, shape ``(U,)``.
        max_undercount: Upper bound of the lookups missing in a count; 0 = all seen rows are in
            ``rows_U`` with exact counts. A row outside ``rows_U`` has at most this many lookups.
        total_lookups: Number of lookups of the table; ``None`` = the sum of ``counts_U``.
        effective_share: Number of independent lookups per lookup of a batch, 0 to 1.
    """

    num_embeddings: int
    feature_names: tuple[str, ...]
    rows_U: Tensor
    counts_U: Tensor
    max_undercount: int = 0
    total_lookups: int | None = None
    effective_share: float = 1.0

    @property
    def num_lookups(self) -> int:
        """Number of lookups of the table, including rows outside ``rows_U``."""
        return int(self.counts_U.sum()) if self.total_lookups is None else self.total_lookups

    @property
    def num_rows_seen(self) -> int:
        """Number of distinct seen rows; an estimate if the counts are not exact."""
        return round(float(self.spectrum().rows_K.sum()))

    @property
    def is_exact(self) -> bool:
        """Whether every seen row has an exact count."""
        return not self.max_undercount

    def spectrum(self) -> CountSpectrum:
        """Returns the number of rows by lookup count."""
        return self._spectrum

    @cached_property
    def _spectrum(self) -> CountSpectrum:
        num_uncounted = self.num_lookups - int(self.counts_U.sum())
        # A row that was always among the heavy hitters misses exactly max_undercount lookups. The
        # remaining uncounted lookups are of rows outside rows_U.
        missing = min(self.max_undercount, num_uncounted // max(1, self.rows_U.numel()))
        rest = num_uncounted - missing * self.rows_U.numel()
        spectrum = CountSpectrum.from_counts(self.counts_U + missing, self.num_embeddings, rest)
        return replace(spectrum, effective_share=self.effective_share)

    def most_frequent_first(self) -> tuple[Tensor, Tensor]:
        """Returns rows and counts, both ``(U,)``, sorted by descending count, then by row."""
        counts_U, order_U = self.counts_U.sort(descending=True, stable=True)
        return self.rows_U[order_U], counts_U

    def merge(self, other: TableCounts) -> TableCounts:
        """Adds the counts of two samples of the same table; exact if both are exact."""
        vectors = (self.rows_U, self.counts_U, other.rows_U, other.counts_U)
        rows, counts = add_counts(*(vector.numpy() for vector in vectors))
        max_undercount = self.max_undercount + other.max_undercount
        num_lookups = self.num_lookups + other.num_lookups
        # mean of both shares, weighted by lookups
        weight = self.num_lookups / num_lookups if num_lookups else 1.0
        share = other.effective_share + weight * (self.effective_share - other.effective_share)
        return replace(
            self,
            rows_U=torch.from_numpy(rows),
            counts_U=torch.from_numpy(counts),
            max_undercount=max_undercount,
            total_lookups=num_lookups if max_undercount else None,
            effective_share=share,
        )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TableCounts):
            return False
        pairs = [(getattr(self, field.name), getattr(other, field.name)) for field in fields(self)]
        return all(torch.equal(a, b) if isinstance(a, Tensor) else a == b for a, b in pairs)


def lookup_counter(table: ModelTable, max_rows_counted: int = MAX_ROWS_COUNTED) -> LookupCounter:
    """Creates the counter of a table with at most ``max_rows_counted`` sorted rows, or a dense
    vector of 4 times as many: 32 bytes for each, twice that while buffered ids are counted."""
    num_embeddings = table.num_embeddings
    if num_embeddings is None or num_embeddings > _DENSE_ROWS_PER_SORTED * max_rows_counted:
        return _SortedCounter(table, max_rows_counted)
    return _DenseCounter(table, num_embeddings)


class _DenseCounter:
    """Counts with one int64 per row of the table."""

    def __init__(self, table: ModelTable, num_embeddings: int) -> None:
        self._table = table
        self._counts_R = torch.zeros(num_embeddings, dtype=torch.int64)

    def add(self, ids_N: Tensor) -> None:
        """Counts one lookup for each id: row ids in any order, with repeats."""
        # expand: a source of N ones without N elements of memory
        self._counts_R.index_add_(0, ids_N, torch.ones((), dtype=torch.int64).expand(ids_N.numel()))

    def result(self) -> TableCounts:
        """Returns the counts; the counter must not be used afterwards."""
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
        self._table, self._max_rows = table, max_rows
        self._rows_U: _Vector = np.empty(0, dtype=np.int64)
        self._counts_U: _Vector = np.empty(0, dtype=np.int64)
        self._largest_id, self._num_lookups, self._max_undercount = -1, 0, 0
        self._pending: list[_Vector] = []
        self._num_pending = 0

    def add(self, ids_N: Tensor) -> None:
        """Counts one lookup for each id: row ids in any order, with repeats."""
        # copied: a view would keep the whole batch in memory
        self._pending.append(ids_N.numpy().astype(np.int64, copy=True))
        self._num_pending += ids_N.numel()
        if self._num_pending >= max(_MIN_PENDING_LOOKUPS, self._rows_U.size):
            self._count_pending()

    def result(self) -> TableCounts:
        """Returns the counts; the counter must not be used afterwards."""
        self._count_pending()
        size = self._table.num_embeddings
        return TableCounts(
            num_embeddings=self._largest_id + 1 if size is None else size,
            feature_names=self._table.feature_names,
            rows_U=torch.from_numpy(self._rows_U),
            counts_U=torch.from_numpy(self._counts_U),
            max_undercount=self._max_undercount,
            total_lookups=self._num_lookups if self._max_undercount else None,
        )

    def _count_pending(self) -> None:
        """Sorts and counts the buffered ids, and adds the counts to those of the seen rows."""
        if not self._num_pending:
            return
        rows, counts = count_rows(np.concatenate(self._pending))
        self._num_lookups += self._num_pending
        self._pending, self._num_pending = [], 0
        self._largest_id = max(self._largest_id, int(rows[-1]))
        rows, counts = add_counts(self._rows_U, self._counts_U, rows, counts)
        # every pass may lower all counts; the bound on missing lookups is the sum of the passes
        self._rows_U, self._counts_U, subtracted = keep_heaviest(rows, counts, self._max_rows)
        self._max_undercount += subtracted


LookupCounter = _DenseCounter | _SortedCounter


def count_rows(ids_N: _Vector) -> tuple[_Vector, _Vector]:
    """Returns the distinct ids, ascending, and their counts, both ``(U,)``: 10 ns per id."""
    sorted_N = np.sort(ids_N)
    starts_U = _starts(sorted_N)
    return sorted_N[starts_U], np.diff(starts_U, append=sorted_N.size)


def add_counts(
    rows_U: _Vector, counts_U: _Vector, other_rows_V: _Vector, other_counts_V: _Vector
) -> tuple[_Vector, _Vector]:
    """Adds two sparse count vectors, each with distinct rows, ascending, and their counts."""
    rows_N = np.concatenate([rows_U, other_rows_V])
    # NumPy's stable sort merges two ascending runs
    order_N = np.argsort(rows_N, kind="stable")
    rows_N, counts_N = rows_N[order_N], np.concatenate([counts_U, other_counts_V])[order_N]
    starts_U = _starts(rows_N)
    return rows_N[starts_U], np.add.reduceat(counts_N, starts_U)


def _starts(sorted_N: _Vector) -> _Vector:
    """Returns the index of the first of each run of equal ids, shape ``(U,)``."""
    is_first_N = np.ones(sorted_N.size, dtype=bool)
    np.not_equal(sorted_N[1:], sorted_N[:-1], out=is_first_N[1:])
    return np.flatnonzero(is_first_N)


def keep_heaviest(
    rows_U: _Vector, counts_U: _Vector, max_rows: int
) -> tuple[_Vector, _Vector, int]:
    """Keeps the most frequent rows and bounds the error of their counts; O(U) time.

    The largest count that does not fit is subtracted from all counts, and rows at 0 or below are
    dropped. Repeated over a stream, no count is too high, and none is too low by more than the sum
    of the subtracted numbers, which is at most the lookups divided by ``max_rows + 1``. Returns the
    kept rows, in the given order, their counts after subtraction, and the subtracted number.
    """
    if rows_U.size <= max_rows:
        return rows_U, counts_U, 0
    # the (max_rows + 1)-th largest count, by a selection in O(U)
    place = rows_U.size - max_rows - 1
    subtracted = int(np.partition(counts_U, place)[place])
    is_kept_U = counts_U > subtracted
    return rows_U[is_kept_U], counts_U[is_kept_U] - subtracted, subtracted
