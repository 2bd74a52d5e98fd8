"""One table's exact lookup counts, sparse: only rows that were seen take memory (16 bytes each).

Exact rather than sketched: a hot set is chosen from the head of the distribution, and the tail that
exactness pays for is bounded by the lookups sampled, not by the size of the table.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["CountAccumulator", "TableCounts"]

# Pending ids are folded in when they reach this many or the rows seen, whichever is more, so the
# cost of re-sorting the rows seen stays proportional to the lookups.
_MIN_PENDING_LOOKUPS = 1 << 20


@dataclass(frozen=True, kw_only=True, eq=False)
class TableCounts:
    """Lookups of one table.

    Args:
        num_embeddings: Rows of the table.
        feature_names: Features that look it up, in the model's order.
        rows_U: Rows seen, ascending int64, shape ``(U,)``.
        counts_U: Lookups of each, at least 1, int64, shape ``(U,)``.
    """

    num_embeddings: int
    feature_names: tuple[str, ...]
    rows_U: Tensor
    counts_U: Tensor

    @property
    def num_lookups(self) -> int:
        """Lookups of the table that were counted."""
        return int(self.counts_U.sum())

    @property
    def num_rows_seen(self) -> int:
        """Distinct rows among them."""
        return self.rows_U.numel()

    def most_frequent_first(self) -> tuple[Tensor, Tensor]:
        """Rows and counts, both ``(U,)``, by count descending, then row ascending."""
        counts_U, order_U = self.counts_U.sort(descending=True, stable=True)
        return self.rows_U[order_U], counts_U

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, TableCounts)
            and self.num_embeddings == other.num_embeddings
            and self.feature_names == other.feature_names
            and torch.equal(self.rows_U, other.rows_U)
            and torch.equal(self.counts_U, other.counts_U)
        )


class CountAccumulator:
    """Counts ids chunk by chunk, in memory that follows the rows seen rather than the lookups.

    Cost:
        O(N log N) time over N lookups in total, one sort per fold.
    """

    def __init__(self) -> None:
        self._rows_U = torch.empty(0, dtype=torch.int64)
        self._counts_U = torch.empty(0, dtype=torch.int64)
        self._pending: list[Tensor] = []
        self._num_pending = 0

    def add(self, ids_N: Tensor) -> None:
        """Counts one lookup for each id.

        Args:
            ids_N: Row ids, int64, shape ``(N,)``, any order, repeats welcome.
        """
        self._pending.append(ids_N)
        self._num_pending += ids_N.numel()
        if self._num_pending >= max(_MIN_PENDING_LOOKUPS, self._rows_U.numel()):
            self._fold()

    def result(self) -> tuple[Tensor, Tensor]:
        """Rows seen, ascending, and their counts, both int64 ``(U,)``."""
        self._fold()
        return self._rows_U, self._counts_U

    def _fold(self) -> None:
        if not self._pending:
            return
        rows_U, counts_U = torch.unique(torch.cat(self._pending), return_counts=True)
        self._rows_U, self._counts_U = sum_counts(self._rows_U, self._counts_U, rows_U, counts_U)
        self._pending, self._num_pending = [], 0


def sum_counts(
    rows_U: Tensor, counts_U: Tensor, other_rows_V: Tensor, other_counts_V: Tensor
) -> tuple[Tensor, Tensor]:
    """Adds two sparse count vectors.

    Args:
        rows_U: Distinct rows, int64, shape ``(U,)``.
        counts_U: Their counts, int64, shape ``(U,)``.
        other_rows_V: Distinct rows of the other vector, int64, shape ``(V,)``.
        other_counts_V: Their counts, int64, shape ``(V,)``.

    Returns:
        The union of the rows, ascending, and the summed counts.
    """
    rows, inverse = torch.unique(torch.cat([rows_U, other_rows_V]), return_inverse=True)
    counts = torch.zeros_like(rows)
    counts.index_add_(0, inverse, torch.cat([counts_U, other_counts_V]))
    return rows, counts
