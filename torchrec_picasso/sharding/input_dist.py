"""From a batch's features to ids at their homes: unique, partition, header, ids all-to-all.

Two awaitables, as TorchRec's pipelines expect: the first ends when the header is known, the second
when the ids have arrived. Everything here runs ahead of the step that needs it.

Host syncs per batch on CUDA: the number of unique rows, the header.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise

import torch
import torch.distributed as dist
from torch import Tensor
from torchrec.distributed.types import Awaitable
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_picasso._torchrec import BaseSparseFeaturesDist
from torchrec_picasso.exchange.header import HeaderExchange, StepHeader
from torchrec_picasso.exchange.packed_all_to_all import PackedAllToAll
from torchrec_picasso.ops.bags import Bags, bag_order, reorder_bags
from torchrec_picasso.ops.first_use import first_use_chunks
from torchrec_picasso.ops.micro_pooling import micro_batch_of_lookup
from torchrec_picasso.ops.packed_ids import PackedIdSpace
from torchrec_picasso.ops.partition import RowPartition, locate_rows, partition_rows
from torchrec_picasso.ops.segment_reduction import PoolingIndex
from torchrec_picasso.ops.unique import unique_rows
from torchrec_picasso.sharding.bad_input import raise_on_bad_input
from torchrec_picasso.sharding.chunked_batch import ChunkedBatch, Interleaving
from torchrec_picasso.sharding.exchanged_batch import ExchangedBatch, ExchangedFeatures

__all__ = ["PackedInputDist"]


@dataclass(frozen=True)
class _LocalBatch:
    """A batch made unique and partitioned, before any rank knows of the others."""

    features: KeyedJaggedTensor
    bags: Bags
    rows: RowPartition
    batch_size: int | None
    bags_M: Sequence[int]
    mean_M: Sequence[Tensor | None]


class PackedInputDist(BaseSparseFeaturesDist[KeyedJaggedTensor]):
    """Makes a batch's rows unique across all tables and asks their homes for them.

    Args:
        pg: Process group.
        space: The packed id space of the module.
        replicas_stale: Tells whether this rank's homes were written from outside.
        check_weights: Whether per-sample weights must be finite.
        interleaving: How the next batch is cut, if it is.
    """

    def __init__(
        self,
        pg: dist.ProcessGroup,
        space: PackedIdSpace,
        replicas_stale: Callable[[], bool],
        check_weights: bool,
        interleaving: Interleaving,
    ) -> None:
        super().__init__()
        self._pg = pg
        self._space = space
        self._replicas_stale = replicas_stale
        self._check_weights = check_weights
        self._interleaving = interleaving
        self._order_of_batch_size: tuple[int, Tensor] | None = None
        self._mean_MF = torch.tensor(space.mean_F).split(list(space.features_M))
        self._mean_on_device: list[Tensor | None] | None = None
        self._any_mean_M = [bool(mean_F.any()) for mean_F in self._mean_MF]

    def forward(
        self, sparse_features: KeyedJaggedTensor
    ) -> Awaitable[Awaitable[KeyedJaggedTensor]]:
        """Starts the exchange of one batch. Collective."""
        space = self._space
        with torch.no_grad():
            features = sparse_features
            lookups_F = _lookups_per_feature(features)
            packed_N, outside_N = space.pack_ids(features.values(), lookups_F)
            send_header = partial(
                HeaderExchange,
                self._pg,
                outside_ids=outside_N.sum(),
                bad_weights=self._bad_weights(features),
                homes_written=self._replicas_stale(),
                has_data=self._interleaving.has_data,
            )
            if self._interleaving.sizes_K is not None:
                return self._chunked(features, packed_N, self._interleaving.sizes_K, send_header)
            local = self._partition(features, packed_N)
            header = send_header(
                counts_PB=local.rows.located.counts_PB,
                lookups_M=_sum_by_matrix(lookups_F, space.features_M),
                touched_H=local.rows.located.touched_H,
                hot_start_P1=space.hot_start_P1,
            )
        return _HeaderAwaitable(self._pg, space, local, header)

    def _chunked(
        self,
        features: KeyedJaggedTensor,
        packed_N: Tensor,
        sizes_K: Sequence[int],
        send_header: Callable[..., HeaderExchange],
    ) -> ChunkedBatch:
        """Makes an interleaved batch unique and sends its header."""
        space, num_chunks = self._space, len(sizes_K)
        order_S = self._bag_order(features.stride(), packed_N.device)
        weighted = features.weights_or_none() is not None
        bags = reorder_bags(packed_N, features.lengths(), order_S, keep_source=weighted)
        rows = unique_rows(bags.ids_N)
        micro_batch_N = micro_batch_of_lookup(bags, space.features_M, sizes_K)
        chunk_U = first_use_chunks(rows, micro_batch_N, num_chunks)
        located = locate_rows(rows.ids_U, space, chunk_U, num_chunks)
        # to the header a (pack, chunk) is a pack; hot rows stand in a pack's first
        counts_PB = located.counts_PB
        pairs = counts_PB.new_zeros(space.num_packs, num_chunks, 1 + space.world_size)
        pairs[:, 0, 0] = counts_PB[:, 0]
        pairs[:, :, 1:] = counts_PB[:, 1:].view(space.num_packs, num_chunks, -1)
        hot_start_P1 = space.hot_start_P1
        ends = [end for end in hot_start_P1[1:] for _ in range(num_chunks)]
        header = send_header(
            counts_PB=pairs.view(-1, 1 + space.world_size),
            lookups_M=counts_PB.new_empty(0),  # cut_pooling finds them
            touched_H=located.touched_H,
            hot_start_P1=[0, *ends],
        )
        return ChunkedBatch(
            features=features,
            bags=bags,
            sizes_K=sizes_K,
            rows=rows,
            micro_batch_N=micro_batch_N,
            located=located,
            mean_MF=self._mean_on(packed_N.device),
            header=header,
        )

    def _partition(self, features: KeyedJaggedTensor, packed_N: Tensor) -> _LocalBatch:
        space = self._space
        weighted = features.weights_or_none() is not None
        if features.variable_stride_per_key():
            batch_size, order_S = None, None
            strides = features.stride_per_key()
            ends = [0, *accumulate(space.features_M)]
            strides_M = [strides[start:end] for start, end in pairwise(ends)]
            bags_M = [sum(strides_F) for strides_F in strides_M]
            means = [
                mean_F.repeat_interleave(torch.tensor(strides_F))
                for mean_F, strides_F in zip(self._mean_MF, strides_M)
            ]
        else:
            batch_size = features.stride()
            order_S = self._bag_order(batch_size, packed_N.device)
            bags_M = [num_features * batch_size for num_features in space.features_M]
            means = [mean_F.repeat(batch_size) for mean_F in self._mean_MF]
        bags = reorder_bags(packed_N, features.lengths(), order_S, keep_source=weighted)
        rows = partition_rows(unique_rows(bags.ids_N), space)
        mean_M = [
            mean_S.to(packed_N.device, non_blocking=True) if any_mean else None
            for mean_S, any_mean in zip(means, self._any_mean_M)
        ]
        return _LocalBatch(features, bags, rows, batch_size, bags_M, mean_M)

    def _mean_on(self, device: torch.device) -> Sequence[Tensor | None]:
        """Which features of each matrix are averaged, copied to the device once."""
        if self._mean_on_device is None:
            self._mean_on_device = [
                mean_F.to(device) if any_mean else None
                for mean_F, any_mean in zip(self._mean_MF, self._any_mean_M)
            ]
        return self._mean_on_device

    def _bag_order(self, batch_size: int, device: torch.device) -> Tensor:
        if self._order_of_batch_size is None or self._order_of_batch_size[0] != batch_size:
            order_S = bag_order(self._space.features_M, batch_size, device)
            self._order_of_batch_size = (batch_size, order_S)
        return self._order_of_batch_size[1]

    def _bad_weights(self, features: KeyedJaggedTensor) -> Tensor:
        weights = features.weights_or_none()
        if not self._check_weights or weights is None:
            return torch.zeros((), dtype=torch.int64, device=features.values().device)
        return torch.isfinite(weights).logical_not().sum()


class _HeaderAwaitable(Awaitable[Awaitable[KeyedJaggedTensor]]):
    """Ends when every rank knows what the others ask for; starts the ids all-to-all."""

    def __init__(
        self,
        pg: dist.ProcessGroup,
        space: PackedIdSpace,
        local: _LocalBatch,
        header: HeaderExchange,
    ) -> None:
        super().__init__()
        self._pg = pg
        self._space = space
        self._local = local
        self._header = header

    def _wait_impl(self) -> Awaitable[KeyedJaggedTensor]:
        header = self._header.wait()
        raise_on_bad_input(header, self._space, self._local.features, rank=self._pg.rank())
        return _IdsAwaitable(self._pg, self._space, self._local, header)


class _IdsAwaitable(Awaitable[KeyedJaggedTensor]):
    """Ends when the homes know which rows they are asked for."""

    def __init__(
        self,
        pg: dist.ProcessGroup,
        space: PackedIdSpace,
        local: _LocalBatch,
        header: StepHeader,
    ) -> None:
        super().__init__()
        self._space = space
        self._local = local
        self._header = header
        # target_U is pack-major, hot rows first: alternate [hot, cold] parts of each pack
        parts = local.rows.located.target_U.split(
            [
                count
                for hot, send_W in zip(header.hot_P, header.send_PW)
                for count in (hot, sum(send_W))
            ]
        )
        self._hot_slots_P = parts[0::2]
        wire_dtype = space.home_row_dtype
        self._ids = PackedAllToAll(
            pg,
            [cold.to(wire_dtype) for cold in parts[1::2]],
            header.send_PW,
            [
                cold.new_empty(sum(counts_W), dtype=wire_dtype)
                for cold, counts_W in zip(parts[1::2], header.receive_PW)
            ],
            header.receive_PW,
        )

    def _wait_impl(self) -> KeyedJaggedTensor:
        header, space, local = self._header, self._space, self._local
        starts_P = space.hot_start_P1[:-1]
        touched_P = header.touched_slots_T.split(header.touched_P)
        batch = ExchangedBatch(
            header=header,
            hot_slots_P=[slots - start for slots, start in zip(self._hot_slots_P, starts_P)],
            touched_slots_P=[slots - start for slots, start in zip(touched_P, starts_P)],
            requested_rows_P=self._ids.wait(),
            pooling_M=_pooling_by_matrix(local, header, space.matrices),
            source_N=local.bags.source_N,
            lookups_M=header.lookups_M,
            batch_size=local.batch_size,
        )
        return ExchangedFeatures.of(local.features, batch)


def _lookups_per_feature(features: KeyedJaggedTensor) -> Tensor:
    """Lookups of each feature, int64, shape ``(F,)``; no host sync."""
    strides = torch.tensor(features.stride_per_key(), dtype=torch.int64)
    ends_F = strides.cumsum(0).to(features.values().device, non_blocking=True)
    offsets_F = features.offsets().to(torch.int64)[ends_F]
    return torch.diff(offsets_F, prepend=offsets_F.new_zeros(1))


def _sum_by_matrix(values_F: Tensor, features_M: Sequence[int]) -> Tensor:
    return torch.stack([part.sum() for part in values_F.split(list(features_M))])


def _pooling_by_matrix(
    local: _LocalBatch, header: StepHeader, matrices: Sequence[slice]
) -> list[PoolingIndex]:
    """Cuts the maps between lookups and rows into matrices, each counting from 0."""
    rows, offsets_S1 = local.rows, local.bags.offsets_S1
    lookups_S = torch.diff(offsets_S1)
    bags_by_row_N = torch.repeat_interleave(
        torch.arange(lookups_S.numel(), device=lookups_S.device),
        lookups_S,
        output_size=rows.row_of_lookup_N.numel(),
    ).index_select(0, rows.lookups_by_row_N)
    rows_M = [sum(header.rows_per_pack[packs]) for packs in matrices]
    indices = []
    row, bag, lookup = 0, 0, 0
    for num_rows, num_bags, num_lookups, mean_S in zip(
        rows_M, local.bags_M, header.lookups_M, local.mean_M
    ):
        lookups = slice(lookup, lookup + num_lookups)
        ends_u = rows.lookup_end_U[row : row + num_rows]
        indices.append(
            PoolingIndex(
                row_of_lookup_N=_shift(rows.row_of_lookup_N[lookups], row),
                bag_offsets_S1=_shift(offsets_S1[bag : bag + num_bags + 1], lookup),
                bags_by_row_N=_shift(bags_by_row_N[lookups], bag),
                lookups_by_row_N=_shift(rows.lookups_by_row_N[lookups], lookup),
                row_offsets_U1=torch.cat([ends_u.new_zeros(1), _shift(ends_u, lookup)]),
                mean_S=mean_S,
            )
        )
        row, bag, lookup = row + num_rows, bag + num_bags, lookup + num_lookups
    return indices


def _shift(values: Tensor, start: int) -> Tensor:
    return values - start if start else values
