"""Chooses rows that become hot and rows that become cold, by access counts; no communication.

Shape letters: H hot rows, C candidates, s rows that change places.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["choose_swaps"]

_LEAST_USES = 1.0
"""Smallest access count of a candidate: rarer rows would enter by noise."""


def choose_swaps(
    hot_uses_H: Tensor,
    candidate_ids_C: Tensor,
    candidate_uses_C: Tensor,
    *,
    num_batches: float,
    deviations: float,
    most: int,
) -> tuple[Tensor, Tensor]:
    """Replaces the least used hot rows by the most used candidates.

    Ranks with equal arguments make equal choices: among equal counts, the rows with the smallest
    ids enter, and those in the first slots leave.

    Args:
        hot_uses_H: Access counts of the hot rows over all ranks, by slot.
        candidate_ids_C: Cold rows, each once, integer; in any order.
        candidate_uses_C: Access counts of the candidates over all ranks.
        num_batches: Number of counted batches over all ranks, an upper bound of all counts.
        deviations: Number of standard deviations by which a candidate's count must exceed that of
            the row that leaves for it, under the model that a batch uses a row or not by chance.
        most: Largest number of rows that change.

    Returns:
        Slots that become free, and positions of the candidates that enter, int64, both ``(s,)``.
    """
    # two stable sorts: by count, and by id among equal counts
    by_id = torch.argsort(candidate_ids_C)
    most_used = by_id[torch.argsort(candidate_uses_C[by_id], descending=True, stable=True)]
    least_used = torch.argsort(hot_uses_H, stable=True)
    num_pairs = min(most, most_used.numel(), least_used.numel())
    entering, leaving = most_used[:num_pairs], least_used[:num_pairs]
    more_s, less_s = candidate_uses_C[entering], hot_uses_H[leaving]
    # binomial variance of a count c in n batches: n p (1 - p) with p = c / n
    variance_s = more_s * (1 - more_s / num_batches) + less_s * (1 - less_s / num_batches)
    enters_s = more_s - less_s > deviations * variance_s.clamp(min=0).sqrt()
    enters_s &= more_s >= _LEAST_USES
    # From pair to pair the entering counts fall and the leaving counts rise, so the pairs that
    # change are the first ones; cumprod ends them at the first pair that fails.
    num_swaps = int(enters_s.cumprod(0).sum())
    return leaving[:num_swaps], entering[:num_swaps]
