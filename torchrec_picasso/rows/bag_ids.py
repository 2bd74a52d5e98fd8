"""Outgoing requests for owner-pooled tables: each home rank gets its features' ids in batch order.

Features are ordered by pack and home rank, so the lookups for one home rank are a slice. The ids
are neither sorted nor made unique: a home rank pools all lookups.

Shape letters: A packs of bags, F features, K parts, W ranks, S bags, N lookups, X words.

Host syncs per batch on CUDA: one, for the first lookup of each home rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_picasso.errors import CompatError
from torchrec_picasso.ops.bag_pack import BagPack
from torchrec_picasso.ops.shift_rows import shift_rows

__all__ = ["BagIds", "check_bags_can_travel", "read_bag_words"]


@dataclass(frozen=True, kw_only=True)
class BagIds:
    """The owner-pooled bags of one batch, by home rank in each pack."""

    rows_A: Sequence[Tensor]
    """Row of each lookup in the home rank's storage, int64; rows outside their table are 0."""
    lengths_A: Sequence[Tensor]
    """Lookups of each bag."""
    weights_A: Sequence[Tensor] | None
    """Per-sample weight of each lookup, float32."""
    lookups_AW: Sequence[Sequence[int]]
    """Number of lookups for each home rank, on the host."""
    outside_ids: Tensor
    """Number of lookups outside their table, 0-d integer."""
    first_bag: int
    """Number of bags of the row-exchanged features, which come first."""
    first_lookup: int
    """Number of lookups of the row-exchanged features."""

    @staticmethod
    def read(
        features: KeyedJaggedTensor,
        lengths_S: Tensor,
        offsets_S1: Tensor,
        packs: Sequence[BagPack],
    ) -> BagIds:
        """Splits the lookups of owner-pooled features by pack and home rank.

        Args:
            features: The whole batch; the features of the packs come last.
            lengths_S: Lookups of each bag of the batch, summing to the number of values.
            offsets_S1: First lookup of each bag, and N.
            packs: The owner-pooled packs.
        """
        weights_N = features.weights_or_none()
        if weights_N is not None and weights_N.numel() != features.values().numel():
            # Malformed, refused after the header: zeros of the right size until then.
            weights_N = torch.zeros_like(features.values(), dtype=torch.float32)
        num_samples = features.stride()
        features_AW = [num for pack in packs for num in pack.features_W]
        first_bag = (len(features.keys()) - sum(features_AW)) * num_samples
        # First bag of each (pack, home rank) block, shape (A W + 1,): features times samples. The
        # offsets there are the only numbers that the host needs.
        edges = torch.tensor([*accumulate(features_AW, initial=0)]).mul_(num_samples)
        edges = edges.add_(first_bag).to(offsets_S1.device, non_blocking=True)
        starts = offsets_S1.index_select(0, edges).tolist()
        lookups = [end - start for start, end in pairwise(starts)]
        world_size = len(packs[0].features_W)
        # From one list of A W counts to W counts per pack.
        lookups_AW = [lookups[at : at + world_size] for at in range(0, len(lookups), world_size)]
        lookups_A = [sum(lookups_W) for lookups_W in lookups_AW]
        low, high = starts[0], starts[-1]
        limit_F = torch.cat([pack.rows_F for pack in packs])
        first_row_F = torch.cat([pack.first_row_F for pack in packs])
        lengths_S = lengths_S[first_bag:]
        # Bags of a feature are consecutive: (F, B) lengths sum to (F,) lookups.
        lookups_F = lengths_S.view(limit_F.numel(), num_samples).sum(1)
        ids_N = features.values()[low:high]
        # Row of the table plus the table's first row in the home rank's storage, shape (N,).
        rows_N, num_outside = shift_rows(ids_N, lookups_F, first_row_F, limit_F, torch.int64)
        return BagIds(
            rows_A=rows_N.split(lookups_A),
            lengths_A=lengths_S.split([num_samples * pack.num_features for pack in packs]),
            weights_A=None if weights_N is None else weights_N[low:high].float().split(lookups_A),
            lookups_AW=lookups_AW,
            outside_ids=num_outside,
            first_bag=first_bag,
            first_lookup=low,
        )

    def words(self, sizes_K: Sequence[int | None]) -> Tensor:
        """Returns the header words that home ranks need: samples by micro-batch, lookups by pack.

        Args:
            sizes_K: Samples of each micro-batch.

        Returns:
            One message per rank, int64 on the host, shape ``(W, K + A)``.
        """
        return torch.tensor([[*sizes_K, *lookups_A] for lookups_A in zip(*self.lookups_AW)])


def read_bag_words(
    words_WX: Sequence[Sequence[int]], num_parts: int
) -> tuple[list[list[int]], list[list[int]]]:
    """Reads the header words of all ranks.

    Args:
        words_WX: Result of :meth:`BagIds.words` on each rank, the row for this rank.
        num_parts: Number of micro-batches, K.

    Returns:
        Samples of each rank by micro-batch, ``(W, K)``, and incoming lookups by pack and rank,
        ``(A, W)``.
    """
    samples_WK = [list(words[:num_parts]) for words in words_WX]
    lookups_AW = [list(lookups_W) for lookups_W in zip(*(words[num_parts:] for words in words_WX))]
    return samples_WK, lookups_AW


def check_bags_can_travel(features: KeyedJaggedTensor) -> None:
    """Refuses batches that a home rank cannot pool for another rank.

    Args:
        features: Features of one module.

    Raises:
        CompatError: If per-sample weights require gradients.
    """
    weights_N = features.weights_or_none()
    if weights_N is not None and weights_N.requires_grad:
        raise CompatError(
            f"the per-sample weights of features {', '.join(features.keys())} want gradients, and "
            "some of their tables are hot/cold with form='bags', whose weights leave this rank; "
            "use form='rows' for these tables, as hot_cold_planner(hot_rows=0) does, or "
            "weights.detach()"
        )
