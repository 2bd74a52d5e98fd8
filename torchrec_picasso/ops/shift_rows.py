"""Adds each table's first number to the rows of its lookups; rows outside their table become 0.

The CPU path uses numpy. Features are long runs of lookups, and numpy repeats a number and finds a
maximum many times faster on such runs: on one core, 4.4 million lookups of 460 features take 155 ms
with torch's operators and 15 ms with numpy.

Shape letters: F features, N lookups.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

__all__ = ["shift_rows"]

_UNSIGNED = {torch.int32: np.uint32, torch.int64: np.uint64}


def shift_rows(
    rows_N: Tensor, lookups_F: Tensor, first_F: Tensor, limit_F: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Adds the first number of each feature's table to its rows.

    Args:
        rows_N: Row of each lookup in its table, any integer type, shape ``(N,)``, by feature.
        lookups_F: Number of lookups of each feature, int64, summing to N.
        first_F: Number of row 0 of each feature's table, int64.
        limit_F: Number of rows of each feature's table, int64.
        dtype: Type of the result.

    Returns:
        Numbers, shape ``(N,)``, 0 for rows outside their table, and the count of such rows, 0-d.

    Cost:
        O(N) time, no host sync.
    """
    if rows_N.device.type == "cpu" and rows_N.dtype in _UNSIGNED:
        rows, lookups = rows_N.contiguous().numpy(), lookups_F.numpy()
        if _are_inside(rows.view(_UNSIGNED[rows_N.dtype]), lookups, limit_F.numpy()):
            # All rows are inside. Start from the feature's first number, shape (N,), and add the
            # rows in place; the sum fits into dtype, so the cast is safe.
            shifted = np.repeat(first_F.to(dtype).numpy(), lookups)
            np.add(shifted, rows, out=shifted, casting="unsafe")
            return torch.from_numpy(shifted), torch.zeros((), dtype=torch.int64)
    # Other devices, other types, or rows outside their table: expand (F,) to (N,) and mask.
    num_lookups = rows_N.numel()
    first_N = torch.repeat_interleave(first_F, lookups_F, output_size=num_lookups)
    limit_N = torch.repeat_interleave(limit_F, lookups_F, output_size=num_lookups)
    outside_N = (rows_N < 0) | (rows_N >= limit_N)
    return first_N.add_(rows_N).masked_fill_(outside_N, 0).to(dtype), outside_N.sum()


def _are_inside(rows: np.ndarray, lookups: np.ndarray, limits: np.ndarray) -> bool:
    """Returns whether every row is inside its table.

    Args:
        rows: Rows as unsigned integers, so that negative rows become the largest numbers.
        lookups: Number of lookups of each feature.
        limits: Number of rows of each feature's table.
    """
    is_used = lookups > 0
    # reduceat takes the maximum from each start to the next, so features without lookups are
    # removed first: an empty range would yield a wrong value.
    starts = (np.cumsum(lookups) - lookups)[is_used]
    return not len(starts) or bool((np.maximum.reduceat(rows, starts) < limits[is_used]).all())
