"""One batch of one module, from its rows to its update, in pieces that a schedule may reorder.

The batch is cut into K micro-batches. Chunk j holds the rows that micro-batch j is the first to
use, so forward needs chunks up to j before micro-batch j, and with backward running from the last
micro-batch to the first, the gradient of chunk j is complete right after micro-batch j. Every row
still travels once, and is updated once.

Shape letters: K micro-batches and chunks, P packs, W ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from torchrec_picasso._torchrec import QuantizedCommCodec, get_gradient_division
from torchrec_picasso.exchange.hot_reduction import HotReduction
from torchrec_picasso.exchange.packed_all_to_all import PackedAllToAll
from torchrec_picasso.ops.fetch_order import CLEAN, dirty_exchange
from torchrec_picasso.sharding.arriving_rows import ArrivingRows, GradientSink
from torchrec_picasso.sharding.row_request import RowLayout
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
        """Waits for the chunks up to this one; gives all rows, later dirty ones not filled yet."""
        return self.step.arrive(self.index)


class InterleavedStep:
    """Rows and gradients of one batch of one module, whose every row has its place.

    Collective where it says so: on all ranks in the same order.

    Args:
        pg: Process group.
        storages: One per pack.
        buffers_P: Memory for rows and gradients of each pack.
        forward_codec: Wire precision of rows, or ``None`` for their own.
        backward_codec: Wire precision of gradients, or ``None`` for their own.
        layout: Of the batch.
    """

    def __init__(
        self,
        pg: dist.ProcessGroup,
        storages: Sequence[RowStorage],
        buffers_P: Sequence[RowBuffers],
        forward_codec: QuantizedCommCodec | None,
        backward_codec: QuantizedCommCodec | None,
        layout: RowLayout,
    ) -> None:
        self._pg = pg
        self._storages = storages
        self._buffers_P = buffers_P
        self._forward_codec = forward_codec
        self._backward_codec = backward_codec
        self.layout = layout
        self._hot_P = [slots.numel() for slots in layout.hot_slots_P]
        self._arrivals: dict[int, PackedAllToAll] = {}
        self._gradients: list[PackedAllToAll] = []
        self._hot: HotReduction | None = None
        self._rows_P: list[Tensor] = []
        self._grads_P: list[Tensor] = []
        self._arrived_P: list[Tensor] = []

    # -- rows ----------------------------------------------------------------------------------

    def fetch_clean(self) -> None:
        """Starts fetching the rows that the batch before does not update. Collective."""
        self._fetch(CLEAN)

    def fetch_dirty(self, chunk: int) -> None:
        """Starts fetching the other rows of a chunk. Collective."""
        self._fetch(dirty_exchange(chunk))

    def _fetch(self, exchange: int) -> None:
        layout, storages = self.layout, self._storages
        asked_P, mine_P = layout.asked_by_fetch_P, layout.mine_by_fetch_P
        with torch.no_grad():
            self._arrivals[exchange] = PackedAllToAll(
                self._pg,
                [
                    storage.gather(rows[asked.rows(exchange)])
                    for storage, rows, asked in zip(storages, layout.asked_rows_by_fetch_P, asked_P)
                ],
                [asked.counts_EW[exchange] for asked in asked_P],
                [cold[mine.rows(exchange)] for cold, mine in zip(self._cold(self._rows()), mine_P)],
                [mine.counts_EW[exchange] for mine in mine_P],
                self._forward_codec,
            )

    def read_hot(self) -> None:
        """Reads the replicas. Collective when they have to be filled first."""
        layout, storages = self.layout, self._storages
        with torch.no_grad():
            if layout.homes_written or any(s.replicas_stale() for s in storages):
                for storage in storages:
                    storage.fill_replicas()
            for storage, slots, hot in zip(
                storages, layout.hot_slots_P, self._hot_rows(self._rows())
            ):
                storage.gather_hot(slots, out_hD=hot)

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
        num_chunks = len(self.layout.sizes_K)
        self._wait_for_rows(num_chunks - 1)
        self.fetch_clean()
        for chunk in range(num_chunks):
            self.fetch_dirty(chunk)
        self.read_hot()
        self.accept_writes()

    def micro_rows(self, index: int) -> MicroRows:
        """What a micro-batch uses: a lookup result for the output dist."""
        pooling_P, weights_N = self.layout.pooling_KP[index], self.layout.weights_N
        if weights_N is not None:
            weights_N = torch.cat([weights_N[pooling.lookups] for pooling in pooling_P])
        return MicroRows(
            step=self,
            index=index,
            gradient_places_P=[pooling.gradient_place_U for pooling in pooling_P],
            pooling_P=[pooling.index for pooling in pooling_P],
            lookups_P=[p.lookups.stop - p.lookups.start for p in pooling_P],
            batch_size=self.layout.sizes_K[index],
            weights_N=weights_N,
        )

    def arrive(self, index: int) -> Sequence[Tensor]:
        """Rows of the batch, those of the chunks up to a micro-batch's filled."""
        self._wait_for_rows(index)
        return self._rows()

    def _rows(self) -> list[Tensor]:
        """Each pack's rows: hot ones, then cold ones in fetch order."""
        if not self._rows_P:
            self._rows_P = self._take_buffers()
        return self._rows_P

    def _wait_for_rows(self, chunk: int) -> None:
        """Ends the fetches of the chunks up to one."""
        for exchange in (CLEAN, *map(dirty_exchange, range(chunk + 1))):
            arrival = self._arrivals.pop(exchange, None)
            if arrival is not None:
                arrival.wait()

    # -- gradients -----------------------------------------------------------------------------

    def add_gradients(self, gradient_places_P: Sequence[Tensor], grads_P: Sequence[Tensor]) -> None:
        """Adds a micro-batch's gradients to those of the later ones."""
        for total, places, grads in zip(self._totals(), gradient_places_P, grads_P):
            total.index_add_(0, places, grads)

    def _totals(self) -> list[Tensor]:
        """Each pack's sums of gradients so far: of hot rows, then of cold ones in request order."""
        if not self._grads_P:
            self._grads_P = [buffer.zero_() for buffer in self._take_buffers()]
        return self._grads_P

    def _take_buffers(self) -> list[Tensor]:
        """A matrix for each pack with a row for each of the batch's."""
        return [
            buffers.take(hot + mine.num_rows)
            for buffers, hot, mine in zip(self._buffers_P, self._hot_P, self.layout.mine_P)
        ]

    def _hot_rows(self, matrices_P: Sequence[Tensor]) -> list[Tensor]:
        return [matrix[:hot] for matrix, hot in zip(matrices_P, self._hot_P)]

    def _cold(self, matrices_P: Sequence[Tensor]) -> list[Tensor]:
        return [matrix[hot:] for matrix, hot in zip(matrices_P, self._hot_P)]

    def send_gradients(self, chunk: int) -> None:
        """Starts sending the gradients of a chunk home. Collective.

        Its micro-batch has run backward, and so have all later ones.
        """
        mine_P, asked_P = self.layout.mine_P, self.layout.asked_P
        if not self._gradients:
            self._arrived_P = [
                buffers.take(asked.num_rows + touched.numel())
                for buffers, asked, touched in zip(
                    self._buffers_P, asked_P, self.layout.touched_slots_P
                )
            ]
        self._gradients.append(
            PackedAllToAll(
                self._pg,
                [cold[mine.rows(chunk)] for cold, mine in zip(self._cold(self._totals()), mine_P)],
                [mine.counts_EW[chunk] for mine in mine_P],
                [grads[asked.rows(chunk)] for grads, asked in zip(self._arrived_P, asked_P)],
                [asked.counts_EW[chunk] for asked in asked_P],
                self._backward_codec,
            )
        )

    def reduce_hot(self) -> None:
        """Starts summing the gradients of touched replicas over ranks. Collective."""
        layout = self.layout
        self._hot = HotReduction(
            self._pg,
            self._hot_rows(self._totals()),
            list(map(torch.searchsorted, layout.touched_slots_P, layout.hot_slots_P)),
            [grads[asked.num_rows :] for grads, asked in zip(self._arrived_P, layout.asked_P)],
        )

    def update(self) -> None:
        """Waits for all gradients and updates every row once, at home and at the replicas."""
        for gradients in self._gradients:
            gradients.wait()
        assert self._hot is not None, "reduce_hot comes before update"
        self._hot.wait()
        divided = get_gradient_division() and self._pg.size() > 1
        for storage, rows, slots, grads in zip(
            self._storages, self.layout.asked_rows_P, self.layout.touched_slots_P, self._arrived_P
        ):
            storage.update(rows, slots, grads.div_(self._pg.size()) if divided else grads)
        for matrices_P in (self._rows_P, self._grads_P, self._arrived_P):
            for buffers, matrix in zip(self._buffers_P, matrices_P):
                buffers.give_back(matrix)
            matrices_P.clear()
