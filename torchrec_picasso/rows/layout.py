"""Positions of a batch's rows: on the rank that uses them and on the ranks that store them.

Ids and gradients are in request order, one exchange per chunk; rows are in fetch order. A bag that
its home rank pools counts as a row.

Shape letters: K parts and chunks, M matrices, P packs, N lookups.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_picasso.rows.route import PackLayout, Pooling

__all__ = ["RowLayout"]


@dataclass(frozen=True, kw_only=True)
class RowLayout:
    """The layout of a batch's rows."""

    features_by_module: Sequence[KeyedJaggedTensor]
    """The batch's features by module, in the order of the module's tables."""
    sizes_K: Sequence[int | None]
    """Samples of each micro-batch; ``None`` if every feature has its own batch size."""
    hot_epoch: int
    """Epoch of the hot set that the slots belong to."""
    most_rows: int
    """A bound of the rows that any rank's batch asks for, equal on all ranks."""
    packs: Sequence[PackLayout]
    rows_M: Sequence[int]
    """Number of rows of each matrix that this rank uses."""
    pooling_KM: Sequence[Sequence[Pooling]]
    weights_N: Tensor | None
    """Per-sample weights of the input batch, in KeyedJaggedTensor order."""

    def part_features(self, part: int, module: int, matrix: int) -> KeyedJaggedTensor:
        """Returns the features of one micro-batch of a sequence module, lengths known on the host.

        ``matrix`` is the index of the module's only matrix.
        """
        sizes_K = [size for size in self.sizes_K if size is not None]
        assert sizes_K, "sequences have one batch size"
        features = self.features_by_module[module]
        lookups_KF = [pooling_M[matrix].lookups_F for pooling_M in self.pooling_KM]
        low, batch_size = sum(sizes_K[:part]), sizes_K[part]
        lengths_FB = features.lengths().view(len(lookups_KF[part]), sum(sizes_K))
        # Values are ordered by feature, then micro-batch: F K pieces, of which every K-th from
        # index `part` belongs to this micro-batch.
        by_part = list(zip(*lookups_KF))
        pieces = features.values().split([n for lookups_K in by_part for n in lookups_K])
        return KeyedJaggedTensor(
            keys=features.keys(),
            values=torch.cat(pieces[part :: len(sizes_K)]),
            lengths=lengths_FB[:, low : low + batch_size].reshape(-1),
            stride=batch_size,
            length_per_key=list(lookups_KF[part]),
        )

    def tensors(self) -> Iterator[Tensor]:
        """Every tensor held, for stream bookkeeping."""
        for features in self.features_by_module:
            yield from (features.values(), features.lengths())
            optional = (features.weights_or_none(), features.offsets_or_none())
            yield from (tensor for tensor in optional if tensor is not None)
        for pack in self.packs:
            yield pack.hot_slots
            yield from pack.touched
            yield from pack.requests.tensors()
        for pooling_M in self.pooling_KM:
            for pooling in pooling_M:
                yield from pooling.tensors()
        if self.weights_N is not None:
            yield self.weights_N
