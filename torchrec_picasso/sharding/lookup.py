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
from torchrec_picasso.sharding.row_matrix import RowMatrix, cut_by_pack
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
    rows_M: Sequence[Tensor]
    """By matrix ``(U_m, D_m)``: of each pack hot rows, then the space that cold rows arrive in."""
    arrival: PackedAllToAll
    update: StepUpdate

    @property
    def gradient_sink(self) -> GradientSink:
        """The step's update."""
        return partial(self.update.send, self.batch)

    def arrive(self) -> Iterator[Tensor]:
        """Waits for the rows."""
        self.arrival.wait()
        return iter(self.rows_M)


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
        self._dim_M = [self._storages[packs.start].dim for packs in space.matrices]
        self._buffers_M = [RowBuffers(dim, device) for dim in self._dim_M]
        self._update = StepUpdate(pg, self._storages, space.matrices, self._backward_codec)

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
            [
                self._pack_rows(packs, buffers, layout)
                for packs, buffers in zip(self._space.matrices, self._buffers_M)
            ],
            self._space.waves,
            self._forward_codec,
            self._backward_codec,
            layout,
        )

    def _pack_rows(self, packs: slice, buffers: RowBuffers, layout: RowLayout) -> list[PackRows]:
        """The packs of one matrix in a batch."""
        layouts = layout.packs[packs]
        matrix = RowMatrix(buffers, [pack.num_rows for pack in layouts])
        return [
            PackRows(storage, pack, matrix, place)
            for storage, pack, place in zip(self._storages[packs], layouts, matrix.place_P)
        ]

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
            rows_P = batch.header.rows_per_pack
            rows_M = [
                asked_P[packs.start].new_empty(sum(rows_P[packs]), dim)
                for packs, dim in zip(self._space.matrices, self._dim_M)
            ]
            fetched_P = cut_by_pack(rows_M, self._space.matrices, rows_P)
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
            pooling_M=batch.pooling_M,
            lookups_M=batch.lookups_M,
            batch_size=batch.batch_size,
            weights_N=weights_N,
            batch=batch,
            rows_M=rows_M,
            arrival=arrival,
            update=self._update,
        )
