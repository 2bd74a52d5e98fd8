"""Positions of a batch's rows: on the rank that uses them and on the ranks that store them.

*Mine* (outgoing) are the cold rows that this rank requests, *asked* (incoming) the rows that other
ranks request from this rank. Ids and gradients of both are in request order, one exchange per
chunk; rows are in fetch order. A bag of an owner-pooled table counts as a cold row: the vector that
its home rank computes.

Shape letters: K parts and chunks, M matrices, P packs, N lookups.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_picasso.ops.bag_pack import PartBags
from torchrec_picasso.ops.fetch_order import Exchanges, FetchOrder
from torchrec_picasso.ops.part_pooling import PartPooling
from torchrec_picasso.rows.asked import Asked, AskedBags
from torchrec_picasso.storage.hot_homes import TouchedHot

__all__ = ["PackLayout", "RowLayout"]


@dataclass(frozen=True, kw_only=True)
class PackLayout:
    """The rows of one pack."""

    matrix: int
    """Index of the matrix that contains the pack."""
    start: int
    """First row of the pack in the matrix; hot rows come before cold rows."""
    hot_slots: Tensor
    """Hot slots that this rank's batch uses, counted from 0 in the pack."""
    touched: TouchedHot
    """Hot rows that any rank's batch uses, by slots counted from 0 in the pack."""
    mine: Exchanges
    """Outgoing cold rows in request order, by chunk and home rank."""
    mine_by_fetch: FetchOrder
    """Outgoing cold rows in fetch order."""
    asked: Exchanges
    """Incoming cold rows in request order, by chunk and requesting rank."""
    source: Asked
    """Incoming requests at this home rank."""

    @property
    def is_of_bags(self) -> bool:
        """Whether the pack is owner-pooled."""
        return isinstance(self.source, AskedBags)

    @property
    def num_rows(self) -> int:
        """Number of rows of the pack in the matrix."""
        return self.hot_slots.numel() + self.mine.num_rows

    @property
    def hot_place(self) -> slice:
        """Position in the matrix of the hot rows that this rank uses, and of their gradients."""
        return slice(self.start, self.start + self.hot_slots.numel())

    @property
    def cold_place(self) -> slice:
        """Position in the matrix of the cold rows that this rank uses."""
        start = self.hot_place.stop
        return slice(start, start + self.mine.num_rows)


@dataclass(frozen=True, kw_only=True)
class RowLayout:
    """The layout of a batch's rows."""

    features_of: Sequence[KeyedJaggedTensor]
    """The batch's features by module, in the order of the module's tables."""
    sizes_K: Sequence[int | None]
    """Samples of each micro-batch; ``None`` if every feature has its own batch size."""
    hot_epoch: int
    """Epoch of the hot set that the slots belong to."""
    packs: Sequence[PackLayout]
    rows_M: Sequence[int]
    """Number of rows of each matrix that this rank uses."""
    pooling_KM: Sequence[Sequence[PartPooling | PartBags]]
    lookups_MKJ: Sequence[Sequence[Sequence[int]]]
    """Number of lookups by matrix, micro-batch and run (in a sequence matrix, feature)."""
    source_N: Tensor | None
    """KeyedJaggedTensor position of each lookup in bag order; ``None`` without weights."""
    weights_N: Tensor | None
    """Per-sample weights of the input batch, in KeyedJaggedTensor order."""
    weights_left: bool = False
    """Whether weights were sent to home ranks that pool bags; later changes would be lost."""

    def part_features(self, part: int, module: int, matrix: int) -> KeyedJaggedTensor:
        """Returns the features of one micro-batch of a sequence module, lengths known on the host.

        Args:
            part: Index of the micro-batch.
            module: Index of the module.
            matrix: Index of the module's only matrix.
        """
        sizes_K = [size for size in self.sizes_K if size is not None]
        assert sizes_K, "sequences have one batch size"
        features, lookups_KF = self.features_of[module], self.lookups_MKJ[matrix]
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
        for features in self.features_of:
            kept = (
                features.values(),
                features.lengths(),
                features.weights_or_none(),
                features.offsets_or_none(),
            )
            yield from (tensor for tensor in kept if tensor is not None)
        for pack in self.packs:
            yield pack.hot_slots
            yield from pack.touched.tensors()
            yield from pack.source.tensors()
        for pooling_M in self.pooling_KM:
            for pooling in pooling_M:
                if isinstance(pooling, PartPooling):
                    yield from pooling.tensors()
        yield from (tensor for tensor in (self.source_N, self.weights_N) if tensor is not None)
