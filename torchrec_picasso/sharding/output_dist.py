"""Rows arrive and are pooled where the batch is; in backward their gradients leave from here.

The autograd graph holds no optimizer: its leaf is an anchor, and what hangs on it only fetches and
pools rows; its backward hands the rows' gradients to the step's update.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torchrec.distributed.types import Awaitable

from torchrec_picasso._torchrec import BaseEmbeddingDist, EmbeddingShardingContext
from torchrec_picasso.ops.segment_reduction import (
    gradient_of_rows,
    gradient_of_weights,
    mean_weights,
    pool_rows,
)
from torchrec_picasso.sharding.arriving_rows import ArrivingRows

__all__ = ["PooledOutputDist"]


class PooledOutputDist(BaseEmbeddingDist[EmbeddingShardingContext, ArrivingRows, Tensor]):
    """Pools fetched rows into the module's output.

    Args:
        features_P: Number of features of each pack.
        device: Device of the rows.
    """

    def __init__(self, features_P: Sequence[int], device: torch.device) -> None:
        super().__init__()
        self._features_P = features_P
        self._anchor = torch.empty(0, device=device, requires_grad=True)

    def forward(
        self, local_embs: ArrivingRows, sharding_ctx: EmbeddingShardingContext | None = None
    ) -> Awaitable[Tensor]:
        """Gives the awaitable of the pooled output: ``(B, sum of F_p * D_p)``, or flat, feature by
        feature, when every feature has its own batch size."""
        return _PooledAwaitable(local_embs, self._features_P, self._anchor)


class _PooledAwaitable(Awaitable[Tensor]):
    def __init__(self, rows: ArrivingRows, features_P: Sequence[int], anchor: Tensor) -> None:
        super().__init__()
        self._rows = rows
        self._features_P = features_P
        self._anchor = anchor

    def _wait_impl(self) -> Tensor:
        rows = self._rows
        weights_P: Sequence[Tensor | None] = [None] * len(rows.pooling_P)
        if rows.weights_N is not None:
            weights_P = rows.weights_N.split(list(rows.lookups_P))
        scales_P = [mean_weights(weights, i) for weights, i in zip(weights_P, rows.pooling_P)]
        pooled_P = _PoolArrivals.apply(self._anchor, rows, *scales_P)
        if rows.batch_size is None:
            return torch.cat([pooled.view(-1) for pooled in pooled_P])
        # (B * F_p, D_p) -> (B, F_p * D_p)
        outputs = [
            pooled.view(rows.batch_size, num_features * pooled.size(1))
            for pooled, num_features in zip(pooled_P, self._features_P)
        ]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)


class _PoolArrivals(Function):
    """Waits for rows and pools them; backward sends the rows' gradients away."""

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, rows: ArrivingRows, *weights_P: Tensor | None
    ) -> tuple[Tensor, ...]:
        ctx.send_gradients = rows.gradient_sink
        ctx.pooling_P = rows.pooling_P
        ctx.rows_P, pooled_P = [], []
        needed_P = ctx.needs_input_grad[2:]
        # a pack is pooled while the next one may be on its way
        for rows_MD, weights, index, needed in zip(
            rows.arrive(), weights_P, rows.pooling_P, needed_P
        ):
            pooled_P.append(pool_rows(rows_MD, weights, index))
            # only a weight's gradient needs the rows; else nothing should keep them in memory
            ctx.rows_P.append(rows_MD if needed else None)
        ctx.save_for_backward(*weights_P)
        return tuple(pooled_P)

    @staticmethod
    def backward(ctx: Any, *grads_P: Tensor) -> tuple[Tensor | None, ...]:
        weights_P, pooling_P = ctx.saved_tensors, ctx.pooling_P
        ctx.send_gradients(list(map(gradient_of_rows, grads_P, weights_P, pooling_P)))
        weight_grads_P = [
            None if rows is None else gradient_of_weights(grad_SD, rows, index)
            for grad_SD, rows, index in zip(grads_P, ctx.rows_P, pooling_P)
        ]
        return None, None, *weight_grads_P
