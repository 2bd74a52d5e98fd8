"""Drives a batch's rows where no schedule does: fetched in forward, updated at backward's end.

Backward only *sends* gradients. When the whole graph has run, the engine calls back, and every row
is updated once: with what arrived at home and what was reduced for the replicas, from however many
lookups of the module the graph held. Until then the exchange hides behind the rest of backward.
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
from torchrec_picasso.rows.request import laid_out_again

__all__ = ["InBackwardDriver"]


class InBackwardDriver:
    """The driver of a module that TorchRec's forward and the engine's backward run.

    Args:
        group: The module's tables.
    """

    def __init__(self, group: RowGroup) -> None:
        self._group = group
        self._backward = -1
        self._in_flight: list[BatchGradients] = []

    def fetch(self, layout: RowLayout, weights_N: Tensor | None) -> PartRows:
        """Starts fetching the rows of a batch, which is one part. Collective.

        Args:
            layout: Of the batch.
            weights_N: Per-sample weights in KeyedJaggedTensor order, with their graph.
        """
        if layout.hot_epoch != self._group.hot.epoch:
            layout = laid_out_again(self._group, layout)
        group, asked = self._group, None
        if group.hot.num_rows:  # homes are read here, so a write into them needs no word
            flags = Flags(homes_written=group.was_written())
            asked = Agreement(group.ranks.pg, group.device, flags)
        rows = BatchRows(group, layout)
        rows.fetch_dirty(0)
        if asked is not None and asked.wait().homes_written:
            group.take_writes()
        rows.read_hot()
        return rows.hand_out(0, partial(self._send, layout), weights_N, once=True)

    def _send(self, layout: RowLayout, grads_M: Sequence[Tensor]) -> None:
        """Sends a batch's gradients and asks for the update; called in backward. Collective."""
        if layout.hot_epoch != self._group.hot.epoch:
            raise PicassoError(
                "hot rows changed between a forward and its backward; change them between steps"
            )
        backward = torch._C._current_graph_task_id()
        if backward != self._backward:
            self._in_flight.clear()  # left by a backward that raised before its end
            self._backward = backward
        gradients = BatchGradients(self._group, layout)  # anew, for a graph may be walked again
        gradients.add(0, grads_M)
        gradients.send(0)
        gradients.reduce_hot()
        self._in_flight.append(gradients)
        Variable._execution_engine.queue_callback(self._update)

    def _update(self) -> None:
        in_flight, self._in_flight = self._in_flight, []
        if in_flight:
            update_rows(self._group, in_flight)
