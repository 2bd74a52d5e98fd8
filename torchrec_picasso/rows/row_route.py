"""The row exchange: each distinct row travels once and is pooled where the batch is.

Rows of the next batch that this batch does not update are clean: they may be fetched before this
batch's update. The home rank of a row knows from the requests of both batches whether the row is
clean, and reports it to the requesting rank. So lookahead changes when a row is sent, never its
values.

Header words of a pair of ranks: P K counts of cold rows, and a bit per hot slot.

Shape letters: F features, K parts and chunks, J runs of bags, M matrices, P packs, N lookups, U
unique rows, W ranks.

Host syncs per batch on CUDA: the number of unique rows; per pack the touched hot rows and, with
lookahead, two fetch orders; two more for several micro-batches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate

import torch
from torch import Tensor

from torchrec_picasso.exchange.header import ReceivedWords, RouteWords
from torchrec_picasso.exchange.packed import Payload
from torchrec_picasso.ops.bags import bag_order, reorder_bags
from torchrec_picasso.ops.ids import pack_bits
from torchrec_picasso.ops.pack_plan import PackPlan
from torchrec_picasso.ops.part_pooling import (
    BatchCut,
    PartPooling,
    count_lookups,
    cut_pooling,
    part_of_lookup,
)
from torchrec_picasso.ops.row_order import (
    ExchangeSplits,
    FetchOrder,
    fetch_positions,
    find_fetch_order,
    first_use_chunks,
    locate_rows,
)
from torchrec_picasso.ops.segment_reduction import (
    gradient_of_rows,
    gradient_of_weights,
    mean_weights,
    pool_rows,
)
from torchrec_picasso.ops.unique import unique_rows
from torchrec_picasso.rows.route import (
    IncomingRequests,
    PackLayout,
    Pooling,
    Route,
    RouteFeatures,
    RouteLayout,
    RouteRequest,
)
from torchrec_picasso.storage.hot_homes import TouchedHot
from torchrec_picasso.storage.row_storage import RowStorage

__all__ = ["RowRoute"]


class RowRoute(Route):
    """Tables whose distinct rows travel. Arguments as for :class:`Route`."""

    name = "rows"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._bag_orders = lru_cache(maxsize=1)(bag_order)
        """The permutation of bags, kept for batches of the same sizes."""

    @cached_property
    def plan(self) -> PackPlan:
        """Waves of the placement, and a matrix for neighbouring packs of one dim."""
        return PackPlan.build(self.tables, self.device)

    @property
    def is_staggered(self) -> bool:
        """Whether the tables' placement has several waves."""
        return len(self.plan.waves) > 1

    def read(self, features: RouteFeatures) -> _Request:
        """Finds the unique rows of a batch."""
        return _Request(self, features)

    def _bag_order(self, sizes_K: Sequence[int | None]) -> Tensor | None:
        """Returns the permutation of bags to matrix-major order; ``None`` = bags keep theirs."""
        sizes = tuple(size for size in sizes_K if size is not None)
        if not sizes or (not self.plan.takes_weights and len(sizes) == 1):
            return None
        if not any(self.plan.is_sequence_M):
            sizes = (sum(sizes),)  # the order of pooled bags does not depend on the split
        return self._bag_orders(self.plan.features_M, self.plan.is_sequence_M, sizes, self.device)


class _Request(RouteRequest):
    """The request for the distinct rows of one batch."""

    def __init__(self, route: RowRoute, features: RouteFeatures) -> None:
        self._route = route
        self._sizes_K = features.sizes_K
        self.cut = cut = BatchCut.from_strides(features.strides_F, features.sizes_K, route.plan)
        # Packed ids (N,) -> bag order (N,) -> unique rows (U,) -> request order (U,).
        lookups_F = count_lookups(features.offsets_S1, features.strides_F)
        packed_N, self.outside_ids = route.space.pack_ids(features.values_N, lookups_F)
        self.bags = reorder_bags(
            packed_N,
            features.lengths_S,
            route._bag_order(features.sizes_K),
            keep_source=features.weights_N is not None and route.plan.takes_weights,
        )
        # KeyedJaggedTensor position of each lookup, counted over all features of the batch
        source_N, first = self.bags.source_N, features.first_lookup
        self._source_N = source_N + first if source_N is not None and first else source_N
        self.rows = unique_rows(self.bags.ids_N)
        lookups_J = count_lookups(self.bags.offsets_S1, cut.bags_by_run)
        self.part_N = chunk_U = None
        # With one micro-batch all rows are in chunk 0, so no chunk has to be computed.
        if cut.num_parts > 1:
            self.part_N = part_of_lookup(lookups_J, cut.part_by_run, packed_N.numel())
            chunk_U = first_use_chunks(self.rows, self.part_N, cut.num_parts)
        self.located = locate_rows(self.rows.ids_U, route.space, route.hot, chunk_U, cut.num_parts)
        counts_PQ, size = self.located.counts_PQ, route.space.world_size
        # For rank w: P K counts, from (P K, W) transposed, and the slots, the same for all ranks.
        self.words = RouteWords(
            sent=[
                counts_PQ[:, 1:].reshape(-1, size).t(),
                pack_bits(self.located.is_used_H).expand(size, -1),
            ],
            kept=[counts_PQ.reshape(-1), lookups_J],
        )
        self._dirty_mask: list[tuple[Tensor, Tensor]] | None = None

    def take_header(self, words: ReceivedWords) -> None:
        (counts_WX, bits_WX), (counts_n, lookups_n) = words
        route, located = self._route, self.located
        own_PQ = counts_n.reshape(located.counts_PQ.shape)
        num_packs, world_size = len(own_PQ), len(counts_WX)
        outgoing_PKW = own_PQ[:, 1:].reshape(num_packs, -1, world_size)
        # From (W, P K) by sender to (P, K, W).
        incoming_PKW = counts_WX.T.reshape(outgoing_PKW.shape)
        self._hot_P = own_PQ[:, 0].tolist()
        self._outgoing_P = list(map(ExchangeSplits, outgoing_PKW.tolist()))
        self._incoming_P = list(map(ExchangeSplits, incoming_PKW.tolist()))
        self._lookups_MKJ = self.cut.by_part(lookups_n.tolist())
        self._touched_P = route.hot.touched(bits_WX)
        # target_U is ordered by pack, hot rows first: split it into [hot, cold] of each pack.
        counts = [
            n for h, outgoing in zip(self._hot_P, self._outgoing_P) for n in (h, outgoing.num_rows)
        ]
        targets = located.target_U.split(counts)
        # Slots count from 0 in each pack, because a storage keeps the replicas of one pack.
        starts_P = route.hot.start_P1
        self._hot_slots_P = [s - start if start else s for s, start in zip(targets[::2], starts_P)]
        self._cold_P = targets[1::2]

    def ids(self, dtype: torch.dtype) -> list[Payload]:
        self.incoming_rows_P = [
            self._one_for_each(incoming, dtype) for incoming in self._incoming_P
        ]
        return [
            payload
            for cold, outgoing, rows, incoming in zip(
                self._cold_P, self._outgoing_P, self.incoming_rows_P, self._incoming_P
            )
            for payload in _by_chunk(cold.to(dtype), outgoing, rows, incoming)
        ]

    def dirty_mask(self, before: _Request) -> list[Payload]:
        dtype = torch.uint8
        # One uint8 per incoming row of the pack: whether the batch before requested the same row.
        # The mask travels back along the ids: incoming counts are sent, outgoing ones received.
        self._dirty_mask = [
            (
                self._one_for_each(outgoing, dtype),
                storage.which_are_among(rows, updated).to(dtype),
            )
            for outgoing, storage, rows, updated in zip(
                self._outgoing_P, self._route.storages, self.incoming_rows_P, before.incoming_rows_P
            )
        ]
        return [
            payload
            for (outgoing_n, incoming_n), outgoing, incoming in zip(
                self._dirty_mask, self._outgoing_P, self._incoming_P
            )
            for payload in _by_chunk(incoming_n, incoming, outgoing_n, outgoing)
        ]

    def lay_out(self, first_matrix: int) -> RouteLayout:
        cut, plan = self.cut, self._route.plan
        packs = self._pack_layouts(first_matrix)
        # Lookups are summed over the runs of a micro-batch: cut_pooling sees whole micro-batches.
        cut_KM = cut_pooling(
            self.bags,
            self.rows,
            self.located,
            fetch_positions(self.located, self._hot_P, [pack.outgoing_by_fetch for pack in packs]),
            cut,
            part_N=self.part_N,
            lookups_MK=[[sum(runs) for runs in runs_K] for runs_K in self._lookups_MKJ],
            rows_M=[sum(pack.num_rows for pack in packs[matrix]) for matrix in plan.matrices],
        )
        pooling_KM: list[list[Pooling]] = [
            [
                _RowPooling(
                    part=part,
                    size=size,
                    num_features=num_features,
                    source_N=None if self._source_N is None else self._source_N[part.lookups],
                    lookups_F=lookups_KJ[k],
                )
                for part, num_features, lookups_KJ in zip(cut_M, plan.features_M, self._lookups_MKJ)
            ]
            for k, (cut_M, size) in enumerate(zip(cut_KM, self._sizes_K))
        ]
        return packs, pooling_KM

    def _pack_layouts(self, first_matrix: int) -> list[PackLayout]:
        """Returns the layouts of the packs, in fetch order if the dirty mask is known."""
        storages = self._route.storages
        orders = [self._fetch_orders(p) for p in range(len(storages))]
        rows_P = [hot + outgoing.num_rows for hot, outgoing in zip(self._hot_P, self._outgoing_P)]
        # Packs of one matrix follow each other: start = rows of the packs before it in the matrix.
        return [
            PackLayout(
                matrix=first_matrix + matrix,
                start=start,
                hot_slots=self._hot_slots_P[p],
                touched=storages[p].hot_homes.touched(self._touched_P[p]),
                outgoing=self._outgoing_P[p],
                outgoing_by_fetch=orders[p][0],
                incoming=self._incoming_P[p],
                requests=_IncomingRows.build(self.incoming_rows_P[p], orders[p][1]),
            )
            for matrix, packs in enumerate(self._route.plan.matrices)
            for p, start in zip(
                range(packs.start, packs.stop), accumulate(rows_P[packs], initial=0)
            )
        ]

    def _fetch_orders(self, p: int) -> list[FetchOrder]:
        """Returns the fetch orders of outgoing and incoming rows of pack ``p``; without a mask all
        are dirty."""
        exchanges = self._outgoing_P[p], self._incoming_P[p]
        dirty = (
            (None, None) if self._dirty_mask is None else [n.bool() for n in self._dirty_mask[p]]
        )
        return [find_fetch_order(e.counts_EW, dirty_n) for e, dirty_n in zip(exchanges, dirty)]

    def _one_for_each(self, exchanges: ExchangeSplits, dtype: torch.dtype) -> Tensor:
        """Allocates an uninitialized vector with one element per row of the exchanges."""
        return self.located.target_U.new_empty(exchanges.num_rows, dtype=dtype)


@dataclass(frozen=True, kw_only=True)
class _IncomingRows(IncomingRequests):
    """Incoming requests for home rows in request order, each read for every requesting rank."""

    sends_rows = True

    rows_by_fetch_n: Tensor
    """Home rows in fetch order."""

    @staticmethod
    def build(rows_n: Tensor, by_fetch: FetchOrder) -> _IncomingRows:
        return _IncomingRows(
            home_rows_n=rows_n, by_fetch=by_fetch, rows_by_fetch_n=by_fetch.arrange(rows_n)
        )

    @staticmethod
    def joined(batches: Sequence[_IncomingRows]) -> _IncomingRows:
        rows_n = torch.cat([incoming.home_rows_n for incoming in batches])
        return _IncomingRows.build(rows_n, FetchOrder([[rows_n.numel()]], None))

    def read(self, storage: RowStorage, exchange: int) -> Tensor:
        return storage.gather(self.rows_by_fetch_n[self.by_fetch.rows(exchange)])

    def update(self, storage: RowStorage, touched: TouchedHot, grads_mD: Tensor) -> None:
        storage.update(self.home_rows_n, touched, grads_mD)


@dataclass(frozen=True, kw_only=True)
class _RowPooling(Pooling):
    """The pooling of one micro-batch of one matrix of rows; one piece, ``(B F, D)``.

    Sequences are not pooled: the piece has the row of each lookup, ``(N, D)``.
    """

    part: PartPooling
    size: int | None
    """Samples of the micro-batch; ``None`` if every feature has its own batch size."""
    num_features: int
    source_N: Tensor | None
    """KeyedJaggedTensor position of each lookup in bag order; ``None`` without weights."""

    def lookup_weights(self, weights_N: Tensor, are_new: bool) -> Tensor | None:
        if not self.part.index.has_bags:
            return None
        assert self.source_N is not None, "the batch came without weights"
        return weights_N.float().index_select(0, self.source_N)

    def scales(self, weights_N: Tensor | None) -> Tensor | None:
        index = self.part.index
        return mean_weights(weights_N, index.bag_offsets_S1, index.mean_S, index.num_lookups)

    def pool(self, rows_RD: Tensor, scales_N: Tensor | None) -> list[Tensor]:
        return [pool_rows(rows_RD, scales_N, self.part.index)]

    def columns(self, pieces: list[Tensor]) -> list[Tensor]:
        (piece,) = pieces
        if not self.part.index.has_bags:
            return pieces
        if self.size is None:
            return [piece.view(-1)]
        return [piece.view(self.size, self.num_features * piece.size(1))]

    def gradients(self, grads: Sequence[Tensor], scales_N: Tensor | None) -> Tensor:
        return gradient_of_rows(grads[0], scales_N, self.part.index)

    def gradient_of_scales(self, grads: Sequence[Tensor], rows_RD: Tensor) -> Tensor:
        return gradient_of_weights(grads[0], rows_RD, self.part.index)

    def add_gradients(self, sums_RD: Tensor, grads_nD: Tensor) -> None:
        assert self.part.gradient_position_U is not None, "one micro-batch needs no sums"
        # A row that several micro-batches use is summed here, at its position in request order.
        sums_RD.index_add_(0, self.part.gradient_position_U, grads_nD)

    def tensors(self) -> Iterator[Tensor]:
        yield from self.part.tensors()
        if self.source_N is not None:
            yield self.source_N


def _by_chunk(
    sent: Tensor, sent_by: ExchangeSplits, received: Tensor, received_by: ExchangeSplits
) -> Iterator[Payload]:
    """Splits the vectors of one pack into their chunks, a payload each."""
    for chunk, (sent_W, received_W) in enumerate(zip(sent_by.counts_EW, received_by.counts_EW)):
        into = received[received_by.rows(chunk)]
        yield Payload(sent[sent_by.rows(chunk)], sent_W, into, received_W)
