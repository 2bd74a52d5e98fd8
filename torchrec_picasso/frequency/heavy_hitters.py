"""Keeps the most frequent rows of a stream in fixed memory, with a bound on what each may lack.

When more rows are counted than fit, the count of the first row that does not fit is subtracted from
all, and rows at 0 are forgotten. So no count is ever too high, none is too low by more than the sum
of what was subtracted, and that sum is at most the lookups divided by ``max_rows + 1``. On skewed
ids it is far less: the rows that do not fit were seen once.

Source: Misra and Gries 1982; Agarwal et al. 2012, Mergeable Summaries, section 3.1, whose merge
this is.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["keep_heaviest"]


def keep_heaviest(
    rows_U: NDArray[np.integer], counts_U: NDArray[np.number], max_rows: int
) -> tuple[NDArray[np.integer], NDArray[np.number], float]:
    """Drops all but the most frequent rows.

    Args:
        rows_U: Distinct rows, ascending, shape ``(U,)``.
        counts_U: Their counts, above 0, shape ``(U,)``.
        max_rows: Rows that may stay.

    Returns:
        The rows that stay, ascending; their counts, lowered; by how much.

    Cost:
        O(U) time.
    """
    if rows_U.size <= max_rows:
        return rows_U, counts_U, 0
    place = rows_U.size - max_rows - 1  # of the (max_rows + 1)-th largest, counted from below
    subtracted = np.partition(counts_U, place)[place]
    stays_U = counts_U > subtracted
    return rows_U[stays_U], counts_U[stays_U] - subtracted, subtracted.item()
