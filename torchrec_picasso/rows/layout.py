"""Where every row of a batch lies: on the rank that uses it, on those that keep it.

*Mine* are the cold rows that this rank asks for, *asked* those that others ask of it. Ids and
gradients of both are in request order, an exchange for each chunk; rows are in fetch order. Where
bags travel, each is a cold row here: the row that its home makes of it.

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
    """Which matrix the pack is in."""
    start: int
    """Its first row there: hot rows are followed by cold ones."""
    hot_slots: Tensor
    """Hot slots that this rank's batch uses, counted from 0 in the pack."""
    touched: TouchedHot
    """Hot rows that any rank's batch uses, by slots counted from 0 in the pack."""
    mine: Exchanges
    mine_by_fetch: FetchOrder
    asked: Exchanges
    source: Asked
    """What is asked of this rank."""

    @property
    def is_of_bags(self) -> bool:
        """Whether its bags travel."""
        return isinstance(self.source, AskedBags)

    @property
    def num_rows(self) -> int:
        """Its rows there."""
        return self.hot_slots.numel() + self.mine.num_rows

    @property
    def hot_place(self) -> slice:
        """Where the hot rows that this rank uses are in its matrix, and their gradients."""
        return slice(self.start, self.start + self.hot_slots.numel())

    @property
    def cold_place(self) -> slice:
        """Where the cold rows are that it uses."""
        start = self.hot_place.stop
        return slice(start, start + self.mine.num_rows)


@dataclass(frozen=True, kw_only=True)
class RowLayout:
    """The rows of a batch."""

    features_of: Sequence[KeyedJaggedTensor]
    """The batch as each module looks it up, in the order of its tables."""
    sizes_K: Sequence[int | None]
    """Samples of each part, ``None`` where every feature has its own number."""
    hot_epoch: int
    """Which hot set the slots are of."""
    packs: Sequence[PackLayout]
    rows_M: Sequence[int]
    """Rows of each matrix that this rank uses."""
    pooling_KM: Sequence[Sequence[PartPooling | PartBags]]
    lookups_MKJ: Sequence[Sequence[Sequence[int]]]
    """Lookups of each part of each matrix; where it is of sequences, of each feature."""
    source_N: Tensor | None
    """KeyedJaggedTensor position of each lookup in bag order, where there are weights."""
    weights_N: Tensor | None
    """Per-sample weights as the batch came with them, in KeyedJaggedTensor order."""
    weights_left: bool = False
    """Whether weights have left for homes that pool bags, so that they cannot change any more."""

    def part_features(self, part: int, module: int, matrix: int) -> KeyedJaggedTensor:
        """The features of one part of a module of sequences, lengths known on the host.

        Args:
            part: Which.
            module: Which module.
            matrix: Its only matrix.
        """
        sizes_K = [size for size in self.sizes_K if size is not None]
        assert sizes_K, "sequences have one batch size"
        features, lookups_KF = self.features_of[module], self.lookups_MKJ[matrix]
        low, batch_size = sum(sizes_K[:part]), sizes_K[part]
        lengths_FB = features.lengths().view(len(lookups_KF[part]), sum(sizes_K))
        # feature by feature, part by part in each
        by_part = list(zip(*lookups_KF))
        pieces = features.values().split([n for of_feature in by_part for n in of_feature])
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
