"""The skew of a table: how many rows were looked up how often.

What sizes an exchange (distinct rows of a batch, cold rows beside a hot set, load of an owner rank)
depends on the counts alone, not on which rows have them. A spectrum keeps each distinct count once,
so a table of millions of rows answers in microseconds.

Distinct rows of a batch follow rarefaction: the batch is a random subset of the sampled lookups.
The estimate is unbiased up to the size of the sample, whereas shares in ``1 - (1 - p)^n`` miss the
rows that the sample never saw. Beyond the sample, rows not seen yet are extrapolated. Rarefaction
takes lookups as independent. Ids that come in bursts, such as histories, repeat more: there one
lookup counts as ``effective_share`` independent lookups (Kish 1965, effective sample size).

Source: Hurlbert 1971 (rarefaction); Chao 1984 and Colwell et al. 2012, eq. 9 (extrapolation);
Good 1953 (mass of the unseen).

Shape letters: U rows counted, K distinct counts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from torchrec_picasso.frequency.sparse_counts import count_rows

__all__ = ["CountSpectrum"]

_EXACT_UP_TO = 1e6
"""Lookups up to which differences of log-gammas keep enough digits."""
_INDEPENDENT_WITHIN, _SIGMAS = 0.01, 2.0
"""Excess of predicted distinct rows up to which lookups count as independent: as a share of them,
and in standard deviations of the average."""
_LEAST_SHARE, _HALVINGS = 1e-4, 24


@dataclass(frozen=True, kw_only=True, eq=False)
class CountSpectrum:
    """Rows of one table by how often they were looked up.

    Args:
        counts_K: Distinct counts, descending, float64, shape ``(K,)``.
        rows_K: Rows that have each count, float64, shape ``(K,)``.
        num_lookups: Lookups counted, the sum of ``counts_K * rows_K``.
        num_embeddings: Rows of the table.
        effective_share: Independent lookups that one lookup of a batch counts as.
    """

    counts_K: Tensor
    rows_K: Tensor
    num_lookups: float
    num_embeddings: int
    effective_share: float = 1.0

    @staticmethod
    def of(counts_U: Tensor, num_embeddings: int, num_uncounted: int = 0) -> CountSpectrum:
        """Makes the spectrum of counted rows.

        Args:
            counts_U: Count of each row, int64, shape ``(U,)``.
            num_embeddings: Rows of the table.
            num_uncounted: Lookups of rows without a count; each is taken as a row looked up once,
                as far as the table has rows.
        """
        counts, rows = (torch.from_numpy(part).double() for part in count_rows(counts_U.numpy()))
        if num_uncounted:
            num_rare = max(1, min(num_uncounted, num_embeddings - counts_U.numel()))
            counts = torch.cat([counts, counts.new_tensor([num_uncounted / num_rare])])
            rows = torch.cat([rows, rows.new_tensor([num_rare])])
        counts_K, order_K = counts.sort(descending=True)
        rows_K = rows[order_K]
        return CountSpectrum(
            counts_K=counts_K,
            rows_K=rows_K,
            num_lookups=float((counts_K * rows_K).sum()),
            num_embeddings=num_embeddings,
        )

    def presence(self, num_lookups: float) -> Tensor:
        """Returns the chance that a row of each count is among some lookups.

        Args:
            num_lookups: Lookups of the table, at least 0.

        Returns:
            Between 0 and 1, float64, shape ``(K,)``; 1 from the size of the sample on.
        """
        if not self.num_lookups:
            return torch.zeros_like(self.counts_K)
        total, counts_K = (
            self.num_lookups * self.effective_share,
            self.counts_K * self.effective_share,
        )
        drawn = min(float(num_lookups) * self.effective_share, total)
        log_absent_K = _log_absent(total, counts_K, drawn)
        can_be_absent_K = total - counts_K >= drawn
        return (1 - log_absent_K.exp() * can_be_absent_K).clamp(0, 1)

    def expected_unique(self, num_lookups: float) -> float:
        """Returns the expected distinct rows among some lookups."""
        seen = float((self.rows_K * self.presence(num_lookups)).sum())
        return min(
            seen + self.expected_unseen(num_lookups), float(self.num_embeddings), num_lookups
        )

    def with_distinct(
        self, num_lookups: float, num_distinct: float, num_batches: int
    ) -> CountSpectrum:
        """Returns the spectrum with the share at which a batch has ``num_distinct`` distinct rows.

        Args:
            num_lookups: Lookups of a batch, on average.
            num_distinct: Distinct rows among them, on average.
            num_batches: Batches that these are the averages of.

        Returns:
            The spectrum itself where independent lookups have about as many distinct rows.
        """
        noise = _SIGMAS * math.sqrt(num_distinct / num_batches)
        excess = self.expected_unique(num_lookups) - num_distinct
        if excess <= max(noise, _INDEPENDENT_WITHIN * num_distinct):
            return self
        low, high = _LEAST_SHARE, 1.0
        for _ in range(_HALVINGS):  # fewer independent lookups have fewer distinct rows
            middle = math.sqrt(low * high)
            found = replace(self, effective_share=middle).expected_unique(num_lookups)
            low, high = (middle, high) if found < num_distinct else (low, middle)
        return replace(self, effective_share=math.sqrt(low * high))

    def expected_cold(self, num_lookups: float, num_hot: float) -> float:
        """Returns the expected distinct rows among some lookups outside the most frequent rows.

        The hot rows are judged by the sample that chose them, so the estimate is low: by 8 % of
        the cold rows on real Criteo ids with 20,000 hot rows.

        Args:
            num_lookups: Lookups of the table.
            num_hot: Hot rows, the most frequent ones.
        """
        hot = float((self._taken(num_hot) * self.presence(num_lookups)).sum())
        return max(0.0, self.expected_unique(num_lookups) - hot)

    def coverage(self, num_rows: float) -> float:
        """Returns the share of the lookups that go to the ``num_rows`` most frequent rows."""
        if not self.num_lookups:
            return 0.0
        taken = float((self._taken(num_rows) * self.counts_K).sum())
        return min(1.0, taken / self.num_lookups)

    def coverage_curve(self) -> tuple[Tensor, Tensor]:
        """Returns rows, most frequent first, and the share of lookups they take; both ``(K,)``."""
        share_K = (self.counts_K * self.rows_K).cumsum(0) / max(self.num_lookups, 1e-9)
        return self.rows_K.cumsum(0), share_K

    def rows_for_coverage(self, share: float) -> int:
        """Returns how many of the most frequent rows take ``share`` of the lookups."""
        wanted = share * self.num_lookups
        lookups_K = (self.counts_K * self.rows_K).cumsum(0)
        index = int(torch.searchsorted(lookups_K, torch.tensor(wanted, dtype=torch.float64)))
        if index == lookups_K.numel():
            return round(float(self.rows_K.sum()))
        rows_before = float(self.rows_K[:index].sum())
        rest = wanted - (float(lookups_K[index - 1]) if index else 0.0)
        return math.ceil(rows_before + rest / float(self.counts_K[index]) - 1e-9)

    def expected_unseen(self, num_lookups: float) -> float:
        """Returns the rows new to the sample among more lookups than it holds; else 0."""
        extra = num_lookups - self.num_lookups
        unseen = self.num_unseen
        if extra <= 0 or not unseen:
            return 0.0
        once = self._rows_with_count(1)
        stays_unseen = extra * math.log1p(-once / (self.num_lookups * unseen + once))
        return unseen * -math.expm1(stays_unseen)

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
        return float(self.rows_K[self.counts_K == count].sum())

    def _taken(self, num_rows: float) -> Tensor:
        """How many rows of each count are among the first ``num_rows``, shape ``(K,)``."""
        before_K = self.rows_K.cumsum(0) - self.rows_K
        return (num_rows - before_K).clamp(min=0).minimum(self.rows_K)


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
