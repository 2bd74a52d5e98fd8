"""Requests the rows of a batch from their home ranks and computes the layout of the rows.

All operations here concern ids and run ahead of the step that needs the rows. The result is a
:class:`RowLayout`, which contains everything that fetches, gradients and the update need.

Rows of the next batch that this batch does not update are clean: they may be fetched before this
batch's update. The home rank of a row knows from the requests of both batches whether the row is
clean, and reports it to the requesting rank. So lookahead changes when a row is sent, never its
values.

Shape letters: K parts and chunks, P packs, M matrices, W ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from torchrec_picasso.exchange.header import Header, HeaderExchange
from torchrec_picasso.exchange.packed_all_to_all import PackedAllToAll
from torchrec_picasso.ops.bag_pack import PartBags
from torchrec_picasso.ops.fetch_order import Exchanges, FetchOrder, find_fetch_order
from torchrec_picasso.ops.part_pooling import PartPooling, cut_pooling
from torchrec_picasso.ops.places import fetch_places
from torchrec_picasso.rows.asked import AskedRows
from torchrec_picasso.rows.bad_input import raise_on_bad_input
from torchrec_picasso.rows.bag_request import BagRequest, Freight
from torchrec_picasso.rows.batch_ids import BatchIds
from torchrec_picasso.rows.group import RowGroup
from torchrec_picasso.rows.layout import PackLayout, RowLayout

__all__ = ["RowRequest", "laid_out_again"]


class RowRequest:
    """The request for the rows of one batch; each method is called once, in order.

    Methods marked as collective must run on all ranks in the same order. Construction sends the
    header. The object must be kept until the next batch's :meth:`send_marks`.

    Args:
        group: The requested tables.
        batch: The batch's unique rows.
    """

    _header: Header
    _ids: PackedAllToAll

    def __init__(self, group: RowGroup, batch: BatchIds) -> None:
        self._group = group
        self._batch = batch
        self._header_exchange = HeaderExchange(group.ranks, batch.words)
        self._hot_slots_P: list[Tensor] = []
        self._mine_P: list[Exchanges] = []
        self._asked_P: list[Exchanges] = []
        self._asked_rows_P: list[Tensor] = []
        self._bags: BagRequest | None = None
        self._marks: PackedAllToAll | None = None
        self._dirty_mine_P: Sequence[Tensor] = ()
        self._dirty_asked_P: Sequence[Tensor] = ()

    def send_ids(self) -> bool:
        """Waits for the header and sends all cold row ids to their home ranks. Collective.

        Returns:
            Whether any rank has data. If none has, nothing is sent and the step ends here.

        Raises:
            InputError: On all ranks, if any rank's ids, weights or lengths are invalid.
        """
        group, batch = self._group, self._batch
        self._header = header = self._header_exchange.wait()
        if not header.any_data:
            return False
        raise_on_bad_input(header, group.tables, batch, rank=group.ranks.rank)
        self._mine_P = list(map(Exchanges, header.mine_PKW))
        self._asked_P = list(map(Exchanges, header.asked_PKW))
        dtype = group.row_dtype
        bag_payloads: Sequence[Freight] = ()
        if batch.bag_ids is not None:
            sizes_K = [size for size in batch.cut.sizes_K if size is not None]
            self._bags = BagRequest(group, batch.bag_ids, sizes_K, header.bag_words_WX)
            bag_payloads = self._bags.freight(dtype)
        # target_U is ordered by pack, hot rows first: split it into [hot, cold] of each pack.
        counts = [n for h, mine in zip(header.hot_P, self._mine_P) for n in (h, mine.num_rows)]
        parts = batch.located.target_U.split(counts)
        starts_P = group.hot.start_P1
        # Slots count from 0 in each pack, because a storage keeps the replicas of one pack.
        self._hot_slots_P = [s - start if start else s for s, start in zip(parts[::2], starts_P)]
        self._asked_rows_P = [self._one_for_each(asked, dtype) for asked in self._asked_P]
        # Row ids by (pack, chunk) and the payloads of owner-pooled packs share one exchange.
        self._ids = PackedAllToAll(
            group.ranks,
            [
                *_by_chunk([cold.to(dtype) for cold in parts[1::2]], self._mine_P),
                *(payload.sent for payload in bag_payloads),
            ],
            [*_pairs(header.mine_PKW), *(payload.sent_W for payload in bag_payloads)],
            [
                *_by_chunk(self._asked_rows_P, self._asked_P),
                *(payload.received for payload in bag_payloads),
            ],
            [*_pairs(header.asked_PKW), *(payload.received_W for payload in bag_payloads)],
        )
        return True

    @property
    def any_looks_up_nothing(self) -> bool:
        """Whether any rank's batch has no lookup, equal on all ranks; valid after
        :meth:`send_ids`."""
        return self._header.any_looks_up_nothing

    def receive_ids(self) -> None:
        """Waits for the ids: after it the home ranks know the requested rows."""
        self._ids.wait()

    def send_marks(self, before: RowRequest) -> None:
        """Sends the dirty mask: the rows of this request that the batch before updates. Collective.

        Owner-pooled bags need no mask: all of them wait for the update.

        Args:
            before: Request of the batch before.
        """
        if not self._mine_P:
            return
        dtype = torch.uint8
        storages = self._group.row_storages
        # One uint8 per incoming row of the pack: whether the batch before requested the same row.
        self._dirty_asked_P = [
            storage.which_are_among(rows, updated).to(dtype)
            for storage, rows, updated in zip(storages, self._asked_rows_P, before._asked_rows_P)
        ]
        self._dirty_mine_P = [self._one_for_each(mine, dtype) for mine in self._mine_P]
        # The mask travels back along the ids: incoming counts are sent, outgoing ones received.
        self._marks = PackedAllToAll(
            self._group.ranks,
            _by_chunk(self._dirty_asked_P, self._asked_P),
            _pairs(self._header.asked_PKW),
            _by_chunk(self._dirty_mine_P, self._mine_P),
            _pairs(self._header.mine_PKW),
        )

    def lay_out(self) -> RowLayout:
        """Builds the layout; waits for the dirty mask. Without a mask, all rows are dirty."""
        batch, header = self._batch, self._header
        if self._marks is not None:
            self._marks.wait()
        plan, cut = self._group.plan, batch.cut
        packs = self._row_packs()
        rows_M = [sum(pack.num_rows for pack in packs[matrix]) for matrix in self._row_matrices()]
        lookups_MKJ = cut.by_part(header.lookups_J)
        pooling_KM: list[list[PartPooling | PartBags]] = [[] for _ in cut.sizes_K]
        if packs:
            # Lookups are summed over the runs of a micro-batch: cut_pooling sees whole
            # micro-batches.
            pooled_KM = cut_pooling(
                batch.bags,
                batch.rows,
                batch.located,
                fetch_places(batch.located, header.hot_P, [pack.mine_by_fetch for pack in packs]),
                part_N=batch.part_N,
                bags_MK=cut.bags_by_part,
                lookups_MK=[[sum(runs) for runs in runs_K] for runs_K in lookups_MKJ],
                rows_M=rows_M,
                mean_MK=cut.mean_MK,
                is_sequence_M=plan.is_sequence_M[: len(rows_M)],
            )
            pooling_KM = [list(pooling_M) for pooling_M in pooled_KM]
        if self._bags is not None:
            # Owner-pooled packs follow the row packs, in packs, matrices and pooling.
            packs += self._bags.pack_layouts()
            rows_M += [pack.num_rows for pack in packs[len(self._mine_P) :]]
            for pooling_M, bags in zip(pooling_KM, self._bags.parts()):
                pooling_M += bags
        return RowLayout(
            features_of=batch.features_of,
            sizes_K=cut.sizes_K,
            hot_epoch=batch.hot_epoch,
            packs=packs,
            rows_M=rows_M,
            pooling_KM=pooling_KM,
            lookups_MKJ=lookups_MKJ,
            source_N=batch.bags.source_N,
            weights_N=batch.weights_N,
            weights_left=batch.bag_ids is not None and batch.weights_N is not None,
        )

    def _row_matrices(self) -> Sequence[slice]:
        return self._group.plan.matrices[: self._group.plan.num_row_matrices]

    def _row_packs(self) -> list[PackLayout]:
        """Returns the layouts of the row packs, in fetch order if the dirty mask is known."""
        mine_P = _fetch_orders(self._mine_P, self._dirty_mine_P)
        asked_P = _fetch_orders(self._asked_P, self._dirty_asked_P)
        storages = self._group.row_storages
        rows_P = [hot + mine.num_rows for hot, mine in zip(self._header.hot_P, self._mine_P)]
        # Packs of one matrix follow each other: start = rows of the packs before it in the matrix.
        return [
            PackLayout(
                matrix=matrix,
                start=start,
                hot_slots=self._hot_slots_P[pack],
                touched=storages[pack].touched(self._header.touched_P[pack]),
                mine=self._mine_P[pack],
                mine_by_fetch=mine_P[pack],
                asked=self._asked_P[pack],
                source=AskedRows.of(self._asked_rows_P[pack], asked_P[pack]),
            )
            for matrix, packs in enumerate(self._row_matrices())
            for pack, start in zip(
                range(packs.start, packs.stop), accumulate(rows_P[packs], initial=0)
            )
        ]

    def _one_for_each(self, exchanges: Exchanges, dtype: torch.dtype) -> Tensor:
        """Allocates an uninitialized vector with one element per row of the exchanges."""
        return self._batch.located.target_U.new_empty(exchanges.num_rows, dtype=dtype)


def laid_out_again(group: RowGroup, layout: RowLayout) -> RowLayout:
    """Rebuilds the layout of a batch with one micro-batch after the hot rows changed. Collective.

    Args:
        group: The tables.
        layout: Layout of the batch with the previous hot set.
    """
    with torch.no_grad():
        request = RowRequest(group, BatchIds.read(layout.features_of, group))
        request.send_ids()
        request.receive_ids()
        return request.lay_out()


def _fetch_orders(exchanges_P: Sequence[Exchanges], dirty_P: Sequence[Tensor]) -> list[FetchOrder]:
    """Returns the fetch order of each pack; without a dirty mask all rows are dirty."""
    if not dirty_P:
        return [find_fetch_order(exchanges.counts_EW, None) for exchanges in exchanges_P]
    return [find_fetch_order(e.counts_EW, dirty.bool()) for e, dirty in zip(exchanges_P, dirty_P)]


def _pairs(counts_PKW: Sequence[Sequence[list[int]]]) -> list[list[int]]:
    """Flattens counts by (pack, chunk): an exchange of several chunks has a "pack" per chunk."""
    return [counts_W for counts_KW in counts_PKW for counts_W in counts_KW]


def _by_chunk(values_P: Sequence[Tensor], exchanges_P: Sequence[Exchanges]) -> list[Tensor]:
    """Splits each pack's vector into its chunks."""
    return [
        values[exchanges.rows(chunk)]
        for values, exchanges in zip(values_P, exchanges_P)
        for chunk in range(len(exchanges.counts_EW))
    ]
