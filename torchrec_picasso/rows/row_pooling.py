"""The pooling of rows on the rank that looked them up, and its gradients.

Shape letters: B samples, D dim, F features, N lookups, R rows of a matrix, S bags, U unique rows; n
rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from torchrec_picasso.ops.segment_reduction import (
    PoolingIndex,
    gradient_of_rows,
    gradient_of_weights,
    mean_weights,
    pool_rows,
)
from torchrec_picasso.rows.route import Pooling


@dataclass(frozen=True, kw_only=True)
class RowPooling(Pooling):
    """The pooling of one micro-batch of one matrix of rows; one piece, ``(B F, D)``. Sequences are
    not pooled: the piece has the row of each lookup, ``(N, D)``."""

    index: PoolingIndex
    size: int | None
    """Samples of the micro-batch; ``None`` if every feature has its own batch size."""
    num_features: int

    def scales(self, weights_N: Tensor | None, are_new: bool) -> Tensor | None:
        """Returns the factor of each lookup, from weights of any time."""
        index = self.index
        if not index.has_pooling:
            return None
        if weights_N is not None:
            assert index.source_N is not None, "the batch came without weights"
            weights_N = weights_N.float().index_select(0, index.source_N)
        return mean_weights(weights_N, index.bag_offsets_S1, index.mean_S, index.num_lookups)

    def pool(self, rows_RD: Tensor, scales_N: Tensor | None) -> list[Tensor]:
        """Pools rows into bags: one piece."""
        return [pool_rows(rows_RD, scales_N, self.index)]

    def columns(self, pieces: list[Tensor]) -> list[Tensor]:
        """Reshapes the piece to ``(B, F D)``; sequences stay."""
        (pooled,) = pieces
        if not self.index.has_pooling:
            return pieces
        # (S, D) is ordered by sample, then feature
        shape = (-1,) if self.size is None else (self.size, self.num_features * pooled.size(1))
        return [pooled.view(shape)]

    def gradients(self, grads: Sequence[Tensor], scales_N: Tensor | None) -> Tensor:
        """Sums the gradients of the piece by row."""
        return gradient_of_rows(grads[0], scales_N, self.index)

    def gradient_of_scales(self, grads: Sequence[Tensor], rows_RD: Tensor) -> Tensor:
        """Computes the gradient of each lookup's factor."""
        return gradient_of_weights(grads[0], rows_RD, self.index)

    def add_gradients(self, sums_RD: Tensor, grads_nD: Tensor) -> None:
        """Adds a micro-batch's gradients to the sums."""
        assert self.index.gradient_position_U is not None, "one micro-batch needs no sums"
        # A row that several micro-batches use is summed here, at its position in request order.
        sums_RD.index_add_(0, self.index.gradient_position_U, grads_nD)
