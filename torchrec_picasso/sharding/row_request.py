"""How a rank asks for the rows of an interleaved batch, up to where each row will lie.

Everything here is about ids and runs ahead of the step that needs the rows; its result is a
:class:`RowLayout`, which says all that fetches, gradients and the update have to know.

Rows of the next batch that this one does not update are clean: they may be fetched before this
one's update. The home of a row knows whether it is, from the requests of both batches, and tells
the rank that asked. So looking ahead changes when a row travels, never what it holds.

Shape letters: K micro-batches and chunks, P packs, W ranks, U unique rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from torchrec_picasso.exchange.header import StepHeader
from torchrec_picasso.exchange.packed_all_to_all import PackedAllToAll
from torchrec_picasso.ops.fetch_order import FetchOrder, find_fetch_order
from torchrec_picasso.ops.micro_pooling import MicroPooling, cut_pooling
from torchrec_picasso.ops.packed_ids import PackedIdSpace
from torchrec_picasso.sharding.bad_input import raise_on_bad_input
from torchrec_picasso.sharding.chunked_batch import ChunkedBatch
from torchrec_picasso.storage.row_storage import RowStorage

__all__ = ["RowLayout", "RowRequest"]


@dataclass(frozen=True, kw_only=True)
class RowLayout:
    """Where every row of a batch lies, on the rank that uses it and on those that keep it.

    *Mine* are the cold rows that this rank asks for, *asked* those that others ask of it, both in
    request order: chunk by chunk, in a chunk by rank.
    """

    homes_written: bool
    """Whether any rank's homes were written from outside, so that replicas have to be filled."""
    hot_slots_P: Sequence[Tensor]
    """Hot slots that this rank's batch uses, counted from 0 in the pack."""
    touched_slots_P: Sequence[Tensor]
    """Hot slots that any rank's batch uses, counted from 0 in the pack."""
    requested_P: Sequence[Tensor]
    """Home rows asked of this rank, in request order."""
    fetched_P: Sequence[Tensor]
    """The same in fetch order."""
    mine_PKW: Sequence[list[list[int]]]
    """Rows that this rank asks for, by chunk and home."""
    asked_PKW: Sequence[list[list[int]]]
    """Rows asked of this rank, by chunk and asking rank."""
    mine_P: Sequence[FetchOrder]
    asked_P: Sequence[FetchOrder]
    pooling_KP: Sequence[Sequence[MicroPooling]]

    def tensors(self) -> Iterator[Tensor]:
        """Every tensor held, for stream bookkeeping."""
        for group in (self.hot_slots_P, self.touched_slots_P, self.requested_P, self.fetched_P):
            yield from group
        for pooling_P in self.pooling_KP:
            for pooling in pooling_P:
                yield from pooling.tensors()


class RowRequest:
    """The request for the rows of one batch; its methods are called once each, in order.

    Collective where it says so: on all ranks in the same order.

    Args:
        pg: Process group.
        space: The packed id space of the module.
        storages: One per pack; they know which of their rows two batches share.
        batch: The batch, its header on the way.
    """

    _header: StepHeader
    _requested_P: list[Tensor]
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
        self._mine_PKW = _nested(header.send_PW, num_chunks)
        self._asked_PKW = _nested(header.receive_PW, num_chunks)
        dtype = space.home_row_dtype
        self._requested_P = [self._one_for_each(asked, dtype) for asked in self._asked_PKW]
        self._ids = PackedAllToAll(
            self._pg,
            [cold.to(dtype) for cold in parts[1::2]],
            header.send_PW,
            _by_chunk(self._requested_P, self._asked_PKW),
            header.receive_PW,
        )
        return True

    def receive_ids(self) -> None:
        """Ends the ids exchange: homes know what they are asked for."""
        self._ids.wait()

    def send_marks(self, before: RowRequest) -> None:
        """Tells every rank which of its rows the batch before updates here. Collective."""
        dtype = torch.uint8
        self._dirty_asked_P = [
            storage.which_are_among(rows, updated).to(dtype)
            for storage, rows, updated in zip(
                self._storages, self._requested_P, before._requested_P
            )
        ]
        self._dirty_mine_P = [self._one_for_each(mine, dtype) for mine in self._mine_PKW]
        self._marks = PackedAllToAll(
            self._pg,
            _by_chunk(self._dirty_asked_P, self._asked_PKW),
            self._header.receive_PW,
            _by_chunk(self._dirty_mine_P, self._mine_PKW),
            self._header.send_PW,
        )

    def lay_out(self) -> RowLayout:
        """Gives every row its place; ends the marks. Where none were sent, all rows are dirty."""
        mine: Sequence[Tensor | None] = [None] * self._space.num_packs
        asked: Sequence[Tensor | None] = mine
        if self._marks is not None:
            self._marks.wait()
            mine = [dirty.bool() for dirty in self._dirty_mine_P]
            asked = [dirty.bool() for dirty in self._dirty_asked_P]
        mine_P = list(map(find_fetch_order, self._mine_PKW, mine))
        asked_P = list(map(find_fetch_order, self._asked_PKW, asked))
        batch = self._batch
        pooling_KP = cut_pooling(
            batch.bags,
            batch.rows,
            batch.micro_batch_N,
            *self._places(mine_P),
            features_P=self._space.features_P,
            sizes_K=batch.sizes_K,
            mean_PF=batch.mean_PF,
        )
        return RowLayout(
            homes_written=self._header.homes_written,
            hot_slots_P=self._hot_slots_P,
            touched_slots_P=self._touched_slots_P,
            requested_P=self._requested_P,
            fetched_P=[order.arrange(rows) for order, rows in zip(asked_P, self._requested_P)],
            mine_PKW=self._mine_PKW,
            asked_PKW=self._asked_PKW,
            mine_P=mine_P,
            asked_P=asked_P,
            pooling_KP=pooling_KP,
        )

    def _places(self, mine_P: Sequence[FetchOrder]) -> tuple[Tensor, Tensor]:
        """Where each unique row of the batch is in its pack's rows, and where in its gradients.

        Hot rows stand first in both; the cold ones follow in fetch order and in request order.
        """
        position_U = self._batch.located.position_U
        rows_P, gradients_P = [], []
        for slots, order in zip(self._hot_slots_P, mine_P):
            hot = slots.numel()
            gradients_P.append(torch.arange(hot + order.num_rows, device=slots.device))
            rows_P += [gradients_P[-1][:hot], order.places(slots.device) + hot]
        return (
            torch.cat(rows_P).index_select(0, position_U),
            torch.cat(gradients_P).index_select(0, position_U),
        )

    def _one_for_each(self, counts_KW: list[list[int]], dtype: torch.dtype) -> Tensor:
        """An empty vector with room for each of some rows."""
        return self._batch.located.target_U.new_empty(sum(map(sum, counts_KW)), dtype=dtype)


def _nested(counts: Sequence[list[int]], num_chunks: int) -> list[list[list[int]]]:
    """Per pack, per chunk."""
    return [list(counts[i : i + num_chunks]) for i in range(0, len(counts), num_chunks)]


def _per_pack(counts: Sequence[int], num_chunks: int) -> list[int]:
    return [sum(counts[i : i + num_chunks]) for i in range(0, len(counts), num_chunks)]


def _by_chunk(values_P: Sequence[Tensor], counts_PKW: list[list[list[int]]]) -> list[Tensor]:
    """Cuts each pack's vector into its chunks."""
    return [
        part
        for values, counts_KW in zip(values_P, counts_PKW)
        for part in values.split([sum(counts_W) for counts_W in counts_KW])
    ]
