"""From a batch's features to its unique rows and what the header says of them. Sends nothing.

Bad input is counted here and made harmless, so that every rank reaches the header, in which all
learn of it.

Shape letters: F features, K parts, N lookups, J runs of bags, S bags, U unique rows.

Host syncs per batch on CUDA: the number of unique rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_picasso.exchange.header import HeaderWords
from torchrec_picasso.ops.bags import Bags, reorder_bags
from torchrec_picasso.ops.part_pooling import count_lookups, part_of_lookup
from torchrec_picasso.ops.places import LocatedRows, first_use_chunks, locate_rows
from torchrec_picasso.ops.unique import UniqueRows, unique_rows
from torchrec_picasso.rows.bag_ids import BagIds, check_bags_can_travel
from torchrec_picasso.rows.cut import BatchCut, filled_up
from torchrec_picasso.rows.group import RowGroup
from torchrec_picasso.rows.sound_features import are_bad

__all__ = ["BatchIds"]


@dataclass(frozen=True, kw_only=True)
class BatchIds:
    """A batch made unique, in request order."""

    features: KeyedJaggedTensor
    """Of all modules, in the order of the group's tables."""
    features_of: Sequence[KeyedJaggedTensor]
    """Those of each module."""
    sound: Sequence[KeyedJaggedTensor]
    """What :func:`.sound_features` made of the batch."""
    weights_N: Tensor | None
    """Per-sample weights of the whole batch, where anything is pooled."""
    cut: BatchCut
    bags: Bags
    rows: UniqueRows
    """Its rows in the order of their ids."""
    part_N: Tensor | None
    """Part of each lookup in bag order; ``None`` where there is one part."""
    located: LocatedRows
    """Its rows by pack, chunk and home; hot rows of a pack before its chunks."""
    hot_epoch: int
    """Which hot set they were located with."""
    words: HeaderWords
    bag_ids: BagIds | None
    """What tables are asked for whose bags travel; all above but features and weights is of those
    whose rows do."""

    @staticmethod
    def read(
        features_of: Sequence[KeyedJaggedTensor],
        group: RowGroup,
        sizes_K: Sequence[int] | None = None,
        has_data: bool = True,
        sound: Sequence[KeyedJaggedTensor] = (),
    ) -> BatchIds:
        """Makes a batch unique.

        Args:
            features_of: Of the whole batch, for each module of the group, in its lookup order, with
                lengths that fit.
            group: The tables that they look up.
            sizes_K: Samples of each part; ``None`` = one part.
            has_data: Whether the batch comes from this rank's data; else it stands in for data
                that has ended.
            sound: What :func:`.sound_features` made of the batch, in any order; the header tells
                whether lengths did not fit.

        Raises:
            CompatError: If bags are to travel that cannot.
        """
        space, hot, plan = group.space, group.hot, group.plan
        if plan.bag_packs:
            for of_module in features_of:
                check_bags_can_travel(of_module)
        features = group.in_one(features_of)
        if plan.bag_packs and features.variable_stride_per_key():
            features = filled_up(features)
        cut = BatchCut.of(features, plan, sizes_K)
        weights_N = features.weights_or_none() if plan.takes_weights else None
        lengths_S, offsets_S1 = features.lengths(), features.offsets()
        values_N, bag_ids = features.values(), None
        if plan.bag_packs:
            bag_ids = BagIds.read(features, lengths_S, offsets_S1, plan.bag_packs)
            values_N = values_N[: bag_ids.first_lookup]
            lengths_S = lengths_S[: bag_ids.first_bag]
            offsets_S1 = offsets_S1[: bag_ids.first_bag + 1]
        lookups_F = _lookups_per_feature(features, offsets_S1, space.feature_base_F.numel())
        packed_N, num_outside = space.pack_ids(values_N, lookups_F)
        bags = reorder_bags(
            packed_N,
            lengths_S,
            group.bag_order(cut.sizes_K),
            keep_source=weights_N is not None and plan.pools_rows,
        )
        rows = unique_rows(bags.ids_N)
        lookups_J = count_lookups(bags, cut.bags_by_run)
        part_N = chunk_U = None
        if cut.num_parts > 1:
            part_N = part_of_lookup(lookups_J, cut.part_by_run, packed_N.numel())
            chunk_U = first_use_chunks(rows, part_N, cut.num_parts)
        located = locate_rows(rows.ids_U, space, hot, chunk_U, cut.num_parts)
        return BatchIds(
            features=features,
            features_of=features_of,
            sound=sound,
            weights_N=weights_N,
            cut=cut,
            bags=bags,
            rows=rows,
            part_N=part_N,
            located=located,
            hot_epoch=hot.epoch,
            words=HeaderWords(
                counts_PQ=located.counts_PQ,
                lookups_J=lookups_J,
                touched_H=located.touched_H,
                hot_start_P1=hot.start_P1,
                outside_ids=num_outside + (0 if bag_ids is None else bag_ids.outside_ids),
                bad_weights=_count_bad_weights(weights_N, packed_N.device),
                bad_lengths=are_bad(sound),
                has_data=has_data,
                looks_up_nothing=not any(features.values().numel() for features in features_of),
                bag_words_WX=None if bag_ids is None else bag_ids.words(cut.sizes_K),
            ),
            bag_ids=bag_ids,
        )


def _lookups_per_feature(
    features: KeyedJaggedTensor, offsets_S1: Tensor, num_features: int
) -> Tensor:
    """Lookups of each of the first features, int64, shape ``(F,)``; no host sync."""
    edges_F1 = torch.tensor([0, *accumulate(features.stride_per_key()[:num_features])])
    edges_F1 = edges_F1.to(offsets_S1.device, non_blocking=True)
    return torch.diff(offsets_S1.index_select(0, edges_F1).to(torch.int64))


def _count_bad_weights(weights_N: Tensor | None, device: torch.device) -> Tensor:
    if weights_N is None:
        return torch.zeros((), dtype=torch.int64, device=device)
    return torch.isfinite(weights_N).logical_not().sum()
