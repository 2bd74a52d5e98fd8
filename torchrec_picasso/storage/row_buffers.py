"""Matrices that one step after another uses again.

On the CPU a fresh matrix of some megabytes is fresh memory, and each 4 KiB of it costs a page fault
when they are first written: for the rows and gradients of a Criteo step (three matrices of 22,900
rows of D=128) 20 of 350 ms. An accelerator's allocator keeps memory by itself.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["RowBuffers"]

_SLACK = 1.125
"""Room for the next batch, which may have some more rows."""


class RowBuffers:
    """Keeps the memory of matrices that were given back.

    Args:
        dim: Columns of every matrix.
        device: Where they are.
    """

    def __init__(self, dim: int, device: torch.device) -> None:
        self._dim = dim
        self._device = device
        self._free: list[Tensor] = []

    def take(self, num_rows: int) -> Tensor:
        """A float32 matrix with anything in it, shape ``(num_rows, dim)``."""
        if self._device.type != "cpu":
            return torch.empty(num_rows, self._dim, dtype=torch.float32, device=self._device)
        self._free.sort(key=len)
        for index, buffer in enumerate(self._free):
            if len(buffer) >= num_rows:
                return self._free.pop(index)[:num_rows]
        if self._free:
            self._free.pop()  # the one allocated now takes its place
        return torch.empty(int(num_rows * _SLACK), self._dim, dtype=torch.float32)[:num_rows]

    def give_back(self, matrix: Tensor) -> None:
        """Ends the use of a matrix that was taken here: nobody reads or writes it any more."""
        if matrix._base is not None:
            self._free.append(matrix._base)
