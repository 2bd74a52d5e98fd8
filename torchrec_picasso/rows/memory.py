"""Memory that a batch holds between two of its operations, by matrix; released in one place.

Shape letters: M matrices, P packs, D dim.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from torchrec_picasso.storage.row_buffers import RowBuffers

__all__ = ["Matrices"]


class Matrices:
    """One buffer of rows, or of gradients, for each entry of a list of matrices.

    Args:
        buffers_M: Allocator of each matrix.
        rows_M: Number of rows of each matrix.
    """

    def __init__(self, buffers_M: Sequence[RowBuffers], rows_M: Sequence[int]) -> None:
        self._buffers_M = buffers_M
        self._rows_M = rows_M
        self._taken_M: list[Tensor] = []

    @property
    def tensors(self) -> Sequence[Tensor]:
        """The matrices, ``(U_m, D_m)``, allocated at first access and not initialized."""
        if not self._taken_M:
            self._taken_M = [b.take(n) for b, n in zip(self._buffers_M, self._rows_M)]
        return self._taken_M

    def release(self) -> None:
        """Releases the memory; no reader or writer may be left. Further calls have no effect."""
        for buffers, matrix in zip(self._buffers_M, self._taken_M):
            buffers.release(matrix)
        self._taken_M = []
