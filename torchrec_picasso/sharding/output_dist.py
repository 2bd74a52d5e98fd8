"""Rows arrive and are pooled where the batch is; in backward their gradients leave from here.

Of sequences nothing is pooled: each lookup gets its row.

The autograd graph holds no optimizer: its leaf is an anchor, and what hangs on it only fetches and
pools rows; its backward hands the rows' gradients to whoever drives the batch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torchrec.distributed.types import Awaitable

from torchrec_picasso._torchrec import BaseEmbeddingDist, EmbeddingShardingContext
from torchrec_picasso.ops.pack_plan import PackPlan
from torchrec_picasso.ops.segment_reduction import (
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

    def _wait_impl(self) -> Tensor:
        with torch.set_grad_enabled(self._needs_grad and torch.is_grad_enabled()):
            return self._pool()

    def _pool(self) -> Tensor:
        rows = self._rows
        scales_M = [mean_weights(w, p.index) for w, p in zip(rows.weights_M, rows.pooling_M)]
        pooled_M = _PoolArrivals.apply(self._anchor, rows, *scales_M)
        if not self._plan.has_bags:
            (rows_ND,) = pooled_M  # tables of one collection have one dim
            return rows_ND
        if rows.batch_size is None:
            return torch.cat([pooled.view(-1) for pooled in pooled_M])
        # (B * F_m, D_m) -> (B, F_m * D_m)
        outputs = [
            pooled.view(rows.batch_size, num_features * pooled.size(1))
            for pooled, num_features in zip(pooled_M, self._plan.features_M)
        ]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)


class _PoolArrivals(Function):
    """Waits for rows and pools them; backward sends the rows' gradients away."""

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, rows: PartRows, *weights_M: Tensor | None
    ) -> tuple[Tensor, ...]:
        ctx.sink = rows.sink
        ctx.index_M = [pooling.index for pooling in rows.pooling_M]
        ctx.rows_M, pooled_M = [], []
        needed_M = ctx.needs_input_grad[2:]
        # a matrix is pooled while the next one may be on its way
        for rows_UD, weights, index, needed in zip(rows.arrive(), weights_M, ctx.index_M, needed_M):
            pooled_M.append(pool_rows(rows_UD, weights, index))
            # only a weight's gradient needs the rows; else nothing should keep them in memory
            ctx.rows_M.append(rows_UD if needed else None)
        if not any(needed_M):
            rows.end()
        ctx.save_for_backward(*weights_M)
        return tuple(pooled_M)

    @staticmethod
    def backward(ctx: Any, *grads_M: Tensor) -> tuple[Tensor | None, ...]:
        weights_M, index_M = ctx.saved_tensors, ctx.index_M
        ctx.sink(list(map(gradient_of_rows, grads_M, weights_M, index_M)))
        weight_grads_M = [
            None if rows is None else gradient_of_weights(grad_SD, rows, index)
            for grad_SD, rows, index in zip(grads_M, ctx.rows_M, index_M)
        ]
        return None, None, *weight_grads_M
