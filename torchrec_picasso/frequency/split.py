"""What the most frequent rows of a table take, and what they leave to the others.

Chosen and judged on the same sample, the hottest rows look hotter than they are: each cut lets in
rows that were lucky there (the winner's curse). So cold rows are judged on lookups that the hot set
was not chosen from: all ways of holding out a batch from the sample, averaged, which for a row with
``m`` lookups is a binomial sum. From one half of a Criteo sample to the cold rows of batches of the
other, with 20,000 hot rows, the error falls from -8 % to +2 %. What remains is on the high side:
the hot set is judged as if chosen from a sample smaller by one batch.

Source: Stone 1974 and Geisser 1975 (predictive sample reuse); McAllester and Schapire 2000 (holding
out one lookup is Good-Turing's estimate).

Shape letters: K distinct counts, N of them near the cut, J lookups that a row loses.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from torchrec_picasso.frequency.spectrum import CountSpectrum

__all__ = ["coverage", "expected_unique_cold", "winners_curse"]

# Where a row at the cut loses more lookups than this, no row near it is absent from any batch.
_SURELY_PRESENT = 48.0
_LARGEST_SHARE_HELD_OUT = 0.5


def coverage(spectrum: CountSpectrum, num_rows: float) -> float:
    """Share of the lookups that go to the most frequent rows.

    Args:
        spectrum: The table's counts.
        num_rows: How many of its most frequent rows.

    Returns:
        Between 0 and 1; 0 without lookups.
    """
    if not spectrum.num_lookups:
        return 0.0
    taken_K = _taken(spectrum.rows_K, num_rows)
    return min(1.0, float((taken_K * spectrum.counts_K).sum()) / spectrum.num_lookups)


def expected_unique_cold(spectrum: CountSpectrum, num_lookups: float, num_hot: float) -> float:
    """Expected distinct cold rows of a batch that the hot set was not chosen from.

    Args:
        spectrum: The table's counts, the same that the hot set is chosen from.
        num_lookups: Lookups of the table in the batch.
        num_hot: Its most frequent rows, which are hot; at random among rows of equal count.

    Returns:
        Rows; the batch's distinct rows where nothing is hot.

    Cost:
        O(K) time and a few thousand binomial terms.
    """
    if num_lookups <= 0 or num_hot >= spectrum.num_embeddings or not spectrum.num_lookups:
        return 0.0
    if num_hot <= 0:
        return spectrum.expected_unique(num_lookups)
    hot = spectrum.expected_hot(num_lookups, num_hot)
    as_sampled = max(0.0, spectrum.expected_unique(num_lookups) - hot)
    return as_sampled + winners_curse(spectrum, num_lookups, num_hot)


def winners_curse(spectrum: CountSpectrum, num_lookups: float, num_hot: float) -> float:
    """Cold rows of a held-out batch, less those of a batch that helped to choose the hot set.

    Args:
        spectrum: The table's counts, with lookups.
        num_lookups: Lookups of the table in the batch, above 0.
        num_hot: Its most frequent rows, which are hot.
    """
    counts_K, rows_K = _whole_counts(spectrum)
    share = min(num_lookups / float((counts_K * rows_K).sum()), _LARGEST_SHARE_HELD_OUT)
    cut = _cut(counts_K, rows_K, share, num_hot)
    if cut * share > _SURELY_PRESENT:
        return 0.0
    below_K, at_K = _after_hold_out(counts_K, share, cut)
    above = float((rows_K * (1 - below_K - at_K)).sum())
    at_cut = float((rows_K * at_K).sum()) if cut else spectrum.num_embeddings - above
    hot_share = min(1.0, max(0.0, (num_hot - above) / at_cut)) if at_cut else 0.0

    present_K = 1 - (1 - share) ** counts_K
    # up to the cut a row is cold whatever it loses; above it, when it loses enough
    cold_K = torch.where(counts_K > cut, below_K + (1 - hot_share) * at_K, present_K)
    as_sampled_K = (rows_K - _taken(rows_K, num_hot)) * present_K
    return float((rows_K * cold_K - as_sampled_K).sum())


def _taken(rows_K: Tensor, num_rows: float) -> Tensor:
    """How many rows of each count are among the first ``num_rows``."""
    before_K = rows_K.cumsum(0) - rows_K
    return (num_rows - before_K).clamp(min=0).minimum(rows_K)


def _whole_counts(spectrum: CountSpectrum) -> tuple[Tensor, Tensor]:
    """Counts and rows with the counts rounded, to 1 at least: decayed ones are no whole numbers."""
    counts, inverse = torch.unique(spectrum.counts_K.round().clamp(min=1), return_inverse=True)
    rows = torch.zeros_like(counts).index_add_(0, inverse, spectrum.rows_K)
    return counts.flip(0), rows.flip(0)


def _cut(counts_K: Tensor, rows_K: Tensor, share: float, num_hot: float) -> int:
    """Largest count that at least ``num_hot`` rows are expected to keep; 0 where there is none."""
    low, high = 0, int(counts_K[0]) + 1
    while high - low > 1:
        middle = (low + high) // 2
        below_K, _ = _after_hold_out(counts_K, share, middle)
        if float((rows_K * (1 - below_K)).sum()) >= num_hot:
            low = middle
        else:
            high = middle
    return low


def _after_hold_out(counts_K: Tensor, share: float, cut: int) -> tuple[Tensor, Tensor]:
    """Chances that a row keeps less than ``cut`` lookups, and exactly that many.

    A row loses each lookup with chance ``share``.
    """
    below_K, at_K = (counts_K < cut).double(), torch.zeros_like(counts_K)
    mean_K = counts_K * (1 - share)
    if cut * share > _SURELY_PRESENT:  # luck evens out
        return (mean_K < cut).double(), at_K
    near_K = (counts_K >= cut) & (mean_K - 9 * (mean_K * share).sqrt() - 20 <= cut)
    if not near_K.any():
        return below_K, at_K
    counts_N = counts_K[near_K]
    lost_J = torch.arange(int(counts_N[0]) - cut + 1, dtype=torch.float64)
    log_NJ = (
        torch.lgamma(counts_N + 1)[:, None]
        - torch.lgamma(lost_J + 1)
        - torch.lgamma((counts_N[:, None] - lost_J).clamp(min=0) + 1)
        + lost_J * math.log(share)
        + (counts_N[:, None] - lost_J) * math.log1p(-share)
    )
    chance_NJ = torch.where(lost_J <= counts_N[:, None], log_NJ.exp(), 0.0)
    to_cut_N1 = (counts_N - cut).long()[:, None]
    at_K[near_K] = chance_NJ.gather(1, to_cut_N1).flatten()
    below_K[near_K] = (1 - chance_NJ.cumsum(1).gather(1, to_cut_N1).flatten()).clamp(min=0)
    return below_K, at_K
