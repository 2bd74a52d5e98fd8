"""Owner-pooled tables: the rank that pools each feature, and the order of the pooled bags.

Each owner-pooled table ("its bags travel") is stored whole on one home rank. The home rank pools
the bags of all ranks and sends one vector per bag. A rank receives its bags grouped by micro-batch
("part") and, within a micro-batch, by home rank. The block of one home rank is ordered by sample,
so the block already is a slice of the pooled output's columns:

    one part of a pack's matrix:   | home 0: (n, F_0 D) | home 1: (n, F_1 D) | ...

A home rank stores the incoming bags by micro-batch, then rank, sample and feature. The vectors of
one micro-batch are therefore one slice, already in send order.

Shape letters: F features, K parts, W ranks, S bags, N lookups, n samples of a part, D dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from torchrec_picasso.ops.ids import PackedTable

__all__ = ["BagPack", "PartBags", "asked_bag_order"]


@dataclass(frozen=True, kw_only=True)
class BagPack:
    """Owner-pooled tables of one dim, as all ranks see them; features are ordered by home rank."""

    dim: int
    features_W: tuple[int, ...]
    """Number of features that each rank pools."""
    rows_F: Tensor
    """Number of rows of each feature's table, int64."""
    first_row_F: Tensor
    """First row of each feature's table in the home rank's storage of the pack, int64."""
    mean_F: Tensor | None
    """Whether a feature is averaged instead of summed, bool; ``None`` = all are summed."""
    most_home_rows: int
    """Rows of the home rank that stores the most rows."""

    @staticmethod
    def build(tables: Sequence[PackedTable], device: torch.device) -> BagPack:
        """Assigns each table a row range in its home rank's storage.

        Args:
            tables: Tables of one pack, ordered by home rank.
            device: Device of the lookup tensors.
        """
        homes = [table.only_home for table in tables]
        assert homes == sorted(homes), "tables of one home must be side by side"
        features_W = [0] * len(tables[0].block_rows_W)
        rows_W = [0] * len(features_W)
        first_rows, rows, means = [], [], []
        # A home rank stores its tables one after the other, so the first row of the next table is
        # the number of rows seen so far. Features of one table share its rows.
        for table, home in zip(tables, homes):
            num_features = len(table.feature_names)
            features_W[home] += num_features
            first_rows += [rows_W[home]] * num_features
            rows += [table.num_embeddings] * num_features
            means += [table.mean] * num_features
            rows_W[home] += table.num_embeddings
        return BagPack(
            dim=tables[0].dim,
            features_W=tuple(features_W),
            rows_F=torch.tensor(rows, device=device),
            first_row_F=torch.tensor(first_rows, device=device),
            mean_F=torch.tensor(means, device=device) if any(means) else None,
            most_home_rows=max(rows_W),
        )

    @property
    def num_features(self) -> int:
        """Number of features of all home ranks."""
        return sum(self.features_W)

    def features_at(self, home: int) -> slice:
        """Range of the features that a rank pools."""
        starts = [0, *accumulate(self.features_W)]
        return slice(starts[home], starts[home + 1])

    def parts(self, sizes_K: Sequence[int]) -> list[PartBags]:
        """Position of each micro-batch's bags in the matrix of this rank.

        Args:
            sizes_K: Samples of each micro-batch.
        """
        # One vector per (sample, feature): a micro-batch of n samples takes n F rows of the matrix.
        edges = [size * self.num_features for size in accumulate(sizes_K, initial=0)]
        return [
            PartBags(pack=self, vectors=slice(start, end), size=size)
            for (start, end), size in zip(pairwise(edges), sizes_K)
        ]

    def bags_by_home(self, sizes_K: Sequence[int]) -> list[list[int]]:
        """Number of bags that this rank requests, by micro-batch and home rank.

        Args:
            sizes_K: Samples of each micro-batch.
        """
        return [[size * features for features in self.features_W] for size in sizes_K]


@dataclass(frozen=True)
class PartBags:
    """The bags of one micro-batch in their matrix."""

    pack: BagPack
    vectors: slice
    size: int
    """Samples of the micro-batch."""

    def columns(self, matrix_SD: Tensor) -> list[Tensor]:
        """Returns the columns of the pooled output for this micro-batch.

        Args:
            matrix_SD: Pooled bags of all micro-batches, shape ``(S, D)``.

        Returns:
            One view per home rank that pools features, shape ``(n, F_w D)``.
        """
        return self._blocks(matrix_SD[self.vectors])

    def gradients(self, grads: Sequence[Tensor]) -> Tensor:
        """Concatenates the gradients of the columns into one gradient per bag.

        Args:
            grads: Gradients of the views that :meth:`columns` returned, in the same order.

        Returns:
            Gradients in the order of the matrix, float32, shape ``(n F, D)``.
        """
        num_bags = self.vectors.stop - self.vectors.start
        grads_SD = torch.empty(
            num_bags, self.pack.dim, dtype=torch.float32, device=self.pack.rows_F.device
        )
        # Each block is a view of grads_SD, shape (n, F_w D), so the copies fill grads_SD.
        for block, grad in zip(self._blocks(grads_SD), grads):
            block.copy_(grad)
        return grads_SD

    def _blocks(self, vectors_SD: Tensor) -> list[Tensor]:
        features_W, dim = self.pack.features_W, self.pack.dim
        # (n F, D) is the concatenation of one (n F_w, D) block per home rank. A block is ordered by
        # sample, then feature, so it reshapes to (n, F_w D) without a copy.
        edges = [self.size * features for features in accumulate(features_W, initial=0)]
        return [
            vectors_SD[start:end].view(self.size, features * dim)
            for (start, end), features in zip(pairwise(edges), features_W)
            if features
        ]


def asked_bag_order(
    num_features: int, samples_WK: Sequence[Sequence[int]], device: torch.device
) -> Tensor:
    """Computes the permutation of incoming bags at their home rank.

    Incoming bags are ordered by rank, then feature, then sample, as in a KeyedJaggedTensor.

    Args:
        num_features: Number of features that this home rank pools.
        samples_WK: Samples of each rank by micro-batch.
        device: Device of the permutation.

    Returns:
        The incoming position of each bag, bags ordered by micro-batch, rank, sample and feature:
        int32, shape ``(S,)``.
    """
    pieces_WK, start = [], 0
    for sizes_K in samples_WK:
        num_bags = num_features * sum(sizes_K)
        bags_S = torch.arange(start, start + num_bags, dtype=torch.int32, device=device)
        # Bags of one rank, from (feature, sample) order to (sample, feature) order.
        by_sample = bags_S.view(num_features, sum(sizes_K)).t()
        pieces_WK.append(by_sample.split(list(sizes_K)))
        start += num_bags
    # zip swaps (rank, micro-batch) to (micro-batch, rank).
    return torch.cat([piece.reshape(-1) for blocks_W in zip(*pieces_WK) for piece in blocks_W])
