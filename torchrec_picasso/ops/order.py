"""Stable orders of small integers, such as the chunk and home of each row."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

__all__ = ["stable_order"]

_RADIX_KEYS = {2**8: torch.uint8, 2**15: torch.int16}


def stable_order(keys_n: Tensor, num_keys: int) -> Tensor:
    """The order that sorts small integers, equal ones staying in order.

    Args:
        keys_n: Integers ``0 .. num_keys - 1``, shape ``(n,)``.
        num_keys: How many there may be.

    Returns:
        Index into ``keys_n`` of each one in sorted order, int64, shape ``(n,)``.

    Cost:
        On the CPU a radix sort in O(n) by numpy, which has one for small integers and torch has
        not: 0.1 instead of 1.3 ms for 22,000 keys below 9. A stable sort otherwise.
    """
    if keys_n.device.type == "cpu":
        for limit, dtype in _RADIX_KEYS.items():
            if num_keys <= limit:
                keys = keys_n.to(dtype).numpy()
                return torch.from_numpy(np.argsort(keys, kind="stable"))
    return torch.argsort(keys_n, stable=True)
