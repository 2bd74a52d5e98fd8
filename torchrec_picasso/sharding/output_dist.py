"""Waits for rows and pools them on the rank that looked them up; backward computes gradients.

Sequences are not pooled: each lookup gets its row.

The autograd graph holds no optimizer. Its leaf is an empty anchor tensor, and the one operator on
it waits for rows and pools them; the operator's backward passes the rows' gradients to the driver
of the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch._dynamo import compiled_autograd
from torch.autograd import Function
from torchrec.distributed.types import Awaitable, LazyAwaitable, LazyGetItemMixin
from torchrec.sparse.jagged_tensor import KeyedTensor

from torchrec_picasso._torchrec import BaseEmbeddingDist, EmbeddingShardingContext
from torchrec_picasso.errors import CompatError
from torchrec_picasso.ops.pack_plan import PackPlan
from torchrec_picasso.ops.streams import keep_for_current_stream
from torchrec_picasso.rows.batch_rows import MicroBatchRows

_NOT_COMPILED = (
    "hot/cold tables do not support compiled autograd, which traces neither the messages that "
    "their gradients leave by nor the update at the end of backward; use TrainPipelineSparseDist "
    "or InterleavedTrainPipeline, and torch.compile for the dense part"
)


class HotColdOutputDist(BaseEmbeddingDist[EmbeddingShardingContext, MicroBatchRows, Tensor]):
    """Turns fetched rows into a module's output."""

    def __init__(self, plan: PackPlan, device: torch.device) -> None:
        super().__init__()
        self._plan = plan
        self._anchor = torch.empty(0, device=device, requires_grad=True)

    def forward(
        self, local_embs: MicroBatchRows, sharding_ctx: EmbeddingShardingContext | None = None
    ) -> Awaitable[Tensor]:
        """Makes the awaitable of the output of one micro-batch.

        Pooled: ``(B, sum of F_m * D_m)``, or flat, feature by feature, if every feature has its own
        batch size. Sequences: the row of each lookup ``(N, D)``, feature by feature.
        """
        # grad mode of the call; the wait comes later, at the first use of the output
        return Later(partial(self._pool, local_embs, torch.is_grad_enabled()))

    @torch.compiler.disable  # a compiled dense part waits here for messages, which are not traced
    def _pool(self, rows: MicroBatchRows, needs_grad: bool) -> Tensor:
        with torch.set_grad_enabled(needs_grad and torch.is_grad_enabled()):
            scales_M = [keep_for_current_stream(scales) for scales in rows.scales_M]
            pieces = _PoolArrivals.apply(self._anchor, rows, *scales_M)
            output = self._side_by_side(rows, pieces)
        # without a gradient of the weights nothing reads the rows again: their memory is free
        are_read_again = any(scale is not None and scale.requires_grad for scale in scales_M)
        if not (are_read_again and output.requires_grad):
            rows.end()
        return output

    def _side_by_side(self, rows: MicroBatchRows, pieces: Sequence[Tensor]) -> Tensor:
        """Joins the pooled matrices to the shape that :meth:`HotColdOutputDist.forward` gives."""
        remaining = iter(pieces)
        columns: list[Tensor] = []
        for pooling in rows.pooling_M:
            columns += pooling.columns(list(islice(remaining, pooling.num_pieces)))
        if rows.own_sizes is not None and self._plan.has_pooling:
            # without the padding of features with their own batch sizes: (B, sum D) -> flat
            features = zip(self._plan.features_M, self._plan.dim_M)
            dims_F = [dim for num_features, dim in features for _ in range(num_features)]
            blocks_F = torch.cat(columns, 1).split(dims_F, 1)
            sized_F = zip(blocks_F, rows.own_sizes)
            return torch.cat([block[:size].reshape(-1) for block, size in sized_F])
        # sequences: tables of one collection have one dim, hence one matrix
        if len(columns) == 1 and not rows.pooling_M[0].gives_views:
            return columns[0]
        return torch.cat(columns, 0 if rows.batch_size is None else 1)


class _PoolArrivals(Function):
    """Waits for rows and pools them; backward gives the sink their gradients. Bags that their home
    ranks pooled are returned as views of the rows' memory; the consumer copies them."""

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, rows: MicroBatchRows, *scales_M: Tensor | None
    ) -> tuple[Tensor, ...]:
        ctx.sink, ctx.pooling_M = rows.sink, rows.pooling_M
        ctx.matrices_M = []
        pieces: list[Tensor] = []
        # one matrix is pooled while the next one is still on its way
        each_matrix = zip(rows.arrive(), scales_M, rows.pooling_M, ctx.needs_input_grad[2:])
        for arrived, scales_N, pooling, needed in each_matrix:
            pieces += pooling.pool(arrived, scales_N)
            # Only the gradient of a scale needs the rows; else the graph must not keep them alive.
            ctx.matrices_M.append(arrived if needed else None)
        ctx.save_for_backward(*scales_M)
        return tuple(pieces)

    @staticmethod
    @torch.compiler.disable(reason=_NOT_COMPILED)
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Computes gradients of rows, passes them to the driver's sink, returns those of scales."""
        if compiled_autograd.in_compiled_autograd_region:
            raise CompatError(_NOT_COMPILED)
        scales_M, pooling_M = ctx.saved_tensors, ctx.pooling_M
        remaining = iter(grads)
        # forward flattened its outputs over matrices; the same counts restore them by matrix
        grads_M = [list(islice(remaining, pooling.num_pieces)) for pooling in pooling_M]
        triples = zip(pooling_M, grads_M, scales_M)
        ctx.sink([pooling.gradients(grads, scales_N) for pooling, grads, scales_N in triples])
        scale_grads_M = [
            None if rows is None else pooling.gradient_of_scales(matrix_grads, rows)
            for matrix_grads, rows, pooling in zip(grads_M, ctx.matrices_M, pooling_M)
        ]
        return None, None, *scale_grads_M


class Later(LazyAwaitable[Any]):
    """The result of a function, which runs once, when somebody waits for it or first uses it."""

    def __init__(self, compute: Callable[[], Any]) -> None:
        super().__init__()
        self._compute: Callable[[], Any] | None = compute
        self._computed: Any = None

    def _wait_impl(self) -> Any:
        # rows that a function has read are overwritten by a later batch's
        if self._compute is not None:
            self._computed, self._compute = self._compute(), None
        return self._computed


class LaterByKey(LazyGetItemMixin[str, Tensor], Later):
    """A KeyedTensor, of which an item may be taken before anybody waits."""


def awaitable_of(output: Any) -> LazyAwaitable[Any]:
    """Returns an output that waits, as a sharded module does. An item of a KeyedTensor is no tensor
    then: a model that asks for its type, as ``torch.autograd.Function`` does, sees what it sees
    without micro-batches."""
    if isinstance(output, LazyAwaitable):
        return output
    return (LaterByKey if isinstance(output, KeyedTensor) else Later)(lambda: output)
