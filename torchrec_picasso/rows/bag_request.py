"""The owner-pooled part of a batch's request: ids are sent in the same exchange as row ids.

Home ranks receive ids by rank, then feature, and reorder them to the order in which bags are pooled
and sent, by micro-batch. The result is one :class:`AskedBags` per pack.

Shape letters: A packs of bags, K parts, W ranks, S bags, N lookups, X words.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from torchrec_picasso.ops.bag_pack import PartBags
from torchrec_picasso.ops.bags import reorder_bags
from torchrec_picasso.ops.fetch_order import Exchanges, FetchOrder, dirty_exchange
from torchrec_picasso.ops.segment_reduction import mean_scale, mean_weights
from torchrec_picasso.rows.asked import AskedBags
from torchrec_picasso.rows.bag_ids import BagIds, read_bag_words
from torchrec_picasso.rows.group import RowGroup
from torchrec_picasso.rows.layout import PackLayout
from torchrec_picasso.storage.hot_homes import TouchedHot

__all__ = ["BagRequest", "Freight"]


@dataclass(frozen=True, kw_only=True)
class Freight:
    """Payload of one exchange: a vector to send and a vector to receive, both grouped by rank."""

    sent: Tensor
    sent_W: Sequence[int]
    received: Tensor
    received_W: Sequence[int]


class BagRequest:
    """The request for the owner-pooled bags of one batch, created after the header has arrived.

    Args:
        group: The tables.
        ids: Outgoing lookups of this rank.
        sizes_K: Samples of this rank by micro-batch.
        words_WX: Header words of all ranks for their bags, see :meth:`BagIds.words`.
    """

    def __init__(
        self,
        group: RowGroup,
        ids: BagIds,
        sizes_K: Sequence[int],
        words_WX: Sequence[Sequence[int]],
    ) -> None:
        self._group = group
        self._ids = ids
        self._sizes_K = sizes_K
        self._samples_WK, self._asked_lookups_AW = read_bag_words(words_WX, len(sizes_K))
        self._received_A: list[list[Tensor]] = []

    def freight(self, dtype: torch.dtype) -> list[Freight]:
        """Returns the payloads of each pack: ids, lengths and, if present, weights.

        Args:
            dtype: Integer type on the wire, int32 or int64.
        """
        freight = []
        for pack, bags in enumerate(self._group.plan.bag_packs):
            asked_W = self._asked_lookups_AW[pack]
            samples_W = [sum(sizes_K) for sizes_K in self._samples_WK]
            own_features = bags.features_W[self._group.ranks.rank]
            bags_W = [sum(self._sizes_K) * features for features in bags.features_W]
            # One entry (sent, sent_W, received_W) per vector. Lengths: one per (sample, feature).
            lookups = self._ids.rows_A[pack], self._ids.lookups_AW[pack], asked_W
            lengths = (
                self._ids.lengths_A[pack],
                bags_W,
                [samples * own_features for samples in samples_W],
            )
            vectors = [lookups, lengths]
            if self._ids.weights_A is not None:
                # float32 weights are sent as their bits in the integer payload, with the ids'
                # counts.
                bits = self._ids.weights_A[pack].contiguous().view(torch.int32)
                vectors.append((bits, *lookups[1:]))
            received = [
                lengths[0].new_empty(sum(counts_W), dtype=dtype) for *_, counts_W in vectors
            ]
            self._received_A.append(received)
            freight += [
                Freight(sent=sent.to(dtype), sent_W=sent_W, received=into, received_W=received_W)
                for (sent, sent_W, received_W), into in zip(vectors, received)
            ]
        return freight

    def parts(self) -> list[list[PartBags]]:
        """Position of this rank's bags in their matrices, by micro-batch and pack."""
        packs = self._group.plan.bag_packs
        return [list(bags_A) for bags_A in zip(*(pack.parts(self._sizes_K) for pack in packs))]

    def pack_layouts(self) -> list[PackLayout]:
        """Returns the layout of each pack; requires that the ids have arrived."""
        plan = self._group.plan
        layouts = []
        for pack, bags in enumerate(plan.bag_packs):
            source = self._asked(pack)
            nothing = source.rows_N.new_empty(0)
            bags_KW = bags.bags_by_home(self._sizes_K)
            layouts.append(
                PackLayout(
                    matrix=plan.num_row_matrices + pack,
                    start=0,
                    hot_slots=nothing,
                    touched=TouchedHot(slots_t=nothing, own_slots_o=nothing, own_rows_o=nothing),
                    mine=Exchanges(bags_KW),
                    mine_by_fetch=_all_dirty(bags_KW),
                    # Gradients are sent by chunk: without the (empty) exchange of clean rows.
                    asked=Exchanges(source.by_fetch.counts_EW[dirty_exchange(0) :]),
                    source=source,
                )
            )
        return layouts

    def _asked(self, pack: int) -> AskedBags:
        """Builds the incoming requests of one pack from the received ids."""
        bags = self._group.plan.bag_packs[pack]
        rows, lengths, *weight_bits = self._received_A[pack]
        features = bags.features_at(self._group.ranks.rank)
        num_features = features.stop - features.start
        # From (rank, feature, sample) order to (micro-batch, rank, sample, feature) order.
        ordered = reorder_bags(
            rows.to(torch.int64),
            lengths,
            self._group.asked_bag_order(num_features, self._samples_WK),
            keep_source=bool(weight_bits),
        )
        weights_N = None
        if weight_bits:
            assert ordered.source_N is not None
            given_N = weight_bits[0].to(torch.int32).view(torch.float32)
            weights_N = given_N.index_select(0, ordered.source_N)
        # Bags by micro-batch and rank; zip transposes the samples from (W, K) to (K, W).
        counts_KW = [
            [size * num_features for size in sizes_W] for sizes_W in zip(*self._samples_WK)
        ]
        by_fetch = _all_dirty(counts_KW)
        scale_S = None
        if bags.mean_F is not None:
            # One flag per bag: the features of this home rank, repeated for each sample of all
            # ranks.
            mean_S = bags.mean_F[features].repeat(sum(map(sum, self._samples_WK)))
            if weights_N is None:
                scale_S = mean_scale(torch.diff(ordered.offsets_S1).float(), mean_S)
            else:
                weights_N = mean_weights(weights_N, ordered.offsets_S1, mean_S, rows.numel())
        # First bag of each exchange, shape (E + 1,). Nothing is fetched ahead: exchange 0 is empty.
        edges = torch.tensor([0, *(by_fetch.rows(e).stop for e in range(len(counts_KW) + 1))])
        edges = edges.to(ordered.offsets_S1.device, non_blocking=True)
        return AskedBags(
            rows_N=ordered.ids_N,
            offsets_S1=ordered.offsets_S1,
            weights_N=weights_N,
            scale_S=scale_S,
            by_fetch=by_fetch,
            lookups_E1=ordered.offsets_S1.index_select(0, edges).tolist(),
        )


def _all_dirty(counts_KW: Sequence[Sequence[int]]) -> FetchOrder:
    """Returns the fetch order of pooled bags, which all wait for the update of the batch before.

    Args:
        counts_KW: Bags by micro-batch and rank.
    """
    return FetchOrder([[0] * len(counts_KW[0]), *map(list, counts_KW)], order_n=None)
