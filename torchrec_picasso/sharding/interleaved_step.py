"""One batch of one module, from its rows to its update, in pieces that a schedule may reorder.

The batch is cut into K micro-batches. Chunk j holds the rows that micro-batch j is the first to
use, so forward needs chunks up to j before micro-batch j, and with backward running from the last
micro-batch to the first, the gradient of chunk j is complete right after micro-batch j. Every row
still travels once, and is updated once.

Packs may also be cut into waves, by the plan. What no computing hides is then staggered: a wave is
on the wire while another is gathered or updated (PICASSO's K-Interleaving).

Shape letters: K micro-batches and chunks, M matrices of rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
from torchrec_picasso.sharding.pack_rows import PackRows
from torchrec_picasso.sharding.row_layout import RowLayout

__all__ = ["InterleavedStep", "MicroRows"]


@dataclass(frozen=True, kw_only=True)
class MicroRows(ArrivingRows):
    """The rows that one micro-batch uses."""

    step: InterleavedStep
    index: int
    gradient_places_M: Sequence[Tensor]
    """Of each matrix's gradients, the rows that the micro-batch adds to."""

    @property
    def gradient_sink(self) -> GradientSink:
        """The step, which sums over micro-batches."""
        return partial(self.step.add_gradients, self.gradient_places_M)

    def arrive(self) -> Iterator[Tensor]:
        """Waits for the chunks up to this one; gives all rows, later dirty ones not filled yet."""
        return self.step.arrive(self.index)


class InterleavedStep:
    """Rows and gradients of one batch of one module, whose every row has its place.

    Collective where it says so: on all ranks in the same order. Where a method takes a wave, it is
    for the packs of that wave, none if the module has fewer waves; ``None`` = for all packs.

    Args:
        pg: Process group.
        packs_M: The module's packs, by matrix.
        waves: Which of them travel together where waves are staggered.
        forward_codec: Wire precision of rows, or ``None`` for their own.
        backward_codec: Wire precision of gradients, or ``None`` for their own.
        layout: Of the batch.
    """

    def __init__(
        self,
        pg: dist.ProcessGroup,
        packs_M: Sequence[Sequence[PackRows]],
        waves: Sequence[slice],
        forward_codec: QuantizedCommCodec | None,
        backward_codec: QuantizedCommCodec | None,
        layout: RowLayout,
    ) -> None:
        self._pg = pg
        self._packs_M = packs_M
        self._packs = [pack for packs in packs_M for pack in packs]
        self._matrices = [packs[0].matrix for packs in packs_M]
        self._waves = waves
        self._forward_codec = forward_codec
        self._backward_codec = backward_codec
        self.layout = layout

    def _packs_of(self, wave: int | None) -> Sequence[PackRows]:
        if wave is None:
            return self._packs
        return self._packs[self._waves[wave]] if wave < len(self._waves) else ()

    # -- rows ----------------------------------------------------------------------------------

    def fetch_clean(self) -> None:
        """Starts fetching the rows that the batch before does not update. Collective."""
        self._fetch(CLEAN)

    def fetch_dirty(self, chunk: int, wave: int | None = None) -> None:
        """Starts fetching the other rows of a chunk. Collective."""
        self._fetch(dirty_exchange(chunk), wave)

    def _fetch(self, exchange: int, wave: int | None = None) -> None:
        packs = self._packs_of(wave)
        if not packs:
            return
        with torch.no_grad():
            arrival = PackedAllToAll(
                self._pg,
                [pack.gather(exchange) for pack in packs],
                [pack.layout.asked_by_fetch.counts_EW[exchange] for pack in packs],
                [pack.room_for_rows(exchange) for pack in packs],
                [pack.layout.mine_by_fetch.counts_EW[exchange] for pack in packs],
                self._forward_codec,
            )
        for pack in packs:
            pack.come_by(exchange, arrival)

    def read_hot(self) -> None:
        """Reads the replicas. Collective when they have to be filled first."""
        with torch.no_grad():
            storages = [pack.storage for pack in self._packs]
            if self.layout.homes_written or any(s.replicas_stale() for s in storages):
                for storage in storages:
                    storage.fill_replicas()
            for pack in self._packs:
                pack.read_hot()

    def accept_writes(self) -> None:
        """Takes the storages as they are: what was fetched is what they hold."""
        for pack in self._packs:
            pack.storage.accept_writes()

    def refresh(self, again: bool = False) -> None:
        """Fetches all rows again if somebody wrote into homes since, as a checkpoint load does.

        Collective then: weights are written on all ranks.

        Args:
            again: Fetch in any case: the model was trained by other means meanwhile.
        """
        if not again and not any(pack.storage.written_outside() for pack in self._packs):
            return
        num_chunks = len(self.layout.sizes_K)
        for pack in self._packs:
            pack.arrive(num_chunks - 1)
        self.fetch_clean()
        for chunk in range(num_chunks):
            self.fetch_dirty(chunk)
        self.read_hot()
        self.accept_writes()

    def micro_rows(self, index: int) -> MicroRows:
        """What a micro-batch uses: a lookup result for the output dist."""
        pooling_M, weights_N = self.layout.pooling_KM[index], self.layout.weights_N
        if weights_N is not None:
            weights_N = torch.cat([weights_N[pooling.lookups] for pooling in pooling_M])
        return MicroRows(
            step=self,
            index=index,
            gradient_places_M=[pooling.gradient_place_U for pooling in pooling_M],
            pooling_M=[pooling.index for pooling in pooling_M],
            lookups_M=[p.lookups.stop - p.lookups.start for p in pooling_M],
            batch_size=self.layout.sizes_K[index],
            weights_N=weights_N,
        )

    def arrive(self, index: int) -> Iterator[Tensor]:
        """Rows of one matrix after the other, those of the chunks up to a micro-batch's filled."""
        for matrix, packs in zip(self._matrices, self._packs_M):
            for pack in packs:
                pack.arrive(index)
            yield matrix.rows

    # -- gradients -----------------------------------------------------------------------------

    def add_gradients(self, gradient_places_M: Sequence[Tensor], grads_M: Sequence[Tensor]) -> None:
        """Adds a micro-batch's gradients to those of the later ones."""
        for matrix, places, grads in zip(self._matrices, gradient_places_M, grads_M):
            matrix.sums.index_add_(0, places, grads)

    def send_gradients(self, chunk: int, wave: int | None = None) -> None:
        """Starts sending the gradients of a chunk home. Collective.

        Its micro-batch has run backward, and so have all later ones.
        """
        packs = self._packs_of(wave)
        if not packs:
            return
        gradients = PackedAllToAll(
            self._pg,
            [pack.gradients(chunk) for pack in packs],
            [pack.layout.mine.counts_EW[chunk] for pack in packs],
            [pack.room_for_gradients(chunk) for pack in packs],
            [pack.layout.asked.counts_EW[chunk] for pack in packs],
            self._backward_codec,
        )
        for pack in packs:
            pack.sent_by(gradients)

    def reduce_hot(self, wave: int | None = None) -> None:
        """Starts summing the gradients of touched replicas over ranks. Collective."""
        packs = self._packs_of(wave)
        if not packs:
            return
        hot = HotReduction(
            self._pg,
            [pack.hot_gradients() for pack in packs],
            [
                torch.searchsorted(pack.layout.touched_slots, pack.layout.hot_slots)
                for pack in packs
            ],
            [pack.room_for_hot_gradients() for pack in packs],
        )
        for pack in packs:
            pack.reduced_by(hot)

    def update(self, wave: int | None = None) -> None:
        """Waits for all gradients and updates every row once, at home and at the replicas."""
        num_ranks = self._pg.size() if get_gradient_division() else 1
        for pack in self._packs_of(wave):
            pack.update(num_ranks)
