"""Which rows become hot and which stop to be, by how often they were used. Sends nothing.

Shape letters: H hot rows, C candidates, s rows that change places.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["choose_swaps"]

_LEAST_USES = 1.0
"""A row that was used less than once lately is no candidate: it would only make noise."""


def choose_swaps(
    hot_uses_H: Tensor,
    candidate_ids_C: Tensor,
    candidate_uses_C: Tensor,
    *,
    num_batches: float,
    deviations: float,
    most: int,
) -> tuple[Tensor, Tensor]:
    """The most used candidates in place of the least used hot rows.

    The same on all ranks that are given the same: of rows used alike those with the least ids
    enter, and those in the first slots leave.

    Args:
        hot_uses_H: Uses of the hot rows by all ranks, by slot.
        candidate_ids_C: Cold rows, each once, integer; in any order.
        candidate_uses_C: Their uses by all ranks.
        num_batches: Batches of ranks that were counted: no row was used more often.
        deviations: By how many standard deviations of their difference a candidate's uses must
            exceed those of the row that leaves for it, where a batch uses a row or not by chance.
        most: Largest number of rows that change.

    Returns:
        Slots that are left, and places of the candidates that enter, int64, both ``(s,)``.
    """
    by_id = torch.argsort(candidate_ids_C)
    most_used = by_id[torch.argsort(candidate_uses_C[by_id], descending=True, stable=True)]
    least_used = torch.argsort(hot_uses_H, stable=True)
    num_pairs = min(most, most_used.numel(), least_used.numel())
    entering, leaving = most_used[:num_pairs], least_used[:num_pairs]
    more_s, less_s = candidate_uses_C[entering], hot_uses_H[leaving]
    variance_s = more_s * (1 - more_s / num_batches) + less_s * (1 - less_s / num_batches)
    enters_s = more_s - less_s > deviations * variance_s.clamp(min=0).sqrt()
    enters_s &= more_s >= _LEAST_USES
    # uses fall from pair to pair, and those of the leaving rise: the pairs that change come first
    num_swaps = int(enters_s.cumprod(0).sum())
    return leaving[:num_swaps], entering[:num_swaps]
