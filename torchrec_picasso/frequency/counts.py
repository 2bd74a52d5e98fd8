"""The lookup counts of one table: exact, or of its most frequent rows.

Counts are exact while the rows seen fit the budget of :class:`.accumulate.CountAccumulator`. Beyond
it the most frequent rows (heavy hitters) remain, and each count lacks at most ``max_undercount``
lookups.

Shape letters: U rows counted.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from torchrec_picasso.frequency.sparse_counts import add_counts
from torchrec_picasso.frequency.spectrum import CountSpectrum

__all__ = ["ModelTable", "TableCounts"]


@dataclass(frozen=True, kw_only=True)
class ModelTable:
    """An embedding table whose lookups are counted.

    Args:
        name: Table name.
        num_embeddings: Rows; ``None`` = the largest id seen plus 1.
        feature_names: Features that look the table up.
    """

    name: str
    num_embeddings: int | None
    feature_names: tuple[str, ...]

    @property
    def row_range(self) -> str:
        """The table's row ids, for messages."""
        return "0 and up" if self.num_embeddings is None else f"0..{self.num_embeddings - 1}"


@dataclass(frozen=True, kw_only=True, eq=False)
class TableCounts:
    """Lookups of one table.

    Args:
        num_embeddings: Rows of the table.
        feature_names: Features that look the table up, in the model's order.
        rows_U: Rows counted, ascending int64, shape ``(U,)``.
        counts_U: Lookups of each row, above 0, int64, shape ``(U,)``.
        max_undercount: Most lookups that a count may lack; 0 = every row seen is in ``rows_U`` with
            its exact count. A row that is not in ``rows_U`` was looked up at most this often.
        total_lookups: Lookups of the table; ``None`` = the sum of ``counts_U``.
        effective_share: Independent lookups that one lookup of a batch counts as.
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
        """Lookups of the table, those of rows that are not in ``rows_U`` included."""
        return int(self.counts_U.sum()) if self.total_lookups is None else self.total_lookups

    @property
    def num_rows_seen(self) -> int:
        """Distinct rows looked up; an estimate where the counts are not exact."""
        return round(float(self.spectrum().rows_K.sum()))

    @property
    def is_exact(self) -> bool:
        """Whether every row seen has its exact count."""
        return not self.max_undercount

    def spectrum(self) -> CountSpectrum:
        """Returns how many rows were looked up how often."""
        return self._spectrum

    @cached_property
    def _spectrum(self) -> CountSpectrum:
        num_uncounted = self.num_lookups - int(self.counts_U.sum())
        # A row that stayed among the heavy hitters throughout lacks max_undercount lookups exactly.
        # The other lookups without a count went to rows that are not in rows_U.
        lacking = min(self.max_undercount, num_uncounted // max(1, self.rows_U.numel()))
        rest = num_uncounted - lacking * self.rows_U.numel()
        spectrum = CountSpectrum.of(self.counts_U + lacking, self.num_embeddings, rest)
        return replace(spectrum, effective_share=self.effective_share)

    def most_frequent_first(self) -> tuple[Tensor, Tensor]:
        """Returns rows and counts, both ``(U,)``, by count descending, then row ascending."""
        counts_U, order_U = self.counts_U.sort(descending=True, stable=True)
        return self.rows_U[order_U], counts_U

    def merge(self, other: TableCounts) -> TableCounts:
        """Returns the counts of two samples of the same table; exact if both are.

        Args:
            other: Counts of the same table, with the same features.
        """
        large, small = (
            (self, other) if self.rows_U.numel() >= other.rows_U.numel() else (other, self)
        )
        rows, counts = add_counts(
            large.rows_U.numpy(),
            large.counts_U.numpy(),
            small.rows_U.numpy(),
            small.counts_U.numpy(),
        )
        max_undercount = self.max_undercount + other.max_undercount
        num_lookups = self.num_lookups + other.num_lookups
        ours = self.num_lookups / num_lookups if num_lookups else 1.0
        return TableCounts(
            num_embeddings=self.num_embeddings,
            feature_names=self.feature_names,
            rows_U=torch.from_numpy(rows),
            counts_U=torch.from_numpy(counts),
            max_undercount=max_undercount,
            total_lookups=num_lookups if max_undercount else None,
            effective_share=other.effective_share
            + ours * (self.effective_share - other.effective_share),
        )

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, TableCounts)
            and self.num_embeddings == other.num_embeddings
            and self.feature_names == other.feature_names
            and torch.equal(self.rows_U, other.rows_U)
            and torch.equal(self.counts_U, other.counts_U)
            and self.max_undercount == other.max_undercount
            and self.num_lookups == other.num_lookups
            and self.effective_share == other.effective_share
        )
