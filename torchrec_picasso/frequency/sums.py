"""Sparse count vectors: ascending distinct rows beside their counts, and how two of them add up.

Numpy rather than torch: its vectorised sort of 32-bit ids takes 4 ns an id where torch's takes 40.

Shape letters: N lookups, U and V rows.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["count_rows", "sum_counts", "sum_sorted"]

_Rows = NDArray[np.integer]
_Counts = NDArray[np.number]


def count_rows(ids_N: _Rows) -> tuple[_Rows, NDArray[np.int64]]:
    """Distinct ids, ascending, and how often each occurs.

    Args:
        ids_N: Any order, shape ``(N,)``.

    Cost:
        O(N log N) time; 5 to 10 ns per int32 id.
    """
    sorted_N = np.sort(ids_N)
    is_first_N = np.ones(sorted_N.size, dtype=bool)
    np.not_equal(sorted_N[1:], sorted_N[:-1], out=is_first_N[1:])
    starts_U = np.flatnonzero(is_first_N)
    return sorted_N[starts_U], np.diff(starts_U, append=sorted_N.size)


def sum_sorted(
    rows_U: _Rows, counts_U: _Counts, other_rows_V: _Rows, other_counts_V: _Counts
) -> tuple[_Rows, _Counts]:
    """Adds two sparse count vectors.

    Args:
        rows_U: Distinct rows, ascending, shape ``(U,)``.
        counts_U: Their counts, shape ``(U,)``.
        other_rows_V: Distinct rows of the other vector, ascending, shape ``(V,)``.
        other_counts_V: Their counts, shape ``(V,)``.

    Returns:
        The union of the rows, ascending, and the summed counts.

    Cost:
        O(U + V log U) time: make the larger vector the first.
    """
    if not rows_U.size or not other_rows_V.size:
        rows, counts = (rows_U, counts_U) if rows_U.size else (other_rows_V, other_counts_V)
        return rows.copy(), counts.astype(np.result_type(counts_U, other_counts_V))
    place_V = np.searchsorted(rows_U, other_rows_V)
    known_V = rows_U[np.minimum(place_V, rows_U.size - 1)] == other_rows_V
    counts_U = counts_U.astype(np.result_type(counts_U, other_counts_V))
    counts_U[place_V[known_V]] += other_counts_V[known_V]
    new_V = ~known_V
    return (
        np.insert(rows_U, place_V[new_V], other_rows_V[new_V]),
        np.insert(counts_U, place_V[new_V], other_counts_V[new_V]),
    )


def sum_counts(
    rows_U: Tensor, counts_U: Tensor, other_rows_V: Tensor, other_counts_V: Tensor
) -> tuple[Tensor, Tensor]:
    """:func:`sum_sorted` of tensors."""
    if rows_U.numel() < other_rows_V.numel():
        rows_U, counts_U, other_rows_V, other_counts_V = (
            other_rows_V,
            other_counts_V,
            rows_U,
            counts_U,
        )
    rows, counts = sum_sorted(
        rows_U.numpy(), counts_U.numpy(), other_rows_V.numpy(), other_counts_V.numpy()
    )
    return torch.from_numpy(rows), torch.from_numpy(counts)
