"""Computes a batch's unique rows and header words from its features. Sends nothing.

Invalid input is counted and replaced by harmless values, so that every rank reaches the header,
which reports the error to all ranks.

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
    """The unique rows of a batch, in request order."""

    features: KeyedJaggedTensor
    """Features of all modules, in the order of the group's tables."""
    features_of: Sequence[KeyedJaggedTensor]
    """Features of each module."""
    sound: Sequence[KeyedJaggedTensor]
    """Validated features, as returned by :func:`.sound_features`."""
    weights_N: Tensor | None
    """Per-sample weights of the whole batch; ``None`` if the batch has none or no table pools."""
    cut: BatchCut
    bags: Bags
    rows: UniqueRows
    """Unique rows in ascending order of their ids."""
    part_N: Tensor | None
    """Micro-batch of each lookup in bag order; ``None`` for one micro-batch."""
    located: LocatedRows
    """Unique rows by pack; in each pack hot rows, then cold rows by chunk and home rank."""
    hot_epoch: int
    """Epoch of the hot set that the rows were located with."""
    words: HeaderWords
    bag_ids: BagIds | None
    """Requests for owner-pooled tables; the fields above, except features and weights, describe
    row-exchanged tables only."""

    @staticmethod
    def read(
        features_of: Sequence[KeyedJaggedTensor],
        group: RowGroup,
        sizes_K: Sequence[int] | None = None,
        has_data: bool = True,
        sound: Sequence[KeyedJaggedTensor] = (),
    ) -> BatchIds:
        """Computes the unique rows of a batch.

        Args:
            features_of: The whole batch for each module of the group, in its lookup order, with
                valid lengths.
            group: The tables that the features look up.
            sizes_K: Samples of each micro-batch; ``None`` = one micro-batch.
            has_data: Whether the batch comes from this rank's data; otherwise it is a placeholder
                after the end of the data.
            sound: Results of :func:`.sound_features` for the batch, in any order; the header
                reports malformed lengths.

        Raises:
            CompatError: If owner-pooled features have weights that require gradients.
        """
        space, hot, plan = group.space, group.hot, group.plan
        if plan.bag_packs:
            for module_features in features_of:
                check_bags_can_travel(module_features)
        features = group.in_one(features_of)
        if plan.bag_packs and features.variable_stride_per_key():
            # Home ranks get one number of samples per rank, so all features need the same batch
            # size.
            features = filled_up(features)
        cut = BatchCut.of(features, plan, sizes_K)
        weights_N = features.weights_or_none() if plan.takes_weights else None
        lengths_S, offsets_S1 = features.lengths(), features.offsets()
        values_N, bag_ids = features.values(), None
        if plan.bag_packs:
            bag_ids = BagIds.read(features, lengths_S, offsets_S1, plan.bag_packs)
            # Owner-pooled features come last: the rest of this function sees only the features
            # before.
            values_N = values_N[: bag_ids.first_lookup]
            lengths_S = lengths_S[: bag_ids.first_bag]
            offsets_S1 = offsets_S1[: bag_ids.first_bag + 1]
        # Steps for row-exchanged tables: packed ids (N,) -> bag order (N,) -> unique rows (U,) ->
        # request order (U,).
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
        # With one micro-batch all rows are in chunk 0, so no chunk has to be computed.
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
    """Number of lookups of each of the first features, int64, shape ``(F,)``; no host sync."""
    # The first bag of each feature follows from the strides, which are known on the host.
    edges_F1 = torch.tensor([0, *accumulate(features.stride_per_key()[:num_features])])
    edges_F1 = edges_F1.to(offsets_S1.device, non_blocking=True)
    return torch.diff(offsets_S1.index_select(0, edges_F1).to(torch.int64))


def _count_bad_weights(weights_N: Tensor | None, device: torch.device) -> Tensor:
    if weights_N is None:
        return torch.zeros((), dtype=torch.int64, device=device)
    return torch.isfinite(weights_N).logical_not().sum()
