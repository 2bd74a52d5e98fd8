"""Counts the lookups of one table in bounded memory: exactly, or of its most frequent rows.

A small table has a dense vector, one count per row: no sort, 2 to 15 ns per lookup. For a large
table the seen rows are kept sorted; ids are buffered, so that the cost of sorting stays
proportional to the lookups. Both are exact. When the sorted rows exceed their budget, only the most
frequent rows (heavy hitters) are kept, and each count may be too low by at most ``max_undercount``
lookups. NumPy sorts ids, in 4 to 10 ns per id; torch's sort takes 40 ns.

Source: Misra and Gries 1982; Agarwal et al. 2012, Mergeable Summaries, section 3.1
(:func:`_keep_heaviest`).

Shape letters: N lookups, R rows of the table, S ranges of rows, T parts of the time, U
and V counted rows.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from torchrec_picasso.errors import InputError
from torchrec_picasso.frequency.spectrum import CountSpectrum

MAX_ROWS_COUNTED = 1 << 20
"""Default number of rows of a large table with a count of their own: 16 MiB."""

_DENSE_ROWS_PER_SORTED = 4  # a dense count takes 8 bytes, a sorted row and its count 16

_MIN_PENDING_LOOKUPS = 1 << 19
"""Buffered ids are counted when there are this many, or as many as counted rows if those are
more."""

NUM_RANGES = 64
"""Number of equal ranges of rows by which lookups are counted over time."""
_MOST_PARTS = 32
"""Number of parts of the time at most; then neighbours are added up."""

_Vector = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class ModelTable:
    """An embedding table whose lookups are counted; ``num_embeddings`` is its number of rows,
    ``None`` = the largest seen id plus 1."""

    name: str
    num_embeddings: int | None
    feature_names: tuple[str, ...]

    def check_ids(self, ids_N: _Vector, where: str) -> None:
        """Raises InputError, which begins with ``where``, if an id is no row of the table."""
        if not ids_N.size:
            return
        smallest, largest = int(ids_N.min()), int(ids_N.max())
        size = self.num_embeddings
        if smallest < 0 or (size is not None and largest >= size):
            raise InputError(
                f"{where} holds id {smallest if smallest < 0 else largest}, but the rows of table "
                f"{self.name!r} are {'0 and up' if size is None else f'0..{size - 1}'}; give the "
                "table more rows, or take ids modulo the rows"
            )


@dataclass(frozen=True, kw_only=True, eq=False)
class TableCounts:
    """Lookup counts of one table."""

    num_embeddings: int
    feature_names: tuple[str, ...]  # in the model's order
    rows_U: Tensor
    """Counted rows, ascending, int64, shape ``(U,)``."""
    counts_U: Tensor
    """Number of lookups of each row, above 0, int64, shape ``(U,)``."""
    max_undercount: int = 0
    """Upper bound of the lookups missing in a count; 0 = all seen rows are in ``rows_U`` with exact
    counts. A row outside ``rows_U`` has at most this many lookups."""
    num_uncounted: int = 0
    """Number of lookups of the table beside the sum of ``counts_U``."""
    effective_share: float = 1.0
    """Number of independent lookups per lookup of a batch, 0 to 1."""
    halves: tuple[tuple[int, ...], ...] = field(default=(), compare=False)
    """Lookups in the earlier and in the later half of the sample, by :data:`NUM_RANGES` equal
    ranges of rows; empty = not known."""

    @property
    def num_lookups(self) -> int:
        """Number of lookups of the table, including rows outside ``rows_U``."""
        return int(self.counts_U.sum()) + self.num_uncounted

    @property
    def num_rows_seen(self) -> int:
        """Number of distinct seen rows; an estimate if the counts are not exact."""
        return round(float(self.spectrum.rows_K.sum()))

    @property
    def likely_counts(self) -> Tensor:
        """Counts with the lookups that each probably misses, int64, shape ``(U,)``."""
        # a row that was always among the heavy hitters misses exactly max_undercount lookups
        num_rows = max(1, self.rows_U.numel())
        return self.counts_U + min(self.max_undercount, self.num_uncounted // num_rows)

    @cached_property
    def spectrum(self) -> CountSpectrum:
        """Number of rows by lookup count."""
        counts_U = self.likely_counts
        # the remaining uncounted lookups are of rows outside rows_U
        rest = self.num_lookups - int(counts_U.sum())
        return CountSpectrum.from_counts(counts_U, self.num_embeddings, rest, self.effective_share)

    def most_frequent_first(self) -> tuple[Tensor, Tensor]:
        """Returns rows and counts, both ``(U,)``, sorted by descending count, then by row."""
        counts_U, order_U = self.counts_U.sort(descending=True, stable=True)
        return self.rows_U[order_U], counts_U

    def merge(self, other: TableCounts) -> TableCounts:
        """Adds the counts of two samples of the same table; exact if both are exact."""
        pairs = [(each.rows_U.numpy(), each.counts_U.numpy()) for each in (self, other)]
        rows, counts = _add_counts(*pairs[0], *pairs[1])
        num_lookups = self.num_lookups + other.num_lookups
        # mean of both shares, weighted by lookups
        weight = self.num_lookups / num_lookups if num_lookups else 1.0
        share = other.effective_share + weight * (self.effective_share - other.effective_share)
        return replace(
            self,
            rows_U=torch.from_numpy(rows),
            counts_U=torch.from_numpy(counts),
            max_undercount=self.max_undercount + other.max_undercount,
            num_uncounted=self.num_uncounted + other.num_uncounted,
            effective_share=share,
            halves=tuple(
                tuple(map(sum, zip(*halves))) for halves in zip(self.halves, other.halves)
            ),
        )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TableCounts):
            return False
        names = [each.name for each in fields(self) if each.compare]
        pairs = [(getattr(self, name), getattr(other, name)) for name in names]
        return all(torch.equal(a, b) if isinstance(a, Tensor) else a == b for a, b in pairs)


class LookupCounter:
    """Counts the lookups of a table: in a dense vector if it has at most ``4 * max_rows`` rows,
    else of at most ``max_rows`` sorted rows, which take 32 bytes each, and twice that while
    buffered ids are counted."""

    def __init__(self, table: ModelTable, max_rows: int = MAX_ROWS_COUNTED) -> None:
        self._table, self._max_rows = table, max_rows
        self._size = table.num_embeddings or 0  # grows with the ids if unknown
        self._counts_R: Tensor | None = None
        if table.num_embeddings is not None and self._size <= _DENSE_ROWS_PER_SORTED * max_rows:
            self._counts_R = torch.zeros(self._size, dtype=torch.int64)
        self._rows_U: _Vector = np.empty(0, dtype=np.int64)
        self._counts_U: _Vector = np.empty(0, dtype=np.int64)
        self._num_lookups = self._max_undercount = self._num_pending = 0
        self._pending: list[_Vector] = []
        self._counts_TS: list[_Vector] = []
        self._adds_of_part, self._adds_left = 1, 0

    def add(self, ids_N: _Vector) -> None:
        """Counts one lookup for each id: row ids in any order, with repeats."""
        self._num_lookups += ids_N.size
        if self._table.num_embeddings is not None:
            self._count_time(ids_N // range_size(self._size))
        if self._counts_R is not None:
            # expand: a source of N ones without N elements of memory
            ones_N = torch.ones((), dtype=torch.int64).expand(ids_N.size)
            self._counts_R.index_add_(0, torch.from_numpy(ids_N), ones_N)
            return
        self._pending.append(ids_N.copy())  # a view would keep the whole batch in memory
        self._num_pending += ids_N.size
        if self._num_pending >= max(_MIN_PENDING_LOOKUPS, self._rows_U.size):
            self._count_pending()

    def result(self) -> TableCounts:
        """Returns the counts; the counter must not be used afterwards."""
        if self._counts_R is not None:
            rows_U = self._counts_R.nonzero().flatten()
            counts_U = self._counts_R[rows_U]
        else:
            self._count_pending()
            rows_U, counts_U = torch.from_numpy(self._rows_U), torch.from_numpy(self._counts_U)
        return TableCounts(
            num_embeddings=self._size,
            feature_names=self._table.feature_names,
            rows_U=rows_U,
            counts_U=counts_U,
            max_undercount=self._max_undercount,
            num_uncounted=self._num_lookups - int(counts_U.sum()),
            halves=self._halves(),
        )

    def _count_time(self, ranges_N: _Vector) -> None:
        """Counts lookups by the range of their row, in a new part of the time or the last one."""
        if not self._adds_left:
            if len(self._counts_TS) == _MOST_PARTS:
                earlier, later = self._counts_TS[::2], self._counts_TS[1::2]
                self._counts_TS = [one + other for one, other in zip(earlier, later)]
                self._adds_of_part *= 2
            self._counts_TS.append(np.zeros(NUM_RANGES, dtype=np.int64))
            self._adds_left = self._adds_of_part
        self._counts_TS[-1] += np.bincount(ranges_N, minlength=NUM_RANGES)
        self._adds_left -= 1

    def _halves(self) -> tuple[tuple[int, ...], ...]:
        middle = len(self._counts_TS) // 2
        halves = (self._counts_TS[:middle], self._counts_TS[middle:]) if middle else ()
        return tuple(tuple(np.sum(half, axis=0).tolist()) for half in halves)

    def _count_pending(self) -> None:
        """Sorts and counts the buffered ids, and adds the counts to those of the seen rows."""
        if not self._num_pending:
            return
        rows, counts = np.unique(np.concatenate(self._pending), return_counts=True)
        self._pending, self._num_pending = [], 0
        self._size = max(self._size, int(rows[-1]) + 1)
        rows, counts = _add_counts(self._rows_U, self._counts_U, rows, counts)
        # every pass may lower all counts; the bound on missing lookups is the sum of the passes
        self._rows_U, self._counts_U, subtracted = _keep_heaviest(rows, counts, self._max_rows)
        self._max_undercount += subtracted


def range_size(num_embeddings: int) -> int:
    """Returns the number of rows of each of :data:`NUM_RANGES` ranges; the last ones may have
    fewer."""
    return max(1, -(-num_embeddings // NUM_RANGES))


def _add_counts(
    rows_U: _Vector, counts_U: _Vector, other_rows_V: _Vector, other_counts_V: _Vector
) -> tuple[_Vector, _Vector]:
    """Adds two sparse count vectors, each with distinct rows, ascending, and their counts."""
    rows_N = np.concatenate([rows_U, other_rows_V])
    # NumPy's stable sort merges two ascending runs
    order_N = np.argsort(rows_N, kind="stable")
    rows_N, counts_N = rows_N[order_N], np.concatenate([counts_U, other_counts_V])[order_N]
    starts_U = np.flatnonzero(np.diff(rows_N, prepend=-1))  # each row once or twice
    return rows_N[starts_U], np.add.reduceat(counts_N, starts_U)


def _keep_heaviest(
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
