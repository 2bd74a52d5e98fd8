"""One update per row and backward, after its last gradient has arrived.

Backward only *sends* gradients. When the whole graph has run, the engine calls back, and every
pack is updated once over all (row, gradient) pairs: what arrived at home and what was reduced for
the replicas, from however many lookups of the module the graph held. Until then the exchange hides
behind the rest of backward.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Variable

from torchrec_picasso._torchrec import QuantizedCommCodec, get_gradient_division
from torchrec_picasso.exchange.hot_reduction import HotReduction
from torchrec_picasso.exchange.packed_all_to_all import PackedAllToAll
from torchrec_picasso.sharding.exchanged_batch import ExchangedBatch
from torchrec_picasso.sharding.row_matrix import cut_by_pack
from torchrec_picasso.storage.row_storage import RowStorage

__all__ = ["StepUpdate"]


class _GradientsInFlight:
    """Gradients of one fetched batch on their way to homes and replicas."""

    def __init__(
        self,
        pg: dist.ProcessGroup,
        batch: ExchangedBatch,
        grads_P: Sequence[Tensor],
        codec: QuantizedCommCodec | None,
    ) -> None:
        header = batch.header
        self.batch = batch
        self._world_size = pg.size()
        # (m, D) per pack: gradients that arrive for home rows, then sums for touched replicas
        self._buffers_P = [
            grads.new_empty(requested.numel() + touched.numel(), grads.size(1))
            for grads, requested, touched in zip(
                grads_P, batch.requested_rows_P, batch.touched_slots_P
            )
        ]
        cold_P = [requested.numel() for requested in batch.requested_rows_P]
        self._cold = PackedAllToAll(
            pg,
            [grads[hot:] for grads, hot in zip(grads_P, header.hot_P)],
            header.send_PW,
            [buffer[:cold] for buffer, cold in zip(self._buffers_P, cold_P)],
            header.receive_PW,
            codec,
        )
        self._hot = HotReduction(
            pg,
            [grads[:hot] for grads, hot in zip(grads_P, header.hot_P)],
            [
                torch.searchsorted(touched, own)
                for touched, own in zip(batch.touched_slots_P, batch.hot_slots_P)
            ],
            [buffer[cold:] for buffer, cold in zip(self._buffers_P, cold_P)],
        )

    def wait(self) -> Sequence[Tensor]:
        """Gradients of home rows asked for, then of touched replicas: ``(m, D)`` per pack."""
        self._cold.wait()
        self._hot.wait()
        if get_gradient_division() and self._world_size > 1:
            for buffer in self._buffers_P:
                buffer.div_(self._world_size)
        return self._buffers_P


class StepUpdate:
    """Collects a backward's gradients and updates the storages once, at its end.

    Args:
        pg: Process group.
        storages: One per pack.
        matrices: The packs of each matrix of rows.
        codec: Wire precision of gradients, or ``None`` for their own.
    """

    def __init__(
        self,
        pg: dist.ProcessGroup,
        storages: Sequence[RowStorage],
        matrices: Sequence[slice],
        codec: QuantizedCommCodec | None,
    ) -> None:
        self._pg = pg
        self._storages = storages
        self._matrices = matrices
        self._codec = codec
        self._backward = -1
        self._in_flight: list[_GradientsInFlight] = []

    def send(self, batch: ExchangedBatch, grads_M: Sequence[Tensor]) -> None:
        """Sends one batch's gradients and asks for the update; called in backward. Collective."""
        contiguous_M = [grads.contiguous() for grads in grads_M]
        grads_P = cut_by_pack(contiguous_M, self._matrices, batch.header.rows_per_pack)
        backward = torch._C._current_graph_task_id()
        if backward != self._backward:
            self._in_flight.clear()  # left by a backward that raised before its end
            self._backward = backward
        self._in_flight.append(_GradientsInFlight(self._pg, batch, grads_P, self._codec))
        Variable._execution_engine.queue_callback(self._apply)

    def _apply(self) -> None:
        in_flight, self._in_flight = self._in_flight, []
        if not in_flight:
            return
        arrived = [gradients.wait() for gradients in in_flight]
        batches = [gradients.batch for gradients in in_flight]
        for pack, storage in enumerate(self._storages):
            cold = [batch.requested_rows_P[pack] for batch in batches]
            hot = [batch.touched_slots_P[pack] for batch in batches]
            grads = [grads_P[pack] for grads_P in arrived]
            storage.update(torch.cat(cold), torch.cat(hot), _cold_then_hot(grads, cold))


def _cold_then_hot(grads: Sequence[Tensor], cold: Sequence[Tensor]) -> Tensor:
    if len(grads) == 1:
        return grads[0]
    return torch.cat(
        [grad[: rows.numel()] for grad, rows in zip(grads, cold)]
        + [grad[rows.numel() :] for grad, rows in zip(grads, cold)]
    )
