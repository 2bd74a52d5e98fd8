"""The driver without a schedule: fetches rows in forward, updates them at the end of backward.

Backward itself only *sends* gradients. After the whole graph has run, the autograd engine calls
back, and every row is updated once, from the gradients that arrived at its home rank and those
reduced for the replicas, for any number of lookups of the module in the graph. Until then the
exchange of gradients overlaps with the rest of backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor
from torch.autograd import Variable

from torchrec_picasso.errors import PicassoError
from torchrec_picasso.exchange.agreement import Agreement, Flags
from torchrec_picasso.rows.batch_gradients import BatchGradients, update_rows
from torchrec_picasso.rows.batch_rows import BatchRows, PartRows
from torchrec_picasso.rows.group import RowGroup
from torchrec_picasso.rows.layout import RowLayout
from torchrec_picasso.rows.request import with_new_layout

__all__ = ["InBackwardDriver"]


class InBackwardDriver:
    """Drives one module's rows from TorchRec's forward and the autograd engine's backward."""

    def __init__(self, group: RowGroup) -> None:
        self._group = group
        self._graph_task = -1  # the autograd engine's id of the backward that sends gradients
        self._sent: list[BatchGradients] = []

    def fetch(self, layout: RowLayout, weights_N: Tensor | None) -> PartRows:
        """Starts to fetch the rows of a batch, which is one micro-batch. Collective.

        ``weights_N`` are per-sample weights in KeyedJaggedTensor order, with their graph. The
        returned rows may still be on their way.
        """
        # a refresh since the input dist has changed the slots of hot rows
        if layout.hot_epoch != self._group.hot_epoch:
            layout = with_new_layout(self._group, layout)
        group, agreement = self._group, None
        # Only replicas can be stale: home rows are read here, so writes to them need no message.
        if group.num_hot_rows:
            flags = Flags(homes_written=group.was_written())
            agreement = Agreement(group.ranks.pg, group.device, flags)
        rows = BatchRows(group, layout)
        rows.fetch_dirty(0)  # without lookahead all rows are in this exchange
        if agreement is not None and agreement.wait().homes_written:
            group.apply_writes()
        rows.read_hot()
        return rows.acquire(0, partial(self._send, layout), weights_N, is_last=True)

    def _send(self, layout: RowLayout, grads_M: Sequence[Tensor]) -> None:
        """Sends a batch's gradients, ``(R, D)`` by matrix, and queues the update; runs in backward.

        Collective. ``layout`` is that of the forward's fetch.
        """
        if layout.hot_epoch != self._group.hot_epoch:
            raise PicassoError(
                "hot rows changed between a forward and its backward; change them between steps"
            )
        graph_task = torch._C._current_graph_task_id()
        if graph_task != self._graph_task:
            self._sent.clear()  # gradients of a backward that raised before its end
            self._graph_task = graph_task
        # A graph may be walked several times (retain_graph), so its gradients are a new object.
        gradients = BatchGradients(self._group, layout)
        gradients.add(0, grads_M)
        gradients.send(0)
        gradients.reduce_hot()
        self._sent.append(gradients)
        Variable._execution_engine.queue_callback(self._update)

    def _update(self) -> None:
        """Updates the rows of all lookups in the graph; the first of several call-backs does it."""
        sent, self._sent = self._sent, []
        if sent:
            update_rows(self._group, sent)
