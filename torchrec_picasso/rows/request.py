"""How a rank asks for the rows of a batch, up to where each row will lie.

Everything here is about ids and runs ahead of the step that needs the rows; its result is a
:class:`RowLayout`, which says all that fetches, gradients and the update have to know.

Rows of the next batch that this one does not update are clean: they may be fetched before this
one's update. The home of a row knows whether it is, from the requests of both batches, and tells
the rank that asked. So looking ahead changes when a row travels, never what it holds.

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
    """The request for the rows of one batch; its methods are called once each, in order.

    Collective where it says so: on all ranks in the same order. The header leaves at construction.
    Wait for it until :meth:`lay_out`, keep it until the next batch's :meth:`send_marks`.

    Args:
        group: The tables that are asked.
        batch: The batch made unique.
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
        """Ends the header and asks the homes for all cold rows. Collective.

        Returns:
            Whether any rank has data. When none has, nothing is sent and the step ends here.

        Raises:
            InputError: On all ranks, if any rank's ids, weights or lengths are bad.
        """
        group, batch = self._group, self._batch
        self._header = header = self._header_exchange.wait()
        if not header.any_data:
            return False
        raise_on_bad_input(header, group.tables, batch, rank=group.ranks.rank)
        self._mine_P = list(map(Exchanges, header.mine_PKW))
        self._asked_P = list(map(Exchanges, header.asked_PKW))
        dtype = group.row_dtype
        of_bags: Sequence[Freight] = ()
        if batch.bag_ids is not None:
            sizes_K = [size for size in batch.cut.sizes_K if size is not None]
            self._bags = BagRequest(group, batch.bag_ids, sizes_K, header.bag_words_WX)
            of_bags = self._bags.freight(dtype)
        # target_U is pack-major, hot rows first: [hot, cold] of each pack
        counts = [n for h, mine in zip(header.hot_P, self._mine_P) for n in (h, mine.num_rows)]
        parts = batch.located.target_U.split(counts)
        starts_P = group.hot.start_P1
        self._hot_slots_P = [s - start if start else s for s, start in zip(parts[::2], starts_P)]
        self._asked_rows_P = [self._one_for_each(asked, dtype) for asked in self._asked_P]
        self._ids = PackedAllToAll(
            group.ranks,
            [
                *_by_chunk([cold.to(dtype) for cold in parts[1::2]], self._mine_P),
                *(freight.sent for freight in of_bags),
            ],
            [*_pairs(header.mine_PKW), *(freight.sent_W for freight in of_bags)],
            [
                *_by_chunk(self._asked_rows_P, self._asked_P),
                *(freight.received for freight in of_bags),
            ],
            [*_pairs(header.asked_PKW), *(freight.received_W for freight in of_bags)],
        )
        return True

    @property
    def any_looks_up_nothing(self) -> bool:
        """Whether any rank's batch has no lookup; known once ids are sent, the same on all."""
        return self._header.any_looks_up_nothing

    def receive_ids(self) -> None:
        """Ends the ids exchange: homes know which rows they are asked for."""
        self._ids.wait()

    def send_marks(self, before: RowRequest) -> None:
        """Tells every rank which of its rows the batch before updates here. Collective.

        Of bags there is nothing to tell: all wait for the update.
        """
        if not self._mine_P:
            return
        dtype = torch.uint8
        storages = self._group.row_storages
        self._dirty_asked_P = [
            storage.which_are_among(rows, updated).to(dtype)
            for storage, rows, updated in zip(storages, self._asked_rows_P, before._asked_rows_P)
        ]
        self._dirty_mine_P = [self._one_for_each(mine, dtype) for mine in self._mine_P]
        self._marks = PackedAllToAll(
            self._group.ranks,
            _by_chunk(self._dirty_asked_P, self._asked_P),
            _pairs(self._header.asked_PKW),
            _by_chunk(self._dirty_mine_P, self._mine_P),
            _pairs(self._header.mine_PKW),
        )

    def lay_out(self) -> RowLayout:
        """Gives every row its place; ends the marks. Where none were sent, all rows are dirty."""
        batch, header = self._batch, self._header
        if self._marks is not None:
            self._marks.wait()
        plan, cut = self._group.plan, batch.cut
        packs = self._row_packs()
        rows_M = [sum(pack.num_rows for pack in packs[of]) for of in self._row_matrices()]
        lookups_MKJ = cut.by_part(header.lookups_J)
        pooling_KM: list[list[PartPooling | PartBags]] = [[] for _ in cut.sizes_K]
        if packs:
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
            pooling_KM = [list(of_part) for of_part in pooled_KM]
        if self._bags is not None:
            packs += self._bags.pack_layouts()
            rows_M += [pack.num_rows for pack in packs[len(self._mine_P) :]]
            for of_part, bags in zip(pooling_KM, self._bags.parts()):
                of_part += bags
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
        """Packs of rows, in fetch order as far as marks have come."""
        mine_P = _fetch_orders(self._mine_P, self._dirty_mine_P)
        asked_P = _fetch_orders(self._asked_P, self._dirty_asked_P)
        storages = self._group.row_storages
        rows_P = [hot + mine.num_rows for hot, mine in zip(self._header.hot_P, self._mine_P)]
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
        """An empty vector with room for each of some rows."""
        return self._batch.located.target_U.new_empty(exchanges.num_rows, dtype=dtype)


def laid_out_again(group: RowGroup, layout: RowLayout) -> RowLayout:
    """A batch of one part, laid out anew because other rows are hot since. Collective.

    Args:
        group: The tables.
        layout: Of the batch, by the hot set before.
    """
    with torch.no_grad():
        request = RowRequest(group, BatchIds.read(layout.features_of, group))
        request.send_ids()
        request.receive_ids()
        return request.lay_out()


def _fetch_orders(exchanges_P: Sequence[Exchanges], dirty_P: Sequence[Tensor]) -> list[FetchOrder]:
    """The fetch order of each pack; without marks all rows are dirty."""
    if not dirty_P:
        return [find_fetch_order(exchanges.counts_EW, None) for exchanges in exchanges_P]
    return [find_fetch_order(e.counts_EW, marks.bool()) for e, marks in zip(exchanges_P, dirty_P)]


def _pairs(counts_PKW: Sequence[Sequence[list[int]]]) -> list[list[int]]:
    """Counts by (pack, chunk): to an exchange of several chunks each is a pack."""
    return [counts_W for counts_KW in counts_PKW for counts_W in counts_KW]


def _by_chunk(values_P: Sequence[Tensor], exchanges_P: Sequence[Exchanges]) -> list[Tensor]:
    """Cuts each pack's vector into its chunks."""
    return [
        values[exchanges.rows(chunk)]
        for values, exchanges in zip(values_P, exchanges_P)
        for chunk in range(len(exchanges.counts_EW))
    ]
