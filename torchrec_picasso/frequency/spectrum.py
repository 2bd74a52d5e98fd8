"""The skew of a table: the number of rows by lookup count.

The size of an exchange depends on the counts only, not on the row ids. A spectrum stores each
distinct count once, so estimates for a table of millions of rows take microseconds.

Distinct rows of a batch are estimated by rarefaction: the batch is a random subset of the sampled
lookups. The estimate is unbiased up to the size of the sample, whereas ``1 - (1 - p)^n`` with
sampled shares p ignores unseen rows. Beyond the sample, the number of unseen rows is extrapolated.
Rarefaction assumes independent lookups. Ids that come in bursts, such as histories, repeat more:
one such lookup counts as ``effective_share`` independent lookups (Kish 1965, effective sample
size).

Source: Hurlbert 1971 (rarefaction); Chao 1984 and Colwell et al. 2012, eq. 9 (extrapolation);
Good 1953 (mass of unseen rows).

Shape letters: U counted rows, K distinct counts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_EXACT_UP_TO = 1e6
"""Number of lookups up to which differences of log-gammas have enough digits."""
_INDEPENDENT_WITHIN, _SIGMAS = 0.01, 2.0
"""Lookups count as independent if the predicted distinct rows exceed the measured ones by less than
this share, or by less than this many standard deviations of the measured mean."""
_LEAST_SHARE, _HALVINGS = 1e-4, 24
"""Lower bound of the effective share, and steps of the bisection that finds it."""


@dataclass(frozen=True, eq=False)
class CountSpectrum:
    """The number of rows of one table by lookup count."""

    counts_K: Tensor  # distinct counts, descending, float64
    rows_K: Tensor  # number of rows with each count, float64
    num_lookups: float  # number of counted lookups, the sum of counts_K * rows_K
    num_embeddings: int
    effective_share: float = 1.0  # independent lookups per lookup of a batch, 0 to 1

    @staticmethod
    def from_counts(
        counts_U: Tensor, num_embeddings: int, num_uncounted: int = 0, effective_share: float = 1.0
    ) -> CountSpectrum:
        """Builds the spectrum of rows with the counts ``counts_U``, int64, shape ``(U,)``.

        Each of the ``num_uncounted`` lookups of rows without a count is assumed to be the only
        lookup of its row, if the table has that many rows.
        """
        # counts of counts: distinct values of counts_U and the number of rows with each value
        counts, rows = (part.double() for part in counts_U.unique(return_counts=True))
        if num_uncounted:
            num_rare = max(1, min(num_uncounted, num_embeddings - counts_U.numel()))
            counts = torch.cat([counts, counts.new_tensor([num_uncounted / num_rare])])
            rows = torch.cat([rows, rows.new_tensor([num_rare])])
        counts_K, order_K = counts.sort(descending=True)
        rows_K = rows[order_K]
        num_lookups = float((counts_K * rows_K).sum())
        return CountSpectrum(counts_K, rows_K, num_lookups, num_embeddings, effective_share)

    def presence(self, num_lookups: float) -> Tensor:
        """Returns the probability ``(K,)`` that a row with each count is among ``num_lookups``
        lookups; 1 if ``num_lookups`` is at least the size of the sample."""
        if not self.num_lookups:
            return torch.zeros_like(self.counts_K)
        # all three numbers in independent lookups
        share = self.effective_share
        total, counts_K = self.num_lookups * share, self.counts_K * share
        drawn = min(float(num_lookups) * share, total)
        log_absent_K = _log_absent(total, counts_K, drawn)
        # more draws than lookups of other rows: the row is drawn for certain
        can_be_absent_K = total - counts_K >= drawn
        return (1 - log_absent_K.exp() * can_be_absent_K).clamp(0, 1)

    def expected_unique(self, num_lookups: float) -> float:
        """Returns the expected number of distinct rows among ``num_lookups`` lookups."""
        seen = float((self.rows_K * self.presence(num_lookups)).sum())
        used = seen + self.expected_unseen(num_lookups)
        return min(used, float(self.num_embeddings), num_lookups)

    def fit_share(self, num_lookups: float, num_distinct: float, num_batches: int) -> float:
        """Fits the effective share to the mean number of distinct rows of some batches with a mean
        number of lookups; 1 if the prediction for independent lookups is within the noise."""
        # Poisson noise of the mean over the batches
        noise = _SIGMAS * math.sqrt(num_distinct / num_batches)
        excess = self.expected_unique(num_lookups) - num_distinct
        if excess <= max(noise, _INDEPENDENT_WITHIN * num_distinct):
            return 1.0
        low, high = _LEAST_SHARE, 1.0
        # Bisection on a log scale: the number of distinct rows grows with the share.
        for _ in range(_HALVINGS):
            middle = math.sqrt(low * high)
            found = replace(self, effective_share=middle).expected_unique(num_lookups)
            low, high = (middle, high) if found < num_distinct else (low, middle)
        return math.sqrt(low * high)

    def expected_cold(self, num_lookups: float, num_hot: float) -> float:
        """Returns the expected number of distinct cold rows among ``num_lookups`` lookups; too low,
        by 8 % on real Criteo ids with 20,000 hot rows, because hot rows are evaluated on the sample
        that they were selected from."""
        rows_K, _ = self.coverage_curve()
        distinct_K = _sums(self.rows_K * self.presence(num_lookups))
        return max(0.0, self.expected_unique(num_lookups) - np.interp(num_hot, rows_K, distinct_K))

    def coverage(self, num_rows: float) -> float:
        """Returns the share of lookups of the ``num_rows`` most frequent rows."""
        return float(np.interp(num_rows, *self.coverage_curve()))

    def coverage_curve(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Returns numbers of most frequent rows, from 0, and their shares of lookups, both ``(K +
        1,)``; linear in between, because rows of equal count have equal shares."""
        lookups_K = _sums(self.counts_K * self.rows_K)
        return _sums(self.rows_K), lookups_K / max(self.num_lookups, 1)

    def rows_for_coverage(self, share: float) -> int:
        """Returns the smallest number of rows that have ``share`` of the lookups."""
        rows_K, share_K = self.coverage_curve()
        return math.ceil(np.interp(share, share_K, rows_K) - 1e-9)

    def expected_unseen(self, num_lookups: float) -> float:
        """Returns the expected number of rows outside the sample among ``num_lookups`` lookups; 0
        up to the size of the sample."""
        extra = num_lookups - self.num_lookups
        unseen = self.num_unseen
        if extra <= 0 or not unseen:
            return 0.0
        once = self._rows_with_count(1)
        # log of the probability that an unseen row is not among the extra lookups (eq. 9)
        log_stays_unseen = extra * math.log1p(-once / (self.num_lookups * unseen + once))
        return unseen * -math.expm1(log_stays_unseen)

    @property
    def num_unseen(self) -> float:
        """Estimated number of used rows outside the sample: Chao's lower bound, at most the rest of
        the table."""
        once, twice = self._rows_with_count(1), self._rows_with_count(2)
        # without rows seen twice, Chao's bias-corrected form
        estimate = once * (once - 1) / 2 if twice == 0 else once * once / (2 * twice)
        return max(0.0, min(estimate, self.num_embeddings - float(self.rows_K.sum())))

    @property
    def unseen_mass(self) -> float:
        """Expected share of future lookups of rows outside the sample (Good-Turing)."""
        return self._rows_with_count(1) / self.num_lookups if self.num_lookups else 1.0

    def _rows_with_count(self, count: int) -> float:
        return float(self.rows_K[self.counts_K == count].sum())


def _sums(values_K: Tensor) -> NDArray[np.float64]:
    """Returns the sums of the first 0 to K values, shape ``(K + 1,)``."""
    return np.pad(values_K.cumsum(0).numpy(), (1, 0))


def _log_absent(total: float, counts_K: Tensor, drawn: float) -> Tensor:
    """Computes the log-probability that a row's c lookups are not among n drawn of N lookups:
    ``C(N - c, n) / C(N, n)``, shape ``(K,)``."""
    if total <= _EXACT_UP_TO:
        # C(N - c, n) / C(N, n) = (N - c)! (N - n)! / ((N - c - n)! N!)
        left_K = (total - counts_K - drawn).clamp(min=0)
        whole = torch.tensor([total + 1, total - drawn + 1], dtype=torch.float64).lgamma()
        log_absent_K = (total - counts_K + 1).lgamma() - (left_K + 1).lgamma()
        return log_absent_K - whole[0] + whole[1]
    # Differences of log-gammas lose all digits for large N. The ratio is a product of k factors
    # 1 - m / (N - i), k = min(c, n), m = max(c, n); the middle factor to the power of k has an
    # error of O((k/N)^3).
    fewer_K, more_K = counts_K.clamp(max=drawn), counts_K.clamp(min=drawn)
    ratio_K = more_K / (total - (fewer_K - 1) / 2)
    return fewer_K * torch.log1p(-ratio_K.clamp(max=1 - 1e-15))
