"""The shape of a table's skew: how many rows were looked up how often.

Everything that sizes an exchange (distinct rows of a batch, cold rows beside a hot set, load of a
home) depends on the counts alone, not on which rows have them. A spectrum keeps each distinct count
once, so a table of millions of rows answers in microseconds.

Distinct rows follow rarefaction: lookups of a batch are a random subset of the sampled lookups,
which is unbiased up to the size of the sample, where plugging shares into ``1 - (1 - p)^n`` is too
low by the rows that the sample never saw. Beyond the sample, rows not seen yet are extrapolated.

Lookups of a batch need not be independent (:mod:`.dependence`). Bursts count as fewer independent
lookups, which leaves fewer distinct rows; how many fewer is told by those of whole batches.

Source: Hurlbert 1971 (rarefaction); Chao 1984 and Colwell et al. 2012, eq. 9 (extrapolation);
Good 1953 (mass of the unseen).

Shape letters: K distinct counts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from torchrec_picasso.frequency.dependence import INDEPENDENT, Dependence

__all__ = ["CountSpectrum"]

_FEW_BINS = 1 << 16
_EXACT_UP_TO = 1e6
"""Lookups up to which log-gammas keep enough digits."""
_AS_INDEPENDENT, _SIGMAS = 0.01, 2.0
"""Distinct rows, as a share of them and as a multiple of what luck does, that lookups may lack or
have more and still pass for independent."""
_LEAST_SHARE, _MOST_SHARE = 1e-4, 8.0
_HALVINGS = 24


@dataclass(frozen=True, kw_only=True, eq=False)
class CountSpectrum:
    """Rows of one table by how often they were looked up.

    Args:
        counts_K: Distinct counts, descending, float64, shape ``(K,)``.
        rows_K: How many rows have each count; estimates where a tail was sampled; float64.
        num_lookups: Lookups counted, the sum of ``counts_K * rows_K`` up to a tail's estimate.
        num_embeddings: Rows of the table.
        dependence: How lookups of batches depend on each other.
    """

    counts_K: Tensor
    rows_K: Tensor
    num_lookups: float
    num_embeddings: int
    dependence: Dependence = INDEPENDENT

    @staticmethod
    def of(
        counts_U: Tensor,
        num_embeddings: int,
        tail_counts_V: Tensor | None = None,
        tail_rows_per_sampled: float = 1.0,
        num_lookups: float | None = None,
        dependence: Dependence = INDEPENDENT,
    ) -> CountSpectrum:
        """Makes the spectrum of counted rows and, where only a sample of the tail was kept, of it.

        Args:
            counts_U: Count of every row in full, shape ``(U,)``.
            num_embeddings: Rows of the table.
            tail_counts_V: Counts of sampled rows outside ``counts_U``.
            tail_rows_per_sampled: Rows that each sampled row stands for.
            num_lookups: Lookups in all; ``None`` = the sum over the rows.
            dependence: How lookups of batches depend on each other.
        """
        if tail_counts_V is None and _is_soon_counted(counts_U):
            rows = torch.bincount(counts_U)
            counts = rows.nonzero().flatten()
            counts, rows = counts.double(), rows[counts].double()
        else:
            tail_V = counts_U.new_empty(0) if tail_counts_V is None else tail_counts_V
            counts, inverse = torch.unique(
                torch.cat([counts_U.double(), tail_V.double()]), return_inverse=True
            )
            weights = torch.ones(inverse.numel(), dtype=torch.float64)
            weights[counts_U.numel() :] = tail_rows_per_sampled
            rows = torch.zeros_like(counts).index_add_(0, inverse, weights)
        total = float((counts * rows).sum()) if num_lookups is None else float(num_lookups)
        return CountSpectrum(
            counts_K=counts.flip(0),
            rows_K=rows.flip(0),
            num_lookups=total,
            num_embeddings=num_embeddings,
            dependence=dependence,
        )

    def presence(self, num_lookups: float) -> Tensor:
        """Chance that a row of each count is among some lookups.

        Args:
            num_lookups: Lookups of the table, at least 0.

        Returns:
            Between 0 and 1, float64, shape ``(K,)``; 1 from the size of the sample on.
        """
        if not self.num_lookups:
            return torch.zeros_like(self.counts_K)
        share = self.dependence.effective_share
        total = self.num_lookups * share
        drawn = min(float(num_lookups) * share, total)
        counts_K = self.counts_K * share
        left_K = total - counts_K - drawn
        log_absent_K = _log_absent(total, counts_K, drawn)
        absent_K = torch.where(left_K >= 0, log_absent_K.exp(), torch.zeros_like(left_K))
        return (1 - absent_K).clamp(0, 1)

    def expected_unique(self, num_lookups: float) -> float:
        """Expected distinct rows among some lookups, between 0 and the rows of the table."""
        seen = float((self.rows_K * self.presence(num_lookups)).sum())
        return min(
            seen + self.expected_unseen(num_lookups), float(self.num_embeddings), num_lookups
        )

    def with_distinct(
        self, num_lookups: float, num_distinct: float, num_batches: int
    ) -> CountSpectrum:
        """The same counts, of lookups that come in bursts as those of some batches do.

        Args:
            num_lookups: Lookups of a batch, on average.
            num_distinct: Distinct rows among them, on average.
            num_batches: Batches that these are the averages of.

        Returns:
            Itself where independent lookups have about as many distinct rows.
        """
        luck = _SIGMAS * math.sqrt(num_distinct / num_batches)
        least = max(luck, _AS_INDEPENDENT * num_distinct)
        if abs(self.expected_unique(num_lookups) - num_distinct) <= least:
            return self
        low, high = _LEAST_SHARE, _MOST_SHARE
        for _ in range(_HALVINGS):
            middle = math.sqrt(low * high)
            found = self._in_bursts(middle).expected_unique(num_lookups)
            low, high = (middle, high) if found < num_distinct else (low, middle)
        return self._in_bursts(math.sqrt(low * high))

    def _in_bursts(self, effective_share: float) -> CountSpectrum:
        dependence = replace(self.dependence, effective_share=effective_share)
        return replace(self, dependence=dependence)

    def persistence_of(self, num_hot: float) -> float:
        """Of the ``num_hot`` most frequent rows that batches like these use, what later ones do."""
        return self.dependence.persistence_of(num_hot, float(self.rows_K.sum()))

    def expected_hot(self, num_lookups: float, num_hot: float) -> float:
        """Expected distinct rows among some lookups that are of the ``num_hot`` most frequent."""
        ends_K = self.rows_K.cumsum(0)
        taken_K = (num_hot - (ends_K - self.rows_K)).clamp(min=0).minimum(self.rows_K)
        return float((taken_K * self.presence(num_lookups)).sum())

    def rows_for_coverage(self, share: float) -> int:
        """How many of the most frequent rows take ``share`` of the lookups."""
        wanted = share * self.num_lookups
        lookups_K = (self.counts_K * self.rows_K).cumsum(0)
        index = int(torch.searchsorted(lookups_K, torch.tensor(wanted, dtype=torch.float64)))
        if index == lookups_K.numel():
            return round(float(self.rows_K.sum()))
        rows_before = float(self.rows_K[:index].sum())
        rest = wanted - (float(lookups_K[index - 1]) if index else 0.0)
        return math.ceil(rows_before + rest / float(self.counts_K[index]) - 1e-9)

    def coverage_curve(self) -> tuple[Tensor, Tensor]:
        """Rows, most frequent first, against the share of lookups they take; both ``(K,)``."""
        share_K = (self.counts_K * self.rows_K).cumsum(0) / max(self.num_lookups, 1e-9)
        return self.rows_K.cumsum(0), share_K

    def expected_unseen(self, num_lookups: float) -> float:
        """Rows that the sample never saw, expected among more lookups than it holds; else 0."""
        extra = num_lookups - self.num_lookups
        unseen = self.num_unseen
        if extra <= 0 or not unseen:
            return 0.0
        once = self._rows_with_count(1)
        return (
            unseen
            * -torch.expm1(
                extra
                * torch.log1p(
                    torch.tensor(-once / (self.num_lookups * unseen + once), dtype=torch.float64)
                )
            ).item()
        )

    @property
    def num_unseen(self) -> float:
        """Rows in use that the sample never saw: Chao's lower bound, within the table."""
        once, twice = self._rows_with_count(1), self._rows_with_count(2)
        estimate = once * (once - 1) / 2 if twice == 0 else once * once / (2 * twice)
        return max(0.0, min(estimate, self.num_embeddings - float(self.rows_K.sum())))

    @property
    def unseen_mass(self) -> float:
        """Share of future lookups that go to rows the sample never saw (Good-Turing)."""
        return self._rows_with_count(1) / self.num_lookups if self.num_lookups else 1.0

    def _rows_with_count(self, count: int) -> float:
        return float(self.rows_K[(self.counts_K - count).abs() < 0.5].sum())


def _is_soon_counted(counts_U: Tensor) -> bool:
    """Whether a bin for each number up to the largest is less work than sorting."""
    if counts_U.is_floating_point() or not counts_U.numel():
        return False
    return int(counts_U.max()) <= 8 * counts_U.numel() + _FEW_BINS


def _log_absent(total: float, counts_K: Tensor, drawn: float) -> Tensor:
    """Log of ``C(N - c, n) / C(N, n)``: none of a row's c lookups is among n drawn of N."""
    if total <= _EXACT_UP_TO:
        left_K = (total - counts_K - drawn).clamp(min=0)
        whole = torch.tensor([total + 1, total - drawn + 1], dtype=torch.float64).lgamma()
        log_absent_K = (total - counts_K + 1).lgamma() - (left_K + 1).lgamma()
        return log_absent_K - whole[0] + whole[1]
    # The ratio is a product of k factors 1 - m / (N - i), k the smaller of c and n. Differences of
    # log-gammas cancel for large N; the middle factor k times does not, and errs by O((k/N)^3).
    fewer_K, more_K = counts_K.clamp(max=drawn), counts_K.clamp(min=drawn)
    ratio_K = more_K / (total - (fewer_K - 1) / 2)
    return fewer_K * torch.log1p(-ratio_K.clamp(max=1 - 1e-15))
