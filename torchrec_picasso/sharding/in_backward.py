"""The driver without a schedule: requests rows in the input dist, fetches them in the lookup, and
updates them at the end of backward.

TorchRec's input dist is two awaitables: of the header, and of the ids. All of it runs ahead of the
step that needs the rows. The features carry the layout of their rows to the lookup.

Backward itself only *sends* gradients. After the whole graph has run, the autograd engine calls
back, and every row is updated once, from the gradients that arrived at its home rank and those
reduced for the replicas, for any number of lookups of the module in the graph. Until then the
exchange of gradients overlaps with the rest of backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable
from torchrec.distributed.embedding_types import BaseEmbeddingLookup, GroupedEmbeddingConfig
from torchrec.distributed.types import Awaitable
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_picasso._torchrec import (
    BaseEmbedding,
    BaseSparseFeaturesDist,
    GroupedEmbeddingsLookup,
    GroupedPooledEmbeddingsLookup,
)
from torchrec_picasso.batches.members import made_like
from torchrec_picasso.errors import CompatError, PicassoError
from torchrec_picasso.exchange.agreement import Flags
from torchrec_picasso.exchange.by_host import FlagsAgreement
from torchrec_picasso.ops.streams import tensors_in
from torchrec_picasso.placement import FORMS
from torchrec_picasso.rows.batch_gradients import BatchGradients, update_rows
from torchrec_picasso.rows.batch_rows import BatchRows, MicroBatchRows
from torchrec_picasso.rows.group import RowGroup
from torchrec_picasso.rows.request import RowLayout, RowRequest, with_new_layout
from torchrec_picasso.sharding.delta_tracker import RecordLookup, row_tracker
from torchrec_picasso.sharding.output_dist import Later
from torchrec_picasso.storage.torchrec_kernel import HotColdKernel


class RequestDist(BaseSparseFeaturesDist[KeyedJaggedTensor]):
    """Requests a batch's rows from their home ranks, as one micro-batch and without lookahead."""

    def __init__(self, group: RowGroup) -> None:
        super().__init__()
        self._group = group
        self.validated: Sequence[KeyedJaggedTensor] = ()
        """The result of :func:`.valid_features` for the module's next input. TorchRec may pad that
        input and make its ids unique, in features of its own type, before it calls ``forward``."""

    def forward(
        self, sparse_features: KeyedJaggedTensor
    ) -> Awaitable[Awaitable[KeyedJaggedTensor]]:
        """Starts the request. Collective. The inner awaitable returns the features with their
        layout."""
        validated, self.validated = self.validated, ()
        self._group.check(sparse_features)
        with torch.no_grad():
            request = RowRequest(self._group, [sparse_features], validated=validated)

        @torch.no_grad()
        def after_header() -> Awaitable[KeyedJaggedTensor]:
            request.send_row_numbers()  # all ranks know the counts of requested rows
            return Later(after_ids)

        @torch.no_grad()
        def after_ids() -> KeyedJaggedTensor:
            request.receive_row_numbers()  # home ranks know the requested rows
            return LaidOutFeatures.attach(sparse_features, request.build_layout())

        return Later(after_header)


class LaidOutFeatures(KeyedJaggedTensor):
    """The rank's features, carrying the layout of their rows through the pipeline.

    The lookup needs a KeyedJaggedTensor because feature processors and trackers run between the
    input dist and the lookup. A feature processor builds a new KeyedJaggedTensor but keeps the
    tensor of the ids, so the layout is an attribute of that tensor.
    """

    @staticmethod
    def attach(features: KeyedJaggedTensor, layout: RowLayout) -> LaidOutFeatures:
        """Wraps ``features`` without a copy of their data."""
        # detach() makes a new tensor object on the same memory; the caller's gets no attribute
        values = features.values().detach()
        values._row_layout = layout
        own = {"values": values, "offsets": features.offsets_or_none()}
        return made_like(features, LaidOutFeatures, **own)

    def record_stream(self, stream: torch.Stream) -> None:
        """Records ``stream`` on all tensors of the features and their layout."""
        super().record_stream(stream)
        for tensor in tensors_in(layout_of(self)):
            tensor.record_stream(stream)


def layout_of(features: Any) -> RowLayout:
    """Finds the layout of features that came out of the input dist.

    Raises CompatError if the ids were replaced between the input dist and the lookup.
    """
    layout: RowLayout | None = getattr(features.values(), "_row_layout", None)
    if layout is None:
        raise CompatError(
            "the ids changed between input_dist and lookup; hot/cold tables allow changed weights "
            "there (feature processors), but no changed ids: change them before the batch comes "
            "to the module, or place its tables without HotColdParams"
        )
    return layout


class _HotColdLookup(BaseEmbeddingLookup[KeyedJaggedTensor, Tensor]):
    """Drives one module's rows from TorchRec's forward and the autograd engine's backward.

    Shared by pooled and sequence lookups, which keep the packs' kernels.

    TorchRec's lookup makes one kernel per pack with tables that this rank saves. A row-wise table
    is saved by every rank, with or without rows there; a table of one home rank only by that rank.
    """

    def __init__(self, configs: Sequence[GroupedEmbeddingConfig], group: RowGroup) -> None:
        self._group = group
        self._graph_task = -1  # the autograd engine's id of the backward that sends gradients
        self._sent: list[BatchGradients] = []
        owned = {t.name for t in group.tables if FORMS[t.route].sends_bags}
        tables_P = [config.embedding_tables for config in configs]
        saved_P = [[t for t in ts if t.local_rows or t.name not in owned] for ts in tables_P]
        # Kernels are numbered by this list, not by pack.
        self._storages = [rows for rows, saved in zip(group.storages, saved_P) if saved]
        pairs = zip(configs, saved_P)
        kept = [replace(config, embedding_tables=saved) for config, saved in pairs if saved]
        super().__init__(grouped_configs=kept, device=group.device, pg=group.ranks.pg)

    def _create_embedding_kernel(self, config: GroupedEmbeddingConfig, *_: object) -> BaseEmbedding:
        return HotColdKernel(config, self._storages[len(self._emb_modules)], self._group.ranks)

    def forward(self, sparse_features: LaidOutFeatures | MicroBatchRows) -> MicroBatchRows:
        """Starts to fetch the rows of a batch. Collective. Rows of a micro-batch that a schedule
        fetches are returned unchanged."""
        rows = sparse_features
        if not isinstance(rows, MicroBatchRows):
            # sequences have no use for weights
            rows = self._fetch(layout_of(rows), rows.weights_or_none())
        if self.optim_state_tracker_fn is not None:
            self.optim_state_tracker_fn(rows)
        return rows

    def register_optim_state_tracker_fn(self, record_fn: RecordLookup) -> None:
        """Registers TorchRec's delta tracker, for its modes with optimizer state."""
        self.optim_state_tracker_fn = row_tracker(record_fn, self._group, list(self._emb_modules))

    def _fetch(self, layout: RowLayout, weights_N: Tensor | None) -> MicroBatchRows:
        """Starts to fetch the rows of a batch, which is one micro-batch. Collective.

        ``weights_N`` are per-sample weights in KeyedJaggedTensor order, with their graph. The
        returned rows may still be on their way.
        """
        # a refresh since the input dist has changed the slots of hot rows
        if layout.hot_epoch != self._group.hot_epoch:
            layout = with_new_layout(self._group, layout)
        group, agreement = self._group, None
        # A write to a home row outdates its replicas. Home rows themselves are read only now, so
        # without hot rows no rank has to be told.
        if group.num_hot_rows:
            flags = Flags(homes_written=group.was_written())
            agreement = FlagsAgreement(group.ranks.pg, group.device, flags)
        rows = BatchRows(group, layout)
        rows.fetch_dirty(0)  # without lookahead all rows are in this exchange
        if agreement is not None and agreement.wait().homes_written:
            group.apply_writes()
        rows.read_hot()
        # other ranks wait for rows that this rank relays, and it may never look at its own
        rows.relay(0)
        return rows.acquire(0, partial(self._send, layout), weights_N, is_last=True)

    def _send(self, layout: RowLayout, grads_M: Sequence[Tensor]) -> None:
        """Sends a batch's gradients, ``(R, D)`` by matrix, and queues the update; runs in backward.
        Collective. ``layout`` is that of the forward's fetch."""
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


class HotColdPooledLookup(_HotColdLookup, GroupedPooledEmbeddingsLookup):
    """This rank's part of a sharded EmbeddingBagCollection."""


class HotColdSequenceLookup(_HotColdLookup, GroupedEmbeddingsLookup):
    """This rank's part of a sharded EmbeddingCollection."""
