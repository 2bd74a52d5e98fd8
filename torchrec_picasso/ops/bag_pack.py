"""Tables whose bags travel: which rank pools which feature, and in which order bags lie there.

Each table has one home, which pools the bags of all ranks and sends one vector for each. A rank
gets its bags part by part and home by home; in a home's block they lie sample by sample, so that
the block is already a piece of the pooled output's columns:

    one part of a pack's matrix:   | home 0: (n, F_0 D) | home 1: (n, F_1 D) | ...

A home keeps what it is asked for part by part, in each rank by rank, sample by sample and feature
by feature: the vectors of a part are then one slice, in the order in which they are sent.

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
    """Tables of one dim whose bags travel, as all ranks see them; features by home."""

    dim: int
    features_W: tuple[int, ...]
    """Features that each rank pools."""
    rows_F: Tensor
    """Rows of each feature's table, int64."""
    first_row_F: Tensor
    """First row of each feature's table in its home's storage of the pack, int64."""
    mean_F: Tensor | None
    """Which features are averaged, bool; ``None`` = none."""
    most_home_rows: int
    """Rows of the largest home."""

    @staticmethod
    def build(tables: Sequence[PackedTable], device: torch.device) -> BagPack:
        """Lays the tables out at their homes.

        Args:
            tables: Of one pack, homes ascending.
            device: Where the lookup tensors go.
        """
        homes = [table.only_home for table in tables]
        assert homes == sorted(homes), "tables of one home must be side by side"
        features_W = [0] * len(tables[0].block_rows_W)
        rows_W = [0] * len(features_W)
        first_rows, rows, means = [], [], []
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
        """Features of all homes."""
        return sum(self.features_W)

    def features_at(self, home: int) -> slice:
        """Which features a rank pools."""
        starts = [0, *accumulate(self.features_W)]
        return slice(starts[home], starts[home + 1])

    def parts(self, sizes_K: Sequence[int]) -> list[PartBags]:
        """Where the bags of each part lie in the matrix of a rank of these samples."""
        edges = [size * self.num_features for size in accumulate(sizes_K, initial=0)]
        return [
            PartBags(pack=self, vectors=slice(start, end), size=size)
            for (start, end), size in zip(pairwise(edges), sizes_K)
        ]

    def bags_by_home(self, sizes_K: Sequence[int]) -> list[list[int]]:
        """Bags of each part that a rank of these samples asks of each home."""
        return [[size * features for features in self.features_W] for size in sizes_K]


@dataclass(frozen=True)
class PartBags:
    """The bags of one part of a batch in their matrix."""

    pack: BagPack
    vectors: slice
    size: int
    """Samples of the part."""

    def columns(self, matrix_SD: Tensor) -> list[Tensor]:
        """The part's columns of the pooled output.

        Args:
            matrix_SD: Bags of all parts.

        Returns:
            A view for each home that has features, ``(n, F_w D)``.
        """
        return self._blocks(matrix_SD[self.vectors])

    def gradients(self, grads: Sequence[Tensor]) -> Tensor:
        """The gradients of the part's vectors.

        Args:
            grads: Of the columns.

        Returns:
            In the order of the matrix, ``(n F, D)``.
        """
        num_bags = self.vectors.stop - self.vectors.start
        grads_SD = torch.empty(
            num_bags, self.pack.dim, dtype=torch.float32, device=self.pack.rows_F.device
        )
        for block, grad in zip(self._blocks(grads_SD), grads):
            block.copy_(grad)
        return grads_SD

    def _blocks(self, vectors_SD: Tensor) -> list[Tensor]:
        features_W, dim = self.pack.features_W, self.pack.dim
        edges = [self.size * features for features in accumulate(features_W, initial=0)]
        return [
            vectors_SD[start:end].view(self.size, features * dim)
            for (start, end), features in zip(pairwise(edges), features_W)
            if features
        ]


def asked_bag_order(
    num_features: int, samples_WK: Sequence[Sequence[int]], device: torch.device
) -> Tensor:
    """The order of bags at their home.

    Args:
        num_features: Features that this home pools.
        samples_WK: Samples of each rank by part.
        device: Where the order goes.

    Returns:
        For each bag, part by part, rank by rank, sample by sample and feature by feature, its place
        where they come rank by rank and feature by feature: int32, shape ``(S,)``.
    """
    pieces_WK, start = [], 0
    for sizes_K in samples_WK:
        num_bags = num_features * sum(sizes_K)
        bags_S = torch.arange(start, start + num_bags, dtype=torch.int32, device=device)
        by_sample = bags_S.view(num_features, sum(sizes_K)).t()
        pieces_WK.append(by_sample.split(list(sizes_K)))
        start += num_bags
    return torch.cat([piece.reshape(-1) for of_part in zip(*pieces_WK) for piece in of_part])
