"""The gradients of one batch's rows: summed over micro-batches, sent to home ranks, applied once.

The gradients of a chunk are complete once every micro-batch that uses its rows has run backward
(``schedule/schedule.py``). Gradients that arrive at the home rank, and the sums for the replicas,
are kept until the update, which applies each row's gradient once.

Shape letters: K micro-batches and chunks, M matrices, P packs; n home rows that ranks asked for, t
touched hot rows, m = n + t, D dim.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial

import torch
from torch import Tensor

from torchrec_picasso.exchange.packed import HotReduction, Payload
from torchrec_picasso.exchange.waiting import Pending
from torchrec_picasso.rows.group import Matrices, RowGroup
from torchrec_picasso.rows.request import RowLayout
from torchrec_picasso.rows.route import IncomingRequests, PackLayout
from torchrec_picasso.storage.row_storage import TouchedHot


class BatchGradients:
    """Gradients of one batch."""

    def __init__(self, group: RowGroup, layout: RowLayout) -> None:
        self._group = group
        self.layout = layout
        self._sums_M: list[Tensor | None] = [None] * len(layout.num_rows_M)
        # One matrix per pack, shape (m, D): gradients of home rows, then sums for touched replicas.
        buffers_P = [group.buffers_M[pack.matrix] for pack in layout.packs]
        num_rows_P = [pack.served.num_rows + pack.touched.slots_t.numel() for pack in layout.packs]
        self._arrived_P = Matrices(buffers_P, num_rows_P)
        self._relayed_P = Matrices(
            buffers_P, [pack.relay.asked.num_rows if pack.relay else 0 for pack in layout.packs]
        )
        """Gradients that this rank relays, in request order."""
        self._by_chunk_P: dict[int, list[tuple[Tensor, Tensor]]] = {}
        """Views of the sums, and of the gradients that arrive, by pack and chunk."""
        self._pending_P: list[list[Pending]] = [[] for _ in layout.packs]
        self._packs_left = set(range(len(layout.packs)))

    def add(self, micro_batch: int, grads_M: Sequence[Tensor], module: int = 0) -> None:
        """Adds the gradients of a micro-batch's rows, ``(n, D_m)`` by matrix of the module. With
        one micro-batch they are the sums."""
        for matrix, grads in zip(self._group.plan.modules[module], grads_M):
            if len(self.layout.sizes_K) == 1:  # gradients are in request order
                self._sums_M[matrix] = grads
            else:
                assert self._packs_left, "a batch's backward runs before its update"
                pooling = self.layout.pooling_KM[micro_batch][matrix]
                pooling.add_gradients(self._sums_of(matrix), grads)

    def send(self, chunk: int, wave: int | None = None) -> None:
        """Starts sending the gradients of a chunk to the home ranks. Collective. Requires that
        every micro-batch that uses the chunk's rows has run backward."""
        packs, grads_P = self._in_wave(wave)
        if not packs:
            return
        # A chunk is a slice of the sums here and of the gradients at the home rank: both are in
        # request order, so no reordering is needed.
        payloads: list[Payload] = []
        relayed: list[Callable[[], Payload]] = []
        for p, pack, grads_mD in zip(self._group.plan.packs_of(wave), packs, grads_P):
            if p not in self._by_chunk_P:
                arrived_K = grads_mD.split([*pack.served.sizes, pack.touched.slots_t.numel()])
                sums_K = pack.cut(self._sums_of(pack.matrix), pack.wanted)
                self._by_chunk_P[p] = list(zip(sums_K, arrived_K))
            sums, into = self._by_chunk_P[p][chunk]
            served_W = pack.served.counts_EW[chunk]
            if pack.relay is not None:
                passing, asked = self._relayed_P.tensors[p], pack.relay.asked
                relayed.append(partial(pack.relay.sums, passing, chunk, into, served_W))
                into, served_W = passing[asked.slice_of(chunk)], asked.counts_EW[chunk]
            payloads.append(Payload(sums, pack.wanted.counts_EW[chunk], into, served_W))
        pending = self._group.exchanges.start(
            payloads,
            lambda: [payload() for payload in relayed],
            self.layout.most_asked,
            self._group.ranks.gradient_codec,
            to_homes=True,
        )
        self._pend(wave, pending)

    def reduce_hot(self, wave: int | None = None) -> None:
        """Starts summing the gradients of touched replicas over all ranks. Collective."""
        packs, grads_P = self._in_wave(wave)
        if not any(pack.touched.slots_t.numel() for pack in packs):  # on all ranks alike
            return
        # This rank's h hot rows are a subset of the t touched rows of all ranks.
        reduction = HotReduction(
            self._group.exchanges.start_sum,
            [self._sums_of(pack.matrix)[pack.hot_slice] for pack in packs],
            [pack.used.positions_h for pack in packs],
            [grads_mD[pack.served.num_rows :] for pack, grads_mD in zip(packs, grads_P)],
        )
        self._pend(wave, reduction)

    def _pend(self, wave: int | None, pending: Pending) -> None:
        """Records what the update of the packs of a wave waits for."""
        for p in self._group.plan.packs_of(wave):
            self._pending_P[p].append(pending)

    def _in_wave(self, wave: int | None) -> tuple[list[PackLayout], list[Tensor]]:
        """Returns the packs of a wave, and the gradients that arrive for their rows."""
        packs = self._group.plan.packs_of(wave)
        return [self.layout.packs[p] for p in packs], [self._arrived_P.tensors[p] for p in packs]

    def _sums_of(self, matrix: int) -> Tensor:
        """Returns the sums ``(R, D_m)`` of a matrix; zeros if no micro-batch ran backward."""
        sums = self._sums_M[matrix]
        if sums is None:
            # no row buffer: a third one would be idle in forward, when a step holds the most
            shape = self.layout.num_rows_M[matrix], self._group.plan.dim_M[matrix]
            sums = torch.zeros(shape, dtype=torch.float32, device=self._group.device)
            self._sums_M[matrix] = sums
        return sums

    def arrived(self, p: int) -> tuple[IncomingRequests, TouchedHot, Tensor]:
        """Waits for all gradients of pack ``p``.

        Returns the requests for its home rows, its touched hot rows, and the gradients of both,
        ``(m, D)``.
        """
        assert self._pending_P[p], "gradients are sent and reduced before the update"
        for pending in self._pending_P[p]:
            pending.wait()
        self._pending_P[p] = []
        pack = self.layout.packs[p]
        return pack.requests, pack.touched, self._arrived_P.tensors[p]

    def end(self, p: int) -> bool:
        """Marks the gradients of pack ``p`` as used; for the last pack, frees them and is true."""
        self._packs_left.discard(p)
        if self._packs_left:
            return False
        self._by_chunk_P.clear()
        self._arrived_P.release()
        self._relayed_P.release()
        self._sums_M = [None] * len(self._sums_M)
        return True


def update_rows(
    group: RowGroup,
    gradients: Sequence[BatchGradients],
    wave: int | None = None,
    untrained: Collection[int] = (),
) -> bool:
    """Waits for gradients and updates every row once, on home ranks and in replicas.

    The gradients are those of one batch, or of all lookups of one backward. Rows of the modules
    ``untrained`` are not updated. Returns whether all packs are updated now.
    """
    divisor = group.ranks.gradient_divisor
    are_updated = False
    packs_of_wave = group.plan.packs_of(wave)
    arrived_P = [_joined([batch.arrived(p) for batch in gradients]) for p in packs_of_wave]
    # Ranks sent sums; TorchRec trains with their mean.
    if divisor > 1 and arrived_P:
        torch._foreach_div_([grads for _, _, grads in arrived_P], divisor)
    for p, (requests, touched, grads) in zip(packs_of_wave, arrived_P):
        storage, packs = group.storages[p], [batch.layout.packs[p] for batch in gradients]
        if group.plan.module_M[packs[0].matrix] not in untrained:
            requests.update(storage, touched, grads)
        # Rows of untrained modules are counted and released as well.
        for batch, pack in zip(gradients, packs):
            if storage.uses is not None:
                storage.uses.count(pack.requests.asked_rows_n, pack.used.slots_h)
            are_updated = batch.end(p)
    return are_updated


def _joined(
    arrived: Sequence[tuple[IncomingRequests, TouchedHot, Tensor]],
) -> tuple[IncomingRequests, TouchedHot, Tensor]:
    """Merges the requests, hot rows and gradients of several batches, home rows before hot rows."""
    if len(arrived) == 1:
        return arrived[0]
    requests, touched, grads = zip(*arrived)
    # Each gradient is (n + t, D): the first n rows belong to home rows, the rest to hot rows.
    home = [grad[: own.served_by_fetch.num_rows] for grad, own in zip(grads, requests)]
    hot = [grad[own.served_by_fetch.num_rows :] for grad, own in zip(grads, requests)]
    return requests[0].joined(requests), TouchedHot.joined(touched), torch.cat([*home, *hot])
