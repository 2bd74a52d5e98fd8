"""The row exchange: each distinct row travels once and is pooled on the rank that looked it up.

The home rank of a row knows from the requests of two batches whether the row is clean, and reports
it to the requesting rank. So lookahead changes when a row is sent, never its values.

Header words of a pair of ranks: P K counts of cold rows, and bits of hot slots. Each rank unites
all ranks' bits; or, if this is fewer bytes, those of a W-th of the slots, and sends the union to
all ranks with its row numbers: two bits a slot, however many ranks there are.

Shape letters: B samples, D dim, F features, K micro-batches and chunks, J segments of bags, M
matrices, N lookups, P packs, R rows of a matrix, S bags, U unique rows, W ranks, X words of a
header or of bits; n rows.

Host syncs per batch on CUDA: with lookahead or many hot rows one, for fetch orders and bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_picasso.exchange.header import ReceivedWords, RouteWords
from torchrec_picasso.exchange.packed import Payload, with_all_chunks
from torchrec_picasso.ops.bags import (
    BatchCut,
    LookupGroups,
    cut_pooling,
    group_by_micro_batch,
    micro_batch_of_lookup,
    segment_edges,
)
from torchrec_picasso.ops.id_reader import IdReader, PreparedIds, ReadIds
from torchrec_picasso.ops.ids import IdSpace
from torchrec_picasso.ops.pack_plan import PackPlan
from torchrec_picasso.ops.row_order import (
    ExchangeSplits,
    FetchOrders,
    LocatedRows,
    RowRanges,
    by_pack,
    fetch_positions,
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
from torchrec_picasso.ops.streams import tensors_in
from torchrec_picasso.rows.route import (
    IncomingRequests,
    PackLayout,
    Pooling,
    Relay,
    Route,
    RouteLayout,
    RouteRequest,
)
from torchrec_picasso.storage.row_storage import HotHomes, RowStorage, TouchedHot


class RowRoute(Route):
    """Tables whose distinct rows travel. Arguments as for :class:`Route`."""

    name = "rows"
    reads_unique_rows = True

    def __post_init__(self) -> None:
        super().__post_init__()
        # Waves of the placement, and a matrix for neighbouring packs of one dim.
        self.plan = PackPlan.build(self.tables, self.device)
        self._reader = IdReader(self.space, self.plan)
        self.row_ranges = RowRanges.build(self._request_space(), self.hot)
        rank = self.ranks.rank
        *self.first_rows_P, self._num_home_rows = accumulate(
            (rows_W[rank] for rows_W in self.space.home_rows_PW), initial=0
        )
        """First home row of each pack among those of all packs on this rank."""
        self._marked: Tensor | None = None  # by home row; all 0 between calls of mark_among

    def _request_space(self) -> IdSpace:
        """Returns the id space with home ranks numbered in request order: here as they are."""
        return self.space

    def change_hot_rows(self, hot_rows_T: Sequence[Tensor], epoch: int | None = None) -> None:
        """Sets the hot rows, as :meth:`.Route.change_hot_rows`, and where rows are stored."""
        super().change_hot_rows(hot_rows_T, epoch)
        self.row_ranges = RowRanges.build(self._request_space(), self.hot)

    def tensors_of_hot_set(self) -> Iterator[Tensor]:
        """Yields the tensors by which requests find where a row is stored."""
        yield from tensors_in(self.row_ranges)

    def mark_among(self, rows_n: Tensor, others_m: Tensor, out_n: Tensor) -> None:
        """Marks with 1, else 0, which home rows are among others, int64, both counted over all
        packs. O(n + m) time; one byte per home row is kept."""
        if self._marked is None:
            self._marked = torch.zeros(self._num_home_rows, dtype=torch.uint8, device=self.device)
        # Set m flags, read n flags, clear the m flags: no sort, and no pass over all home rows.
        self._marked.index_fill_(0, others_m, 1)
        torch.index_select(self._marked, 0, rows_n, out=out_n)
        self._marked.index_fill_(0, others_m, 0)

    def by_rank(self, counts_WX: Tensor) -> Tensor:
        """Returns an entry per home rank in the order of ranks, from that of requests."""
        return counts_WX

    def read(
        self,
        features: KeyedJaggedTensor,
        sizes_K: Sequence[int | None],
        prepared: PreparedIds | None = None,
    ) -> RowRouteRequest:
        """Finds the unique rows of a batch, and puts them in request order."""
        given = (features, sizes_K, features.weights_or_none() is not None)
        if prepared is not None and not self._reader.can_use(prepared, *given):
            prepared = None
        ids = self._reader.read(*given) if prepared is None else prepared.split()
        rows, num_lookups = ids.rows, features.values().numel()
        cut = BatchCut.from_strides(features.stride_per_key(), sizes_K, self.plan)
        edges_J1 = segment_edges(ids.bags.offsets_S1, cut.bags_by_segment)
        groups = chunk_U = None
        # With one micro-batch all rows are in chunk 0, so no chunk has to be computed.
        if cut.num_micro_batches > 1:
            micro_batch_N = micro_batch_of_lookup(edges_J1, cut.micro_batch_by_segment, num_lookups)
            chunk_U = first_use_chunks(rows, micro_batch_N, cut.num_micro_batches)
            groups = group_by_micro_batch(rows, micro_batch_N, edges_J1, cut)
        located = locate_rows(rows.ids_U, self.row_ranges, chunk_U, cut.num_micro_batches)
        # for rank w: P K counts, from (P K, W) transposed
        counts_WX = self.by_rank(located.counts_PQ[:, 1:].reshape(-1, self.space.world_size).t())
        # Numbers that the host needs come with the header, which it waits for in any case.
        bits_X = located.used_bits_X
        host_numbers = [located.counts_PQ.reshape(-1), edges_J1, bits_X]
        size = self.ranks.size
        if self.row_ranges.num_parts == 1:
            bits_WX = bits_X.expand(size, -1)  # each rank gets all
        else:
            bits_WX = bits_X.view(size, -1)  # a part each
        if groups is not None:
            host_numbers.append(groups.counts)
        if num_lookups and edges_J1.device.type != "cpu":
            host_numbers.append(rows.counts.max().view(1))  # for sums in pieces, on an accelerator
        return self._request(
            words=RouteWords([counts_WX, bits_WX], host_numbers),
            outside_ids=ids.outside_ids,
            is_prepared=prepared is not None,
            route=self,
            sizes_K=sizes_K,
            cut=cut,
            ids=ids,
            located=located,
            groups=groups,
        )

    def _request(self, **fields: Any) -> RowRouteRequest:
        return RowRouteRequest(**fields)


@dataclass(kw_only=True)
class RowRouteRequest(RouteRequest):
    """The request of this route for one batch; :class:`.RowRequest` joins those of all routes.

    Served rows, the dirty mask and the fetch order are one vector each, by pack, chunk and rank, so
    that a step over them is one operator; packs are views.
    """

    route: RowRoute
    sizes_K: Sequence[int | None]
    cut: BatchCut
    ids: ReadIds
    located: LocatedRows
    """The unique rows in request order."""
    groups: LookupGroups | None
    """Lookups by micro-batch and row; ``None`` = there is one micro-batch."""
    _groups_KM: Sequence[Sequence[int]] = ()
    """Number of these groups."""
    _lookups_MKJ: Sequence[Sequence[Sequence[int]]] = field(init=False)
    """Number of lookups of each segment."""
    _most_lookups: int = field(init=False)
    """Most lookups of a row; 0 on the CPU."""
    _used_P: Sequence[np.ndarray] = field(init=False)
    """Hot slots that this rank's batch uses, counted from 0 in the pack."""
    _touched_X: np.ndarray = field(init=False)
    """Bits of the hot slots that this rank unites: whether any rank's batch uses one, int64."""
    _parts_X: Tensor | None = None
    """The same of all slots, which arrive with row numbers; ``None`` = this rank unites all."""
    _wanted_P: Sequence[ExchangeSplits] = field(init=False)
    """The split of wanted rows in request order; in ``_served_P`` that of served rows."""
    _served_P: Sequence[ExchangeSplits] = field(init=False)
    _served_n: Tensor = field(init=False)
    """Row numbers of served rows; filled once these have arrived."""
    _dirty_n: Tensor | None = None
    """Whether wanted rows, then served rows, are dirty, uint8; ``None`` = all are."""

    def row_number_payloads(self, words: ReceivedWords, dtype: torch.dtype) -> list[Payload]:
        """Reads the counts of rows, and returns row numbers by chunk."""
        # In the pieces that RowRoute.read made.
        (counts_WX, bits_WX), (counts_n, edges_J1, used_bits_X, *others) = words
        if self.groups is not None:
            self._groups_KM = others.pop(0).reshape(len(self.sizes_K), -1).tolist()
        self._most_lookups = int(others[0][0]) if others else 0
        self.located = located = self.located.first(int(counts_n.sum()))
        own_PQ = counts_n.reshape(located.counts_PQ.shape)
        num_packs = len(own_PQ)
        wanted_PKW, served_PKW = self._counts(
            own_PQ[:, 1:].reshape(num_packs, -1, self.route.space.world_size), counts_WX
        )
        self._lookups_MKJ = self.cut.by_micro_batch(np.diff(edges_J1).tolist())
        # storage_row_U is ordered by pack, hot rows first: split it into [hot, cold] of each pack.
        nums = [num for hot, *cold_KW in own_PQ.tolist() for num in (hot, sum(cold_KW))]
        wanted_n = located.storage_row_U.to(dtype)
        self._used_P = self.route.hot.by_pack(used_bits_X)
        self._wanted_P = [ExchangeSplits(wanted_KW) for wanted_KW in wanted_PKW.tolist()]
        self._served_P = [ExchangeSplits(served_KW) for served_KW in served_PKW.tolist()]
        self._served_n = wanted_n.new_empty(int(served_PKW.sum()))
        served_P = by_pack(self._served_n, self._served_P)
        payloads = with_all_chunks(
            wanted_n.split(nums)[1::2], self._wanted_P, served_P, self._served_P
        )
        # those of this rank's part; words that a relay passes on follow
        self._touched_X = np.bitwise_or.reduce(bits_WX[: self.route.ranks.size])
        return payloads + self._touched_payloads(wanted_PKW.shape[-1], dtype)

    def _touched_payloads(self, num_ranks: int, dtype: torch.dtype) -> list[Payload]:
        """Returns the bits of the parts that this rank has, for the ranks of an exchange that have
        others, as integers of the wire; nothing if it has all."""
        if self._touched_X.size == self.located.used_bits_X.numel():
            return []
        own_X = self._parts_X
        if own_X is None:  # a relay passes on the parts that it has
            own_X = torch.from_numpy(self._touched_X).to(self.route.device, non_blocking=True)
        self._parts_X = own_X.new_empty(num_ranks * own_X.numel())
        sent_n, received_n = own_X.view(dtype).repeat(num_ranks), self._parts_X.view(dtype)
        each = [len(sent_n) // num_ranks] * num_ranks
        return [Payload(sent_n, each, received_n, each)]

    def _counts(
        self, own_PKW: np.ndarray, received_WX: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns how many rows this rank wants and serves, by pack, chunk and other rank, from its
        own counts and those in the header words."""
        # From (W, P K) by sender to (P, K, W).
        return own_PKW, received_WX.T.reshape(own_PKW.shape)

    def _asked_of_homes(self) -> Sequence[ExchangeSplits]:
        """Returns the rows that this rank asks home ranks for, in request order."""
        return self._wanted_P

    @cached_property
    def _served_here_n(self) -> Tensor:
        """Row numbers of served rows, counted over all packs of this rank, int64."""
        rows_n = self._served_n.to(torch.int64, copy=True)
        if len(self._served_P) > 1:
            torch._foreach_add_(by_pack(rows_n, self._served_P), self.route.first_rows_P)
        return rows_n

    def dirty_mask_payloads(self, before: RowRouteRequest) -> list[Payload]:
        """Returns one uint8 per served row: whether the batch before requested the same row. The
        mask goes to the ranks that asked."""
        asked_P = self._asked_of_homes()
        num_wanted = sum(rows.num_rows for rows in asked_P)
        num_served = self._served_n.numel()
        self._dirty_n = self._served_n.new_empty(num_wanted + num_served, dtype=torch.uint8)
        wanted_n, served_n = self._dirty_n.split([num_wanted, num_served])
        self.route.mark_among(self._served_here_n, before._served_here_n, served_n)
        sent_P, received_P = by_pack(served_n, self._served_P), by_pack(wanted_n, asked_P)
        return with_all_chunks(sent_P, self._served_P, received_P, asked_P)

    def lookups_by_home(self) -> Tensor:
        """Counts this rank's lookups of cold rows by home rank, int64, ``(W,)``."""
        counts_PQ, world_size = self.located.counts_PQ, self.route.space.world_size
        lookups_U = self.ids.rows.counts.index_select(0, self.located.order_U)
        # request order is by pack and segment: differences of sums up to the segments' ends
        sums_U1 = pad(lookups_U.cumsum(0), (1, 0))
        ends_PQ = sums_U1.index_select(0, counts_PQ.flatten().cumsum(0))
        lookups_PQ = torch.diff(ends_PQ, prepend=sums_U1[:1]).view_as(counts_PQ)
        return self.route.by_rank(lookups_PQ[:, 1:].reshape(-1, world_size).sum(0))

    def build_layout(self, first_matrix: int) -> RouteLayout:
        """Builds the layout in fetch order."""
        orders, relay_P = self._find_orders()
        packs, num_rows_M = self._pack_layouts(first_matrix, orders, relay_P)
        nums_P = [(pack.used.slots_h.numel(), pack.wanted.num_rows) for pack in packs]
        # Lookups are summed over a micro-batch's segments: cut_pooling sees whole micro-batches.
        index_KM = cut_pooling(
            self.ids.bags,
            self.ids.rows,
            self.located,
            fetch_positions(self.located, orders.wanted_order_n, nums_P),
            self.cut,
            groups=self.groups,
            groups_KM=self._groups_KM,
            lookups_MK=[[sum(lookups_J) for lookups_J in row] for row in self._lookups_MKJ],
            num_rows_M=num_rows_M,
            most_lookups=self._most_lookups,
        )
        features_M = self.route.plan.features_M
        pooling_KM: list[list[Pooling]] = [
            [
                RowPooling(index=index, size=size, num_features=num, lookups_F=lookups_KJ[k])
                for index, num, lookups_KJ in zip(index_M, features_M, self._lookups_MKJ)
            ]
            for k, (index_M, size) in enumerate(zip(index_KM, self.sizes_K))
        ]
        return packs, pooling_KM

    def _find_orders(self) -> tuple[FetchOrders, Sequence[Relay | None]]:
        """Returns the fetch orders of wanted and served rows, and what is relayed, by pack."""
        orders = FetchOrders.find(self._wanted_P, self._served_P, self._dirty_n, self._parts_X)
        return orders, [None] * len(self._wanted_P)

    def _incoming_rows(self, orders: FetchOrders) -> list[IncomingRequests]:
        """Returns the requests for home rows, by pack."""
        numbers_by_fetch_n = self._served_n
        if orders.served_order_n is not None:
            numbers_by_fetch_n = self._served_n.index_select(0, orders.served_order_n)
        rows_P = by_pack(self._served_n, self._served_P)
        rows_by_fetch_P = by_pack(numbers_by_fetch_n, self._served_P)
        return [
            IncomingRows(
                home_row_numbers_n=rows, served_by_fetch=splits, row_numbers_by_fetch_n=by_fetch
            )
            for rows, splits, by_fetch in zip(rows_P, orders.served_P, rows_by_fetch_P)
        ]

    def _pack_layouts(
        self, first_matrix: int, orders: FetchOrders, relay_P: Sequence[Relay | None]
    ) -> tuple[list[PackLayout], list[int]]:
        """Builds the layout of each pack, and counts the rows of each matrix."""
        homes_P = [storage.hot_homes for storage in self.route.storages]
        touched_X = self._touched_X if orders.host_numbers is None else orders.host_numbers
        touched_P = self.route.hot.by_pack(touched_X)
        hot_P = HotHomes.find_own(homes_P, touched_P, self._used_P)
        incoming_P = self._incoming_rows(orders)
        packs: list[PackLayout] = []
        num_rows_M: list[int] = []
        for matrix, packs_of_matrix in enumerate(self.route.plan.matrices):
            start = 0  # packs of one matrix follow each other
            for p in range(packs_of_matrix.start, packs_of_matrix.stop):
                pack = PackLayout(
                    matrix=first_matrix + matrix,
                    start=start,
                    used=hot_P[p][0],
                    touched=hot_P[p][1],
                    wanted=self._wanted_P[p],
                    wanted_by_fetch=orders.wanted_P[p],
                    served=self._served_P[p],
                    requests=incoming_P[p],
                    relay=relay_P[p],
                )
                packs.append(pack)
                start += pack.num_rows
            num_rows_M.append(start)
        return packs, num_rows_M


@dataclass(frozen=True, kw_only=True)
class IncomingRows(IncomingRequests):
    """Incoming requests for home rows in request order, each read for every requesting rank."""

    sends_rows = True

    row_numbers_by_fetch_n: Tensor
    """Home rows in fetch order."""

    @cached_property
    def _by_exchange(self) -> Sequence[Tensor]:
        return self.row_numbers_by_fetch_n.split(self.served_by_fetch.sizes)

    @staticmethod
    def joined(batches: Sequence[IncomingRows]) -> IncomingRows:
        """Merges the requests of several batches for their update."""
        rows_n = torch.cat([incoming.home_row_numbers_n for incoming in batches])
        whole = ExchangeSplits([[rows_n.numel()]])
        return IncomingRows(
            home_row_numbers_n=rows_n, served_by_fetch=whole, row_numbers_by_fetch_n=rows_n
        )

    def read(self, storage: RowStorage, exchange: int) -> Tensor:
        """Returns the rows of one exchange, by destination rank: float32, ``(n, D)``."""
        return storage.gather(self._by_exchange[exchange])

    def update(self, storage: RowStorage, touched: TouchedHot, grads_mD: Tensor) -> None:
        """Updates every row once, and the touched hot rows."""
        storage.update(self.home_row_numbers_n, touched, grads_mD)


@dataclass(frozen=True, kw_only=True)
class RowPooling(Pooling):
    """The pooling of one micro-batch of one matrix of rows; one piece, ``(B F, D)``. Sequences are
    not pooled: the piece has the row of each lookup, ``(N, D)``."""

    index: PoolingIndex
    size: int | None
    """Samples of the micro-batch; ``None`` if every feature has its own batch size."""
    num_features: int

    def scales(self, weights_N: Tensor | None, are_new: bool) -> Tensor | None:
        """Returns the factor of each lookup, from weights of any time."""
        index = self.index
        if not index.has_pooling:
            return None
        if weights_N is not None:
            assert index.source_N is not None, "the batch came without weights"
            weights_N = weights_N.float().index_select(0, index.source_N)
        return mean_weights(weights_N, index.bag_offsets_S1, index.mean_S, index.num_lookups)

    def pool(self, rows_RD: Tensor, scales_N: Tensor | None) -> list[Tensor]:
        """Pools rows into bags: one piece."""
        return [pool_rows(rows_RD, scales_N, self.index)]

    def columns(self, pieces: list[Tensor]) -> list[Tensor]:
        """Reshapes the piece to ``(B, F D)``; sequences stay."""
        (pooled,) = pieces
        if not self.index.has_pooling:
            return pieces
        # (S, D) is ordered by sample, then feature
        shape = (-1,) if self.size is None else (self.size, self.num_features * pooled.size(1))
        return [pooled.view(shape)]

    def gradients(self, grads: Sequence[Tensor], scales_N: Tensor | None) -> Tensor:
        """Sums the gradients of the piece by row."""
        return gradient_of_rows(grads[0], scales_N, self.index)

    def gradient_of_scales(self, grads: Sequence[Tensor], rows_RD: Tensor) -> Tensor:
        """Computes the gradient of each lookup's factor."""
        return gradient_of_weights(grads[0], rows_RD, self.index)

    def add_gradients(self, sums_RD: Tensor, grads_nD: Tensor) -> None:
        """Adds a micro-batch's gradients to the sums."""
        assert self.index.gradient_position_U is not None, "one micro-batch needs no sums"
        # A row that several micro-batches use is summed here, at its position in request order.
        sums_RD.index_add_(0, self.index.gradient_position_U, grads_nD)
