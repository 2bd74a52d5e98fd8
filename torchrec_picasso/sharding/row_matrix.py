"""Rows and gradients of one batch for neighbouring packs of one dim, which one operator pools.

Shape letters: U unique rows of all these packs, D dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from torch import Tensor

from torchrec_picasso.storage.row_buffers import RowBuffers

__all__ = ["RowMatrix", "cut_by_pack"]


def cut_by_pack(
    values_M: Sequence[Tensor], matrices: Sequence[slice], rows_P: Sequence[int]
) -> list[Tensor]:
    """Cuts matrices into the rows of each pack.

    Args:
        values_M: One row for each of the matrix's, ``(U_m, D_m)``.
        matrices: The packs of each matrix.
        rows_P: Rows of each pack.
    """
    return [
        of_pack
        for values, packs in zip(values_M, matrices)
        for of_pack in values.split(list(rows_P[packs]))
    ]


class RowMatrix:
    """The rows that a rank uses and the gradients that it sums for them, pack under pack.

    Args:
        buffers: Memory of its dim.
        num_rows_P: Rows of each pack.
    """

    def __init__(self, buffers: RowBuffers, num_rows_P: Sequence[int]) -> None:
        self.buffers = buffers
        ends = [*accumulate(num_rows_P)]
        self.place_P = list(map(slice, [0, *ends], ends))
        """Where each pack is."""
        self._num_rows = ends[-1]
        self._in_use = len(num_rows_P)
        self._rows: Tensor | None = None
        self._sums: Tensor | None = None

    @property
    def rows(self) -> Tensor:
        """Rows, with anything in them at first: ``(U, D)``; of a pack the hot ones, then the cold
        ones in fetch order."""
        if self._rows is None:
            self._rows = self.buffers.take(self._num_rows)
        return self._rows

    @property
    def sums(self) -> Tensor:
        """Sums of gradients so far, ``(U, D)``: of a pack those of hot rows, then those of cold
        ones in request order."""
        if self._sums is None:
            self._sums = self.buffers.take(self._num_rows).zero_()
        return self._sums

    def release(self) -> None:
        """Ends the use by one pack; the last one gives the memory back."""
        self._in_use -= 1
        if self._in_use:
            return
        for matrix in (self._rows, self._sums):
            if matrix is not None:
                self.buffers.give_back(matrix)
        self._rows = self._sums = None
