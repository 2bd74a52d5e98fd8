"""The rows too rare to be counted one by one: exact counts of a known share of all rows.

A row is in the sample when a hash of its id ends in ``level`` zero bits, so whoever counts it
decides alike and forgets nothing of it: the sample's counts are exact and over the whole stream.
Each sampled row stands for ``2 ** level`` rows. When the sample outgrows its budget the level
rises, which halves it. Distinct rows come out within about ``1 / sqrt(rows in the sample)``, 0.4 %.

Source: Wegman's adaptive sampling (Flajolet 1990); Gibbons 2001, Distinct Sampling for
Highly-Accurate Answers to Distinct Values Queries.

Shape letters: U rows counted, V rows sampled.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from torchrec_picasso.frequency.sums import sum_counts

__all__ = ["MAX_SAMPLED_ROWS", "TailSample"]

MAX_SAMPLED_ROWS = 1 << 16
"""Budget of a sample; 16 bytes each."""


@dataclass(frozen=True, kw_only=True, eq=False)
class TailSample:
    """Exact counts of all rows whose hash ends in ``level`` zero bits.

    Args:
        level: Zero bits; 0 = every row.
        rows_V: The rows, ascending int64, shape ``(V,)``.
        counts_V: Lookups of each over the whole stream, int64 or float64, shape ``(V,)``.
    """

    level: int
    rows_V: Tensor
    counts_V: Tensor

    @staticmethod
    def of(
        rows_U: Tensor, counts_U: Tensor, level: int = 0, max_rows: int = MAX_SAMPLED_ROWS
    ) -> TailSample:
        """Samples rows, at the lowest level from ``level`` on that fits the budget.

        Args:
            rows_U: Distinct rows, ascending int64, shape ``(U,)``: all rows at ``level`` at least.
            counts_U: Their exact counts, shape ``(U,)``.
            level: Lowest level.
            max_rows: Budget.
        """
        zeros_U = _trailing_zeros(rows_U.numpy())
        while np.count_nonzero(zeros_U >= level) > max_rows:
            level += 1
        kept_U = torch.from_numpy(zeros_U >= level)
        return TailSample(level=level, rows_V=rows_U[kept_U], counts_V=counts_U[kept_U])

    @property
    def rows_per_sampled(self) -> int:
        """Rows that each sampled row stands for."""
        return 1 << self.level

    @property
    def num_distinct(self) -> int:
        """Estimate of the distinct rows of the stream."""
        return self.rows_V.numel() << self.level

    def add(self, rows_U: Tensor, counts_U: Tensor, max_rows: int = MAX_SAMPLED_ROWS) -> TailSample:
        """The sample after further lookups.

        Args:
            rows_U: Distinct rows, ascending int64, shape ``(U,)``.
            counts_U: Their further lookups, shape ``(U,)``.
            max_rows: Budget.
        """
        sampled_U = torch.from_numpy(_trailing_zeros(rows_U.numpy()) >= self.level)
        rows, counts = sum_counts(
            self.rows_V, self.counts_V, rows_U[sampled_U], counts_U[sampled_U]
        )
        if rows.numel() <= max_rows:
            return TailSample(level=self.level, rows_V=rows, counts_V=counts)
        return TailSample.of(rows, counts, self.level, max_rows)

    def merge(self, other: TailSample) -> TailSample:
        """The sample of both streams, at the higher of the two levels or above."""
        low, high = (self, other) if self.level <= other.level else (other, self)
        return high.add(low.rows_V, low.counts_V)

    def scaled(self, factor: float) -> TailSample:
        """The sample with every count multiplied."""
        return TailSample(
            level=self.level, rows_V=self.rows_V, counts_V=self.counts_V.double() * factor
        )

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, TailSample)
            and self.level == other.level
            and torch.equal(self.rows_V, other.rows_V)
            and torch.equal(self.counts_V.double(), other.counts_V.double())
        )


def _trailing_zeros(rows_U: NDArray[np.int64]) -> NDArray[np.int64]:
    """Zero bits at the end of each row's hash, 64 where the hash is 0.

    Source:
        The finalizer of SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number
        Generators, OOPSLA 2014), behind its increment so that row 0 is no fixed point.
    """
    z = rows_U.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z = z ^ (z >> np.uint64(31))
    lowest = z & (~z + np.uint64(1))  # the lowest set bit alone, a power of 2; exact as a float
    zeros: NDArray[np.int64] = np.where(
        lowest == 0, 64, np.frexp(lowest.astype(np.float64))[1].astype(np.int64) - 1
    )
    return zeros
