"""How a rank asks for the rows of an interleaved batch, up to where each row will lie.

Everything here is about ids and runs ahead of the step that needs the rows; its result is a
:class:`RowLayout`, which says all that fetches, gradients and the update have to know.

Rows of the next batch that this one does not update are clean: they may be fetched before this
one's update. The home of a row knows whether it is, from the requests of both batches, and tells
the rank that asked. So looking ahead changes when a row travels, never what it holds.

Shape letters: K micro-batches and chunks, P packs, M matrices, W ranks, U unique rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor

from torchrec_picasso.exchange.header import StepHeader
from torchrec_picasso.exchange.packed_all_to_all import PackedAllToAll
from torchrec_picasso.ops.fetch_order import Exchanges, FetchOrder, find_fetch_order
from torchrec_picasso.ops.micro_pooling import cut_pooling
from torchrec_picasso.ops.packed_ids import PackedIdSpace
from torchrec_picasso.sharding.bad_input import raise_on_bad_input
from torchrec_picasso.sharding.chunked_batch import ChunkedBatch
from torchrec_picasso.sharding.row_layout import PackLayout, RowLayout
from torchrec_picasso.storage.row_storage import RowStorage

__all__ = ["RowRequest"]


class RowRequest:
    """The request for the rows of one batch; its methods are called once each, in order.

    Collective where it says so: on all ranks in the same order. Waited for until :meth:`lay_out`,
    kept until the next batch's :meth:`send_marks`.

    Args:
        pg: Process group.
        space: The packed id space of the module.
        storages: One per pack; they know which of their rows two batches share.
        batch: The batch, its header on the way.
    """

    _header: StepHeader
    _asked_rows_P: list[Tensor]
    _ids: PackedAllToAll

    def __init__(
        self,
        pg: dist.ProcessGroup,
        space: PackedIdSpace,
        storages: Sequence[RowStorage],
        batch: ChunkedBatch,
    ) -> None:
        self._pg = pg
        self._space = space
        self._storages = storages
        self._batch = batch
        self._marks: PackedAllToAll | None = None
        self._dirty_asked_P: Sequence[Tensor] = ()
        self._dirty_mine_P: Sequence[Tensor] = ()

    def send_ids(self) -> bool:
        """Ends the header and asks the homes for all cold rows. Collective.

        Returns:
            Whether any rank has data. When none has, nothing is sent and the step ends here.

        Raises:
            InputError: On all ranks, if any rank's ids or weights are bad.
        """
        batch, space, num_chunks = self._batch, self._space, len(self._batch.sizes_K)
        self._header = header = batch.header.wait()
        if not header.any_data:
            return False
        raise_on_bad_input(header, space, batch.features, rank=self._pg.rank())
        # (pack, chunk) pairs; hot rows stand in a pack's first
        counts = zip(header.hot_P, header.send_PW)
        parts = batch.located.target_U.split([n for h, send_W in counts for n in (h, sum(send_W))])
        hot_parts = parts[0 :: 2 * num_chunks]
        starts_P = space.hot_start_P1
        self._hot_slots_P = [slots - start for slots, start in zip(hot_parts, starts_P)]
        touched_P = header.touched_slots_T.split(_per_pack(header.touched_P, num_chunks))
        self._touched_slots_P = [slots - start for slots, start in zip(touched_P, starts_P)]
        self._mine_P = _per_pack_and_chunk(header.send_PW, num_chunks)
        self._asked_P = _per_pack_and_chunk(header.receive_PW, num_chunks)
        dtype = space.home_row_dtype
        self._asked_rows_P = [self._one_for_each(asked, dtype) for asked in self._asked_P]
        self._ids = PackedAllToAll(
            self._pg,
            [cold.to(dtype) for cold in parts[1::2]],
            header.send_PW,
            _by_chunk(self._asked_rows_P, self._asked_P),
            header.receive_PW,
        )
        return True

    def receive_ids(self) -> None:
        """Ends the ids exchange: homes know which rows they are asked for."""
        self._ids.wait()

    def send_marks(self, before: RowRequest) -> None:
        """Tells every rank which of its rows the batch before updates here. Collective."""
        dtype = torch.uint8
        self._dirty_asked_P = [
            storage.which_are_among(rows, updated).to(dtype)
            for storage, rows, updated in zip(
                self._storages, self._asked_rows_P, before._asked_rows_P
            )
        ]
        self._dirty_mine_P = [self._one_for_each(mine, dtype) for mine in self._mine_P]
        self._marks = PackedAllToAll(
            self._pg,
            _by_chunk(self._dirty_asked_P, self._asked_P),
            self._header.receive_PW,
            _by_chunk(self._dirty_mine_P, self._mine_P),
            self._header.send_PW,
        )

    def lay_out(self) -> RowLayout:
        """Gives every row its place; ends the marks. Where none were sent, all rows are dirty."""
        batch = self._batch
        dirty_mine_P: Sequence[Tensor | None] = [None] * self._space.num_packs
        dirty_asked_P = dirty_mine_P
        if self._marks is not None:
            self._marks.wait()
            dirty_mine_P = [marks.bool() for marks in self._dirty_mine_P]
            dirty_asked_P = [marks.bool() for marks in self._dirty_asked_P]
        mine_P = [find_fetch_order(m.counts_EW, d) for m, d in zip(self._mine_P, dirty_mine_P)]
        asked_P = [find_fetch_order(a.counts_EW, d) for a, d in zip(self._asked_P, dirty_asked_P)]
        weights_N = batch.features.weights_or_none()
        if weights_N is not None:
            weights_N = weights_N.float().index_select(0, batch.bags.source_N)
        return RowLayout(
            sizes_K=batch.sizes_K,
            homes_written=self._header.homes_written,
            packs=[
                PackLayout(
                    hot_slots=self._hot_slots_P[pack],
                    touched_slots=self._touched_slots_P[pack],
                    mine=self._mine_P[pack],
                    asked=self._asked_P[pack],
                    asked_rows=self._asked_rows_P[pack],
                    mine_by_fetch=mine_P[pack],
                    asked_by_fetch=asked_P[pack],
                    asked_rows_by_fetch=asked_P[pack].arrange(self._asked_rows_P[pack]),
                )
                for pack in range(self._space.num_packs)
            ],
            pooling_KM=cut_pooling(
                batch.bags,
                batch.rows,
                batch.micro_batch_N,
                *self._places(mine_P),
                features_M=self._space.features_M,
                sizes_K=batch.sizes_K,
                mean_MF=batch.mean_MF,
            ),
            weights_N=weights_N,
        )

    def _places(self, mine_P: Sequence[FetchOrder]) -> tuple[Tensor, Tensor]:
        """Where each unique row of the batch is in its matrix's rows, and where in its gradients.

        Of a pack, hot rows stand first in both; the cold ones follow in fetch order and in request
        order.
        """
        position_U = self._batch.located.position_U
        device = position_U.device
        hot_P = [slots.numel() for slots in self._hot_slots_P]
        rows_P = [hot + order.num_rows for hot, order in zip(hot_P, mine_P)]
        # packs follow each other in ids, in positions and in a matrix
        first_P = [0, *accumulate(rows_P)]
        in_fetch_order = torch.cat(
            [
                torch.cat([torch.arange(hot, device=device), order.places(device) + hot]) + first
                for hot, order, first in zip(hot_P, mine_P, first_P)
            ]
        )
        starts_M = [first_P[packs.start] for packs in self._space.matrices]
        sizes_M = [sum(rows_P[packs]) for packs in self._space.matrices]

        def within_matrix(places_U: Tensor) -> Tensor:
            parts_M = places_U.split(sizes_M)
            return torch.cat([part - start for part, start in zip(parts_M, starts_M)])

        return within_matrix(in_fetch_order.index_select(0, position_U)), within_matrix(position_U)

    def _one_for_each(self, exchanges: Exchanges, dtype: torch.dtype) -> Tensor:
        """An empty vector with room for each of some rows."""
        return self._batch.located.target_U.new_empty(exchanges.num_rows, dtype=dtype)


def _per_pack_and_chunk(counts: Sequence[list[int]], num_chunks: int) -> list[Exchanges]:
    return [
        Exchanges(list(counts[start : start + num_chunks]))
        for start in range(0, len(counts), num_chunks)
    ]


def _per_pack(counts: Sequence[int], num_chunks: int) -> list[int]:
    return [sum(counts[i : i + num_chunks]) for i in range(0, len(counts), num_chunks)]


def _by_chunk(values_P: Sequence[Tensor], exchanges_P: Sequence[Exchanges]) -> list[Tensor]:
    """Cuts each pack's vector into its chunks."""
    return [
        values[exchanges.rows(chunk)]
        for values, exchanges in zip(values_P, exchanges_P)
        for chunk in range(len(exchanges.counts_EW))
    ]
