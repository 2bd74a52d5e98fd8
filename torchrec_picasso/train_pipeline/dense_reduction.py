"""Gradients of the dense part, averaged over ranks once per step, after the last micro-batch.

DistributedDataParallel reduces in every backward and expects one forward before it; a step of K
micro-batches has K of each. So the pipeline calls the model inside the wrapper, lets gradients add
up, and reduces them here, all in one buffer.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchrec_picasso.exchange.waiting import wait_for

__all__ = ["DenseReduction"]


class DenseReduction:
    """Averages gradients over ranks; starts at construction. Collective.

    Args:
        pg: Process group.
        parameters: The same on all ranks, in the same order. One without a gradient counts as 0;
            one without a gradient on every rank stays without.
    """

    def __init__(self, pg: dist.ProcessGroup, parameters: Sequence[nn.Parameter]) -> None:
        self._flats: list[tuple[list[nn.Parameter], Tensor, dist.Work]] = []
        if pg.size() == 1:
            return
        for dtype in sorted({p.dtype for p in parameters}, key=str):
            alike = [p for p in parameters if p.dtype == dtype]
            grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in alike]
            has_grad = grads[0].new_tensor([float(p.grad is not None) for p in alike])
            flat = torch.cat([*(grad.reshape(-1) for grad in grads), has_grad]).div_(pg.size())
            work = dist.all_reduce(flat, group=pg, async_op=True)
            assert work is not None
            self._flats.append((alike, flat, work))

    def wait(self) -> None:
        """Puts the averages into the parameters' gradients."""
        for parameters, flat, work in self._flats:
            wait_for(work)
            *means, has_grad = flat.split([*(p.numel() for p in parameters), len(parameters)])
            for parameter, mean, any_grad in zip(parameters, means, has_grad.tolist()):
                if any_grad:
                    parameter.grad = mean.view_as(parameter).clone()
