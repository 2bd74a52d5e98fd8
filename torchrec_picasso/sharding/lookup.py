"""The lookup: homes gather and send the rows they are asked for; replicas are read here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torchrec.distributed.embedding_types import GroupedEmbeddingConfig

from torchrec_picasso._torchrec import (
    BaseEmbedding,
    GroupedPooledEmbeddingsLookup,
    QuantizedCommCodecs,
)
from torchrec_picasso.exchange.packed_all_to_all import PackedAllToAll
from torchrec_picasso.ops.packed_ids import PackedIdSpace
from torchrec_picasso.sharding.arriving_rows import ArrivingRows, GradientSink
from torchrec_picasso.sharding.chunked_batch import ChunkedBatch
from torchrec_picasso.sharding.exchanged_batch import (
    ExchangedBatch,
    ExchangedFeatures,
    exchanged_batch,
)
from torchrec_picasso.sharding.interleaved_step import InterleavedStep, MicroRows
from torchrec_picasso.sharding.pack_rows import PackRows
from torchrec_picasso.sharding.row_layout import RowLayout
from torchrec_picasso.sharding.row_request import RowRequest
from torchrec_picasso.sharding.step_update import StepUpdate
from torchrec_picasso.storage.hot_homes import HotHomes
from torchrec_picasso.storage.row_buffers import RowBuffers
from torchrec_picasso.storage.row_storage import RowStorage

__all__ = ["HotColdLookup", "RowsInFlight"]


@dataclass(frozen=True, kw_only=True)
class RowsInFlight(ArrivingRows):
    """Rows on their way back to the whole batch that asked for them."""

    batch: ExchangedBatch
    rows_PUD: Sequence[Tensor]
    """Per pack ``(U_p, D_p)``: hot rows, then the space that cold rows arrive in."""
    arrival: PackedAllToAll
    update: StepUpdate

    @property
    def gradient_sink(self) -> GradientSink:
        """The step's update."""
        return partial(self.update.send, self.batch)

    def arrive(self) -> Iterator[Tensor]:
        """Waits for the rows."""
        self.arrival.wait()
        return iter(self.rows_PUD)


class HotColdLookup(GroupedPooledEmbeddingsLookup):
    """All packs of one sharded module on this rank.

    Args:
        configs: One per pack.
        space: The packed id space of the module.
        pg: Process group.
        device: Where the rows are.
        codecs: Wire precision of rows and gradients, or ``None`` for their own.
    """

    def __init__(
        self,
        configs: list[GroupedEmbeddingConfig],
        space: PackedIdSpace,
        pg: dist.ProcessGroup,
        device: torch.device,
        codecs: QuantizedCommCodecs | None,
    ) -> None:
        self._hot_homes_P = list(HotHomes.of_packs(space, pg.rank()))
        super().__init__(grouped_configs=configs, device=device, pg=pg)
        self._pg = pg
        self._storages: list[RowStorage] = list(self._emb_modules)
        self._space = space
        self._forward_codec = codecs.forward if codecs is not None else None
        self._backward_codec = codecs.backward if codecs is not None else None
        self._buffers_P = [RowBuffers(storage.dim, device) for storage in self._storages]
        self._update = StepUpdate(pg, self._storages, self._backward_codec)

    def _create_embedding_kernel(
        self,
        config: GroupedEmbeddingConfig,
        device: torch.device | None,
        pg: dist.ProcessGroup,
        *_: object,
    ) -> BaseEmbedding:
        hot_homes = self._hot_homes_P[len(self._emb_modules)]
        return RowStorage(config, hot_homes, pg, device or torch.device("cpu"))

    def replicas_stale(self) -> bool:
        """Whether this rank's homes were written from outside since its replicas were filled."""
        return any(storage.replicas_stale() for storage in self._storages)

    def request(self, batch: ChunkedBatch) -> RowRequest:
        """The request for the rows of a batch whose exchange a schedule drives."""
        return RowRequest(self._pg, self._space, self._storages, batch)

    def interleave(self, layout: RowLayout) -> InterleavedStep:
        """The step of a batch whose exchange a schedule drives."""
        return InterleavedStep(
            self._pg,
            list(map(PackRows, self._storages, self._buffers_P, layout.packs)),
            self._space.waves,
            self._forward_codec,
            self._backward_codec,
            layout,
        )

    def forward(self, sparse_features: ExchangedFeatures | MicroRows) -> ArrivingRows:
        """Gathers the rows that all ranks ask of this home and sends them. Collective.

        The rows of a micro-batch are on their way already and are passed on.
        """
        if isinstance(sparse_features, MicroRows):
            return sparse_features
        batch = exchanged_batch(sparse_features)
        with torch.no_grad():
            if batch.header.homes_written or self.replicas_stale():
                for storage in self._storages:
                    storage.fill_replicas()
            asked_P = [s.gather(rows) for s, rows in zip(self._storages, batch.requested_rows_P)]
            fetched_P = [
                asked.new_empty(hot + sum(send_W), asked.size(1))
                for asked, hot, send_W in zip(asked_P, batch.header.hot_P, batch.header.send_PW)
            ]
            arrival = PackedAllToAll(
                self._pg,
                asked_P,
                batch.header.receive_PW,
                [rows[hot:] for rows, hot in zip(fetched_P, batch.header.hot_P)],
                batch.header.send_PW,
                self._forward_codec,
            )
            for storage, slots, rows in zip(self._storages, batch.hot_slots_P, fetched_P):
                storage.gather_hot(slots, out_hD=rows[: slots.numel()])
        weights_N = sparse_features.weights_or_none()
        if weights_N is not None:
            weights_N = weights_N.float().index_select(0, batch.source_N)
        return RowsInFlight(
            pooling_P=batch.pooling_P,
            lookups_P=batch.lookups_P,
            batch_size=batch.batch_size,
            weights_N=weights_N,
            batch=batch,
            rows_PUD=fetched_P,
            arrival=arrival,
            update=self._update,
        )
