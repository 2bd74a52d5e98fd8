"""The row exchange: each distinct row travels once and is pooled on the rank that looked it up.

The home rank of a row knows from the requests of two batches whether the row is clean, and reports
it to the requesting rank. So lookahead changes when a row is sent, never its values.

Header words of a pair of ranks: P K counts of cold rows, and a bit per hot slot.

Shape letters: F features, K micro-batches and chunks, J segments of bags, M matrices, P packs,
N lookups, U unique rows, W ranks.

Host syncs per batch on CUDA: the number of unique rows; with lookahead one for the fetch orders;
one more for several micro-batches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_picasso.exchange.header import ReceivedWords, RouteWords
from torchrec_picasso.exchange.packed import Payload
from torchrec_picasso.ops.bags import BatchCut, count_lookups, cut_pooling, micro_batch_of_lookup
from torchrec_picasso.ops.id_reader import IdReader, PreparedIds, ReadIds
from torchrec_picasso.ops.ids import bits_to_words
from torchrec_picasso.ops.pack_plan import PackPlan
from torchrec_picasso.ops.row_order import (
    ExchangeSplits,
    FetchOrder,
    LocatedRows,
    fetch_positions,
    find_fetch_orders,
    first_use_chunks,
    locate_rows,
)
from torchrec_picasso.ops.segment_reduction import (
    PoolingIndex,
    gradient_of_rows,
    gradient_of_weights,
    mean_weights,
    pool_rows,
)
from torchrec_picasso.rows.route import (
    IncomingRequests,
    PackLayout,
    Pooling,
    Route,
    RouteLayout,
    RouteRequest,
)
from torchrec_picasso.storage.row_storage import HotHomes, RowStorage, TouchedHot


class RowRoute(Route):
    """Tables whose distinct rows travel. Arguments as for :class:`Route`."""

    name = "rows"

    def __post_init__(self) -> None:
        super().__post_init__()
        # Waves of the placement, and a matrix for neighbouring packs of one dim.
        self.plan = PackPlan.build(self.tables, self.device)
        self._reader = IdReader(self.space, self.plan)

    def read(
        self,
        features: KeyedJaggedTensor,
        sizes_K: Sequence[int | None],
        prepared: PreparedIds | None = None,
    ) -> _Request:
        """Finds the unique rows of a batch, and puts them in request order."""
        given = (features, sizes_K, features.weights_or_none() is not None)
        if prepared is not None and not self._reader.can_use(prepared, *given):
            prepared = None
        ids = self._reader.read(*given) if prepared is None else prepared.split()
        rows, num_lookups = ids.rows, features.values().numel()
        cut = BatchCut.from_strides(features.stride_per_key(), sizes_K, self.plan)
        lookups_J = count_lookups(ids.bags.offsets_S1, cut.bags_by_segment)
        micro_batch_N = chunk_U = None
        # With one micro-batch all rows are in chunk 0, so no chunk has to be computed.
        if cut.num_micro_batches > 1:
            micro_batch_N = micro_batch_of_lookup(
                lookups_J, cut.micro_batch_by_segment, num_lookups
            )
            chunk_U = first_use_chunks(rows, micro_batch_N, cut.num_micro_batches)
        located = locate_rows(rows.ids_U, self.space, self.hot, chunk_U, cut.num_micro_batches)
        # For rank w: P K counts, from (P K, W) transposed, and the slots, the same for all ranks.
        size = self.space.world_size
        sent = [
            located.counts_PQ[:, 1:].reshape(-1, size).t(),
            bits_to_words(located.is_used_H).expand(size, -1),
        ]
        kept = [located.counts_PQ.reshape(-1), lookups_J]
        if num_lookups and lookups_J.device.type != "cpu":
            kept.append(rows.counts_U.max().view(1))
        return _Request(
            words=RouteWords(sent, kept=kept),
            outside_ids=ids.outside_ids,
            is_prepared=prepared is not None,
            route=self,
            sizes_K=sizes_K,
            cut=cut,
            read=ids,
            located=located,
            micro_batch_N=micro_batch_N,
        )


@dataclass(kw_only=True)
class _Request(RouteRequest):
    """The request for the distinct rows of one batch."""

    route: RowRoute
    sizes_K: Sequence[int | None]
    cut: BatchCut
    read: ReadIds
    located: LocatedRows
    """The unique rows in request order."""
    micro_batch_N: Tensor | None
    """Micro-batch of each lookup in bag order, int64; ``None`` = there is one."""
    _packs: list[_PackRequest] = field(init=False)
    _hot_bits_WX: np.ndarray = field(init=False)
    """A bit per hot slot that the rank's batch uses."""
    _lookups_MKJ: Sequence[Sequence[Sequence[int]]] = field(init=False)
    _most_lookups: int = field(init=False)
    """Of a row, 0 on the CPU."""

    def row_number_payloads(self, words: ReceivedWords, dtype: torch.dtype) -> list[Payload]:
        # In the order of RowRoute.read: words of each rank, then this rank's own numbers.
        (counts_WX, self._hot_bits_WX), (counts_n, lookups_n, *most_lookups) = words
        self._lookups_MKJ = self.cut.by_micro_batch(lookups_n.tolist())
        self._most_lookups = int(most_lookups[0][0]) if most_lookups else 0
        route, located = self.route, self.located
        own_PQ = counts_n.reshape(located.counts_PQ.shape)
        num_packs, world_size = len(own_PQ), len(counts_WX)
        wanted_PKW = own_PQ[:, 1:].reshape(num_packs, -1, world_size)
        # From (W, P K) by sender to (P, K, W).
        served_PKW = counts_WX.T.reshape(wanted_PKW.shape)
        # storage_row_U is ordered by pack, hot rows first: split it into [hot, cold] of each pack.
        nums = [num for hot, *cold_KW in own_PQ.tolist() for num in (hot, sum(cold_KW))]
        wanted_P = located.storage_row_U.to(dtype).split(nums)[1::2]
        slots_P: Sequence[Tensor] = [route.hot.ids_H] * num_packs  # empty without hot rows
        if route.hot.num_rows:
            slots_P = located.storage_row_U.split(nums)[::2]
        self._packs, payloads = [], list[Payload]()
        for p, storage in enumerate(route.storages):
            # Slots count from 0 in each pack, because a storage keeps the replicas of one pack.
            first_slot = route.hot.start_P1[p]
            pack = _PackRequest(
                storage=storage,
                hot_slots=slots_P[p] - first_slot if first_slot else slots_P[p],
                wanted_n=wanted_P[p],
                served_n=wanted_P[p].new_empty(int(served_PKW[p].sum())),
                wanted=ExchangeSplits(wanted_PKW[p].tolist()),
                served=ExchangeSplits(served_PKW[p].tolist()),
            )
            self._packs.append(pack)
            payloads += _by_chunk(pack.wanted_n, pack.wanted, pack.served_n, pack.served)
        return payloads

    def dirty_mask_payloads(self, before: _Request) -> list[Payload]:
        payloads: list[Payload] = []
        for pack, earlier in zip(self._packs, before._packs):
            # One uint8 per served row: whether the batch before requested the same row. The mask
            # travels back: to whom row numbers came from.
            pack.dirty_served_n = pack.storage.which_are_among(pack.served_n, earlier.served_n)
            pack.dirty_wanted_n = pack.dirty_served_n.new_empty(pack.wanted.num_rows)
            sent, received = pack.dirty_served_n, pack.dirty_wanted_n
            payloads += _by_chunk(sent, pack.served, received, pack.wanted)
        return payloads

    def lay_out(self, first_matrix: int) -> RouteLayout:
        plan, packs = self.route.plan, self._packs
        # One sort finds the fetch orders of all packs' wanted rows, and of all served ones.
        counts = [each.wanted.counts_EW for each in packs]
        counts += [each.served.counts_EW for each in packs]
        dirty = [each.dirty_wanted_n for each in packs]
        dirty += [each.dirty_served_n for each in packs]
        orders = find_fetch_orders(counts, dirty)
        wanted_P, served_P = orders[: len(packs)], orders[len(packs) :]
        homes_P = [each.storage.hot_homes for each in packs]
        touched_P = HotHomes.find_own(homes_P, self.route.hot.touched(self._hot_bits_WX))
        layouts: list[PackLayout] = []
        num_rows_M: list[int] = []
        for matrix, own in enumerate(plan.matrices):
            start = 0  # packs of one matrix follow each other
            for p in range(own.start, own.stop):
                given = touched_P[p], wanted_P[p], served_P[p]
                layouts.append(packs[p].lay_out(first_matrix + matrix, start, *given))
                start += layouts[-1].num_rows
            num_rows_M.append(start)
        # Lookups are summed over a micro-batch's segments: cut_pooling sees whole micro-batches.
        index_KM = cut_pooling(
            self.read.bags,
            self.read.rows,
            self.located,
            fetch_positions(self.located, [(p.hot_slots, p.wanted_by_fetch) for p in layouts]),
            self.cut,
            micro_batch_N=self.micro_batch_N,
            lookups_MK=[[sum(lookups_J) for lookups_J in row] for row in self._lookups_MKJ],
            num_rows_M=num_rows_M,
            most_lookups=self._most_lookups,
        )
        pooling_KM: list[list[Pooling]] = [
            [
                _RowPooling(index=index, size=size, num_features=num, lookups_F=lookups_KJ[k])
                for index, num, lookups_KJ in zip(index_M, plan.features_M, self._lookups_MKJ)
            ]
            for k, (index_M, size) in enumerate(zip(index_KM, self.sizes_K))
        ]
        return layouts, pooling_KM


@dataclass(kw_only=True)
class _PackRequest:
    """The request for the rows of one pack, after the header; fields as in :class:`PackLayout`."""

    storage: RowStorage
    hot_slots: Tensor
    wanted_n: Tensor
    """Home rows that this rank requests, in the wire's integer type."""
    served_n: Tensor
    """Home rows that ranks request here; filled once the ids have arrived."""
    wanted: ExchangeSplits
    served: ExchangeSplits
    dirty_wanted_n: Tensor | None = None
    """Whether wanted rows are dirty, uint8; ``None`` = all are."""
    dirty_served_n: Tensor | None = None

    def lay_out(
        self,
        matrix: int,
        start: int,
        touched: TouchedHot,
        wanted_by_fetch: FetchOrder,
        served_by_fetch: FetchOrder,
    ) -> PackLayout:
        return PackLayout(
            matrix=matrix,
            start=start,
            hot_slots=self.hot_slots,
            touched=touched,
            wanted=self.wanted,
            wanted_by_fetch=wanted_by_fetch,
            served=self.served,
            requests=_IncomingRows(
                home_row_numbers_n=self.served_n,
                served_by_fetch=served_by_fetch,
                row_numbers_by_fetch_n=served_by_fetch.arrange(self.served_n),
            ),
        )


@dataclass(frozen=True, kw_only=True)
class _IncomingRows(IncomingRequests):
    """Incoming requests for home rows in request order, each read for every requesting rank."""

    sends_rows = True

    row_numbers_by_fetch_n: Tensor
    """Home rows in fetch order."""

    @staticmethod
    def joined(batches: Sequence[_IncomingRows]) -> _IncomingRows:
        rows_n = torch.cat([incoming.home_row_numbers_n for incoming in batches])
        order = FetchOrder([[rows_n.numel()]], order_n=None)
        return _IncomingRows(
            home_row_numbers_n=rows_n, served_by_fetch=order, row_numbers_by_fetch_n=rows_n
        )

    def read(self, storage: RowStorage, exchange: int) -> Tensor:
        return storage.gather(self.row_numbers_by_fetch_n[self.served_by_fetch.slice_of(exchange)])

    def update(self, storage: RowStorage, touched: TouchedHot, grads_mD: Tensor) -> None:
        storage.update(self.home_row_numbers_n, touched, grads_mD)


@dataclass(frozen=True, kw_only=True)
class _RowPooling(Pooling):
    """The pooling of one micro-batch of one matrix of rows; one piece, ``(B F, D)``. Sequences are
    not pooled: the piece has the row of each lookup, ``(N, D)``."""

    index: PoolingIndex
    size: int | None
    """Samples of the micro-batch; ``None`` if every feature has its own batch size."""
    num_features: int

    def scales(self, weights_N: Tensor | None, are_new: bool) -> Tensor | None:
        index = self.index
        if not index.has_pooling:
            return None
        if weights_N is not None:
            assert index.source_N is not None, "the batch came without weights"
            weights_N = weights_N.float().index_select(0, index.source_N)
        return mean_weights(weights_N, index.bag_offsets_S1, index.mean_S, index.num_lookups)

    def pool(self, rows_RD: Tensor, scales_N: Tensor | None) -> list[Tensor]:
        return [pool_rows(rows_RD, scales_N, self.index)]

    def columns(self, pieces: list[Tensor]) -> list[Tensor]:
        (pooled,) = pieces
        if not self.index.has_pooling:
            return pieces
        # (S, D) is ordered by sample, then feature
        shape = (-1,) if self.size is None else (self.size, self.num_features * pooled.size(1))
        return [pooled.view(shape)]

    def gradients(self, grads: Sequence[Tensor], scales_N: Tensor | None) -> Tensor:
        return gradient_of_rows(grads[0], scales_N, self.index)

    def gradient_of_scales(self, grads: Sequence[Tensor], rows_RD: Tensor) -> Tensor:
        return gradient_of_weights(grads[0], rows_RD, self.index)

    def add_gradients(self, sums_RD: Tensor, grads_nD: Tensor) -> None:
        assert self.index.gradient_position_U is not None, "one micro-batch needs no sums"
        # A row that several micro-batches use is summed here, at its position in request order.
        sums_RD.index_add_(0, self.index.gradient_position_U, grads_nD)


def _by_chunk(
    sent: Tensor, sent_by: ExchangeSplits, received: Tensor, received_by: ExchangeSplits
) -> Iterator[Payload]:
    """Splits the vectors of one pack into their chunks, a payload each."""
    for chunk, (sent_W, received_W) in enumerate(zip(sent_by.counts_EW, received_by.counts_EW)):
        into = received[received_by.slice_of(chunk)]
        yield Payload(sent[sent_by.slice_of(chunk)], sent_W, into, received_W)
