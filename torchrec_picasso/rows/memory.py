"""Memory for what a batch needs between two of its operations, by matrix; given back in one place.

Shape letters: M matrices, P packs, D dim.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from torchrec_picasso.storage.row_buffers import RowBuffers

__all__ = ["Matrices"]


class Matrices:
    """One matrix of rows, or of their gradients, per matrix of the plan.

    Args:
        buffers_M: Where memory comes from.
        rows_M: Rows of each.
    """

    def __init__(self, buffers_M: Sequence[RowBuffers], rows_M: Sequence[int]) -> None:
        self._buffers_M = buffers_M
        self._rows_M = rows_M
        self._taken_M: list[Tensor] = []

    @property
    def tensors(self) -> Sequence[Tensor]:
        """The matrices ``(U_m, D_m)``, with anything in them at first."""
        if not self._taken_M:
            self._taken_M = [b.take(n) for b, n in zip(self._buffers_M, self._rows_M)]
        return self._taken_M

    def release(self) -> None:
        """Ends their use: nobody reads or writes them any more. Once is enough."""
        for buffers, matrix in zip(self._buffers_M, self._taken_M):
            buffers.give_back(matrix)
        self._taken_M = []
