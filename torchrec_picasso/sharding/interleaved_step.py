"""One batch of one module, from its ids to its update, in pieces that a schedule may reorder.

The batch is cut into K micro-batches. Chunk j holds the rows that micro-batch j is the first to
use, so forward needs chunks up to j before micro-batch j, and with backward running from the last
micro-batch to the first, the gradient of chunk j is complete right after micro-batch j. Every row
still travels once, and is updated once.

Rows of the next batch that this one does not update are clean: they may be fetched before this
one's update. The home of a row knows whether it is, from the requests of both batches, and tells
the rank that asked. So looking ahead changes when a row travels, never what it holds.

Shape letters: K micro-batches and chunks, P packs, U unique rows, m rows of a matrix.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from torchrec_picasso._torchrec import QuantizedCommCodec, get_gradient_division
from torchrec_picasso.exchange.header import StepHeader
from torchrec_picasso.exchange.hot_reduction import HotReduction
from torchrec_picasso.exchange.packed_all_to_all import PackedAllToAll
from torchrec_picasso.ops.fetch_order import CLEAN, dirty, find_fetch_order
from torchrec_picasso.ops.micro_pooling import cut_pooling
from torchrec_picasso.ops.packed_ids import PackedIdSpace
from torchrec_picasso.sharding.arriving_rows import ArrivingRows, GradientSink
from torchrec_picasso.sharding.bad_input import raise_on_bad_input
from torchrec_picasso.sharding.chunked_batch import ChunkedBatch
from torchrec_picasso.storage.row_buffers import RowBuffers
from torchrec_picasso.storage.row_storage import RowStorage

__all__ = ["InterleavedStep", "MicroRows"]


@dataclass(frozen=True, kw_only=True)
class MicroRows(ArrivingRows):
    """The rows that one micro-batch uses."""

    step: InterleavedStep
    index: int
    gradient_places_P: Sequence[Tensor]
    """Of each pack's gradients, the rows that the micro-batch adds to."""

    @property
    def gradient_sink(self) -> GradientSink:
        """The step, which sums over micro-batches."""
        return partial(self.step.add_gradients, self.gradient_places_P)

    def arrive(self) -> Sequence[Tensor]:
        """Waits for the chunks up to this one; gives all rows, later ones not filled yet."""
        return self.step.arrive(self.index)


class InterleavedStep:
    """One batch of one module; its methods are called once each, in the order they stand here.

    Collective where it says so: on all ranks in the same order.

    Args:
        pg: Process group.
        space: The packed id space of the module.
        storages: One per pack.
        buffers_P: Memory for rows and gradients of each pack.
        forward_codec: Wire precision of rows, or ``None`` for their own.
        backward_codec: Wire precision of gradients, or ``None`` for their own.
        batch: The batch, its header on the way.
    """

    _header: StepHeader

    def __init__(
        self,
        pg: dist.ProcessGroup,
        space: PackedIdSpace,
        storages: Sequence[RowStorage],
        buffers_P: Sequence[RowBuffers],
        forward_codec: QuantizedCommCodec | None,
        backward_codec: QuantizedCommCodec | None,
        batch: ChunkedBatch,
    ) -> None:
        self._pg = pg
        self._space = space
        self._storages = storages
        self._buffers_P = buffers_P
        self._forward_codec = forward_codec
        self._backward_codec = backward_codec
        self._batch = batch
        self._marks: PackedAllToAll | None = None
        self._dirty_asked_P: Sequence[Tensor] = ()
        self._dirty_mine_P: Sequence[Tensor] = ()
        self._arrivals: dict[int, PackedAllToAll] = {}
        self._gradients: list[PackedAllToAll] = []
        self._hot: HotReduction | None = None
        self._rows_P: list[Tensor] = []
        self._grads_P: list[Tensor] = []
        self._arrived_P: list[Tensor] = []

    @property
    def num_micro_batches(self) -> int:
        """K."""
        return len(self._batch.sizes_K)

    # -- ids -----------------------------------------------------------------------------------

    def send_ids(self) -> bool:
        """Ends the header and asks the homes for all cold rows. Collective.

        Returns:
            Whether any rank has data. When none has, nothing is sent and the step ends here.

        Raises:
            InputError: On all ranks, if any rank's ids or weights are bad.
        """
        batch, space, num_chunks = self._batch, self._space, self.num_micro_batches
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
        self._requested_P = [_rows_buffer(asked, batch, dtype) for asked in self._asked_PKW]
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

    def send_marks(self, before: InterleavedStep) -> None:
        """Tells every rank which of its rows the batch before updates here. Collective."""
        dtype = torch.uint8
        self._dirty_asked_P = [
            storage.which_are_among(rows, updated).to(dtype)
            for storage, rows, updated in zip(
                self._storages, self._requested_P, before._requested_P
            )
        ]
        self._dirty_mine_P = [_rows_buffer(mine, self._batch, dtype) for mine in self._mine_PKW]
        self._marks = PackedAllToAll(
            self._pg,
            _by_chunk(self._dirty_asked_P, self._asked_PKW),
            self._header.receive_PW,
            _by_chunk(self._dirty_mine_P, self._mine_PKW),
            self._header.send_PW,
        )

    def lay_out(self) -> None:
        """Gives every row its place; ends the marks. Where none were sent, all rows are dirty."""
        num_packs = self._space.num_packs
        mine: Sequence[Tensor | None] = [None] * num_packs
        asked: Sequence[Tensor | None] = mine
        if self._marks is not None:
            self._marks.wait()
            mine = [dirty.bool() for dirty in self._dirty_mine_P]
            asked = [dirty.bool() for dirty in self._dirty_asked_P]
        self._mine_P = list(map(find_fetch_order, self._mine_PKW, mine))
        self._asked_P = list(map(find_fetch_order, self._asked_PKW, asked))
        self._fetched_P = [
            order.arrange(rows) for order, rows in zip(self._asked_P, self._requested_P)
        ]
        batch = self._batch
        sizes_P = [
            slots.numel() + order.num_rows for slots, order in zip(self._hot_slots_P, self._mine_P)
        ]
        self._rows_P = [buffers.take(size) for buffers, size in zip(self._buffers_P, sizes_P)]
        self._pooling_KP = cut_pooling(
            batch.bags,
            batch.rows,
            batch.micro_batch_N,
            *self._places(),
            features_P=self._space.features_P,
            sizes_K=batch.sizes_K,
            mean_PF=batch.mean_PF,
        )

    def _places(self) -> tuple[Tensor, Tensor]:
        """Where each unique row of the batch is in its pack's rows, and where in its gradients.

        Hot rows stand first in both; the cold ones follow in fetch order and in request order.
        """
        position_U = self._batch.located.position_U
        rows_P, gradients_P = [], []
        for slots, order in zip(self._hot_slots_P, self._mine_P):
            hot = slots.numel()
            gradients_P.append(torch.arange(hot + order.num_rows, device=slots.device))
            rows_P += [gradients_P[-1][:hot], order.places(slots.device) + hot]
        return (
            torch.cat(rows_P).index_select(0, position_U),
            torch.cat(gradients_P).index_select(0, position_U),
        )

    # -- rows ----------------------------------------------------------------------------------

    def fetch_clean(self) -> None:
        """Starts fetching the rows that the batch before does not update. Collective."""
        self._fetch(CLEAN)

    def fetch_dirty(self, chunk: int) -> None:
        """Starts fetching the other rows of a chunk. Collective."""
        self._fetch(dirty(chunk))

    def _fetch(self, exchange: int) -> None:
        with torch.no_grad():
            self._arrivals[exchange] = PackedAllToAll(
                self._pg,
                [
                    storage.gather(rows[asked.rows(exchange)])
                    for storage, rows, asked in zip(self._storages, self._fetched_P, self._asked_P)
                ],
                [asked.counts_EW[exchange] for asked in self._asked_P],
                [
                    rows[slots.numel() :][mine.rows(exchange)]
                    for rows, slots, mine in zip(self._rows_P, self._hot_slots_P, self._mine_P)
                ],
                [mine.counts_EW[exchange] for mine in self._mine_P],
                self._forward_codec,
            )

    def read_hot(self) -> None:
        """Reads the replicas. Collective when they have to be filled first."""
        storages = self._storages
        with torch.no_grad():
            if self._header.homes_written or any(s.replicas_stale() for s in storages):
                for storage in storages:
                    storage.fill_replicas()
            for storage, slots, rows in zip(storages, self._hot_slots_P, self._rows_P):
                storage.gather_hot(slots, out_hD=rows[: slots.numel()])

    def accept_writes(self) -> None:
        """Takes the storages as they are: what was fetched is what they hold."""
        for storage in self._storages:
            storage.accept_writes()

    def refresh(self, again: bool = False) -> None:
        """Fetches all rows again if somebody wrote into homes since, as a checkpoint load does.

        Collective then: weights are written on all ranks.

        Args:
            again: Fetch in any case: the model was trained by other means meanwhile.
        """
        if not again and not any(storage.written_outside() for storage in self._storages):
            return
        self._wait_for_rows(self.num_micro_batches - 1)
        self.fetch_clean()
        for chunk in range(self.num_micro_batches):
            self.fetch_dirty(chunk)
        self.read_hot()
        self.accept_writes()

    def micro_rows(self, index: int) -> MicroRows:
        """What a micro-batch uses: a lookup result for the output dist."""
        batch, pooling_P = self._batch, self._pooling_KP[index]
        weights_N = None
        if batch.bags.source_N is not None:
            of_packs = [batch.bags.source_N[pooling.lookups] for pooling in pooling_P]
            weights_N = batch.features.weights().float().index_select(0, torch.cat(of_packs))
        return MicroRows(
            step=self,
            index=index,
            gradient_places_P=[pooling.gradient_place_U for pooling in pooling_P],
            pooling_P=[pooling.index for pooling in pooling_P],
            lookups_P=[p.lookups.stop - p.lookups.start for p in pooling_P],
            batch_size=batch.sizes_K[index],
            weights_N=weights_N,
        )

    def arrive(self, index: int) -> Sequence[Tensor]:
        """Rows of the batch, those of the chunks up to a micro-batch's filled."""
        self._wait_for_rows(index)
        return self._rows_P

    def _wait_for_rows(self, chunk: int) -> None:
        """Ends the fetches of the chunks up to one."""
        for exchange in range(1 + dirty(chunk)):
            arrival = self._arrivals.pop(exchange, None)
            if arrival is not None:
                arrival.wait()

    # -- gradients -----------------------------------------------------------------------------

    def add_gradients(self, gradient_places_P: Sequence[Tensor], grads_P: Sequence[Tensor]) -> None:
        """Adds a micro-batch's gradients to those of the later ones."""
        for total, places, grads in zip(self._totals(), gradient_places_P, grads_P):
            total.index_add_(0, places, grads)

    def _totals(self) -> list[Tensor]:
        """Sums of the gradients so far, like the rows."""
        if not self._grads_P:
            self._grads_P = [
                buffers.take(rows.size(0)).zero_()
                for buffers, rows in zip(self._buffers_P, self._rows_P)
            ]
        return self._grads_P

    def send_gradients(self, chunk: int) -> None:
        """Starts sending the gradients of a chunk home. Collective.

        Its micro-batch has run backward, and so have all later ones.
        """
        if not self._gradients:
            self._arrived_P = [
                buffers.take(asked.num_rows + touched.numel())
                for buffers, asked, touched in zip(
                    self._buffers_P, self._asked_P, self._touched_slots_P
                )
            ]
        cold_P = [g[slots.numel() :] for g, slots in zip(self._totals(), self._hot_slots_P)]
        self._gradients.append(
            PackedAllToAll(
                self._pg,
                [g[_rows_of(chunk, mine)] for g, mine in zip(cold_P, self._mine_PKW)],
                [mine_KW[chunk] for mine_KW in self._mine_PKW],
                [g[_rows_of(chunk, asked)] for g, asked in zip(self._arrived_P, self._asked_PKW)],
                [asked_KW[chunk] for asked_KW in self._asked_PKW],
                self._backward_codec,
            )
        )

    def reduce_hot(self) -> None:
        """Starts summing the gradients of touched replicas over ranks. Collective."""
        self._hot = HotReduction(
            self._pg,
            [g[: slots.numel()] for g, slots in zip(self._totals(), self._hot_slots_P)],
            [
                torch.searchsorted(touched, own)
                for touched, own in zip(self._touched_slots_P, self._hot_slots_P)
            ],
            [buffer[asked.num_rows :] for buffer, asked in zip(self._arrived_P, self._asked_P)],
        )

    def update(self) -> None:
        """Waits for all gradients and updates every row once, at home and at the replicas."""
        for gradients in self._gradients:
            gradients.wait()
        assert self._hot is not None, "reduce_hot comes before update"
        self._hot.wait()
        divided = get_gradient_division() and self._pg.size() > 1
        for storage, rows, slots, grads in zip(
            self._storages, self._requested_P, self._touched_slots_P, self._arrived_P
        ):
            storage.update(rows, slots, grads.div_(self._pg.size()) if divided else grads)
        for matrices_P in (self._rows_P, self._grads_P, self._arrived_P):
            for buffers, matrix in zip(self._buffers_P, matrices_P):
                buffers.give_back(matrix)
            matrices_P.clear()


def _nested(counts: Sequence[list[int]], num_chunks: int) -> list[list[list[int]]]:
    """Per pack, per chunk."""
    return [list(counts[i : i + num_chunks]) for i in range(0, len(counts), num_chunks)]


def _per_pack(counts: Sequence[int], num_chunks: int) -> list[int]:
    return [sum(counts[i : i + num_chunks]) for i in range(0, len(counts), num_chunks)]


def _rows_buffer(counts_KW: list[list[int]], batch: ChunkedBatch, dtype: torch.dtype) -> Tensor:
    return batch.located.target_U.new_empty(sum(map(sum, counts_KW)), dtype=dtype)


def _by_chunk(values_P: Sequence[Tensor], counts_PKW: list[list[list[int]]]) -> list[Tensor]:
    """Cuts each pack's vector into its chunks."""
    return [
        part
        for values, counts_KW in zip(values_P, counts_PKW)
        for part in values.split([sum(counts_W) for counts_W in counts_KW])
    ]


def _rows_of(chunk: int, counts_KW: list[list[int]]) -> slice:
    """Where a chunk's rows are in request order."""
    start = sum(map(sum, counts_KW[:chunk]))
    return slice(start, start + sum(counts_KW[chunk]))
