"""Rows arrive and are pooled where the batch is; in backward their gradients leave from here.

The autograd graph holds no optimizer: its leaf is an anchor, and what hangs on it is only the
fetch of rows, whose backward hands the rows' gradients to the step's update.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torchrec.distributed.types import Awaitable

from torchrec_picasso._torchrec import BaseEmbeddingDist, EmbeddingShardingContext
from torchrec_picasso.ops.segment_reduction import mean_weights, pool_rows
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
        fetched_P = _FetchRows.apply(self._anchor, rows)
        if rows.weights_N is None:
            weights_P = [None] * len(fetched_P)
        else:
            weights_P = rows.weights_N.split(list(rows.lookups_P))
        pooled_P = [
            pool_rows(fetched, mean_weights(weights, index), index)
            for fetched, weights, index in zip(fetched_P, weights_P, rows.pooling_P)
        ]
        if rows.batch_size is None:
            return torch.cat([pooled.view(-1) for pooled in pooled_P])
        # (B * F_p, D_p) -> (B, F_p * D_p)
        outputs = [
            pooled.view(rows.batch_size, num_features * pooled.size(1))
            for pooled, num_features in zip(pooled_P, self._features_P)
        ]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)


class _FetchRows(Function):
    """The fetched rows of every pack; backward sends their gradients away."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, rows: ArrivingRows) -> tuple[Tensor, ...]:
        # not rows themselves: they hold what this returns, which would hold ctx, for ever
        ctx.send_gradients = rows.gradient_sink
        return tuple(rows.arrive())

    @staticmethod
    def backward(ctx: Any, *grads_P: Tensor) -> tuple[None, None]:
        ctx.send_gradients(grads_P)
        return None, None
