"""Rows arrive and are pooled where the batch is; in backward their gradients leave from here.

Of sequences nothing is pooled: each lookup gets its row.

The autograd graph holds no optimizer: its leaf is an anchor, and what hangs on it only fetches and
pools rows; its backward hands the rows' gradients to whoever drives the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._dynamo import compiled_autograd
from torch.autograd import Function
from torchrec.distributed.types import Awaitable

from torchrec_picasso._torchrec import BaseEmbeddingDist, EmbeddingShardingContext
from torchrec_picasso.errors import CompatError
from torchrec_picasso.exchange.kept_memory import keep_for_current_stream
from torchrec_picasso.ops.bag_pack import PartBags
from torchrec_picasso.ops.pack_plan import PackPlan
from torchrec_picasso.ops.segment_reduction import (
    PoolingIndex,
    gradient_of_rows,
    gradient_of_weights,
    mean_weights,
    pool_rows,
)
from torchrec_picasso.rows.batch_rows import PartRows

__all__ = ["HotColdOutputDist"]


class HotColdOutputDist(BaseEmbeddingDist[EmbeddingShardingContext, PartRows, Tensor]):
    """Makes fetched rows a module's output.

    Args:
        plan: Matrices of rows and the features of each.
        device: Device of the rows.
    """

    def __init__(self, plan: PackPlan, device: torch.device) -> None:
        super().__init__()
        self._plan = plan
        self._anchor = torch.empty(0, device=device, requires_grad=True)

    def forward(
        self, local_embs: PartRows, sharding_ctx: EmbeddingShardingContext | None = None
    ) -> Awaitable[Tensor]:
        """Gives the awaitable of the output.

        Pooled: ``(B, sum of F_m * D_m)``, or flat, feature by feature, when every feature has its
        own batch size. Sequences: the row of each lookup ``(N, D)``, feature by feature.
        """
        return _OutputAwaitable(local_embs, self._plan, self._anchor)


class _OutputAwaitable(Awaitable[Tensor]):
    def __init__(self, rows: PartRows, plan: PackPlan, anchor: Tensor) -> None:
        super().__init__()
        self._rows = rows
        self._plan = plan
        self._anchor = anchor
        self._needs_grad = torch.is_grad_enabled()  # of the call; it is waited for at the first use

    @torch.compiler.disable  # a compiled dense part waits here, for messages it cannot trace
    def _wait_impl(self) -> Tensor:
        with torch.set_grad_enabled(self._needs_grad and torch.is_grad_enabled()):
            return self._pool()

    def _pool(self) -> Tensor:
        rows = self._rows
        scales_M = [
            None
            if isinstance(pooling, PartBags)
            else _scales(keep_for_current_stream(weights), pooling.index)
            for weights, pooling in zip(rows.weights_M, rows.pooling_M)
        ]
        pieces = _PoolArrivals.apply(self._anchor, rows, *scales_M)
        output = self._side_by_side(pieces)
        if not any(scale is not None and scale.requires_grad for scale in scales_M):
            rows.end()
        return output

    def _side_by_side(self, pieces: Sequence[Tensor]) -> Tensor:
        rows, plan = self._rows, self._plan
        if not plan.takes_weights:
            (rows_ND,) = pieces  # tables of one collection have one dim
            return rows_ND
        if rows.batch_size is None:
            return torch.cat([piece.view(-1) for piece in pieces])
        # (B * F_m, D_m) -> (B, F_m * D_m); bags that came pooled are so already
        pooled_M, bags = pieces[: plan.num_row_matrices], pieces[plan.num_row_matrices :]
        columns = [
            pooled.view(rows.batch_size, num_features * dim)
            for pooled, num_features, dim in zip(pooled_M, plan.features_M, plan.dim_M)
        ]
        if rows.own_sizes is not None:
            return _flat([*columns, *bags], self._dims(), rows.own_sizes)
        return columns[0] if len(pieces) == len(columns) == 1 else torch.cat([*columns, *bags], 1)

    def _dims(self) -> list[int]:
        """Columns of each feature's output."""
        features = zip(self._plan.features_M, self._plan.dim_M)
        return [dim for num_features, dim in features for _ in range(num_features)]


def _flat(columns: Sequence[Tensor], dims_F: Sequence[int], sizes_F: Sequence[int]) -> Tensor:
    """Outputs of features that were filled up, without what fills them up, feature by feature."""
    of_feature = torch.cat(list(columns), 1).split(list(dims_F), 1)
    return torch.cat([of[:size].reshape(-1) for of, size in zip(of_feature, sizes_F)])


def _scales(weights_N: Tensor | None, index: PoolingIndex) -> Tensor | None:
    return mean_weights(weights_N, index.bag_offsets_S1, index.mean_S, index.num_lookups)


class _PoolArrivals(Function):
    """Waits for rows and pools them; backward sends the rows' gradients away.

    Bags that came pooled are given as they lie in the rows' memory: who gets them copies them.
    """

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, rows: PartRows, *weights_M: Tensor | None
    ) -> tuple[Tensor, ...]:
        ctx.sink, ctx.pooling_M = rows.sink, rows.pooling_M
        ctx.rows_M, pieces_M = [], []
        needed_M = ctx.needs_input_grad[2:]
        # a matrix is pooled while the next one may be on its way
        for arrived, weights, pooling, needed in zip(
            rows.arrive(), weights_M, rows.pooling_M, needed_M
        ):
            if isinstance(pooling, PartBags):
                pieces_M.append(pooling.columns(arrived))
            else:
                pieces_M.append([pool_rows(arrived, weights, pooling.index)])
            # only a weight's gradient needs the rows; else nothing should keep them in memory
            ctx.rows_M.append(arrived if needed else None)
        ctx.num_pieces_M = list(map(len, pieces_M))
        ctx.save_for_backward(*weights_M)
        return tuple(piece for pieces in pieces_M for piece in pieces)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _backward(ctx, *grads)


_NOT_COMPILED = (
    "hot/cold tables do not support compiled autograd, which traces neither the messages that "
    "their gradients leave by nor the update at the end of backward; use TrainPipelineSparseDist "
    "or InterleavedTrainPipeline, and torch.compile for the dense part"
)


@torch.compiler.disable(reason=_NOT_COMPILED)
def _backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
    if compiled_autograd.in_compiled_autograd_region:
        raise CompatError(_NOT_COMPILED)
    weights_M, pooling_M = ctx.saved_tensors, ctx.pooling_M
    left = iter(grads)
    grads_M = [[next(left) for _ in range(num)] for num in ctx.num_pieces_M]
    ctx.sink(
        [
            pooling.gradients(of_matrix)
            if isinstance(pooling, PartBags)
            else gradient_of_rows(of_matrix[0], weights, pooling.index)
            for of_matrix, weights, pooling in zip(grads_M, weights_M, pooling_M)
        ]
    )
    weight_grads_M = [
        None if rows is None else gradient_of_weights(of_matrix[0], rows, pooling.index)
        for of_matrix, rows, pooling in zip(grads_M, ctx.rows_M, pooling_M)
    ]
    return None, None, *weight_grads_M
