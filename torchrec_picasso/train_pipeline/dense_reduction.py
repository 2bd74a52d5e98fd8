"""Gradients of the dense part, averaged over ranks once per step, while the last backward runs.

DistributedDataParallel reduces in every backward and expects one forward before it; a step of K
micro-batches has K of each. So the pipeline calls the model inside the wrapper, lets gradients add
up, and reduces them here. As in DistributedDataParallel, parameters share buckets, and a bucket
leaves as soon as the last backward has added to all of its gradients.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

from torchrec_picasso.exchange.sums import start_sum
from torchrec_picasso.exchange.waiting import wait_for

__all__ = ["DenseReduction"]

_BUCKET_BYTES = 1 << 20
"""From here on a bucket is full; smaller ones cost more in latency than they hide."""


class DenseReduction:
    """Averages gradients over ranks. Collective: all ranks start the same buckets in one order.

    Make it before the last backward of a step, and call :meth:`start_rest` after it.

    Args:
        pg: Process group.
        parameters: The same on all ranks, in the same order. One without a gradient counts as 0;
            one without a gradient on every rank stays without.
    """

    def __init__(self, pg: dist.ProcessGroup, parameters: Sequence[nn.Parameter]) -> None:
        self._buckets = [_Bucket(pg, group) for group in _groups(parameters) if pg.size() > 1]
        self._num_started = 0
        self._num_missing = [len(bucket.parameters) for bucket in self._buckets]
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(
                lambda _, place=place: self._note_ready(place)
            )
            for place, bucket in enumerate(self._buckets)
            for parameter in bucket.parameters
        ]

    def _note_ready(self, place: int) -> None:
        """Starts buckets that are complete, none before those in front of it."""
        self._num_missing[place] -= 1
        complete = self._num_missing[self._num_started :]
        for num_missing in complete:
            if num_missing:
                return
            self._start_next()

    def _start_next(self) -> None:
        self._buckets[self._num_started].start()
        self._num_started += 1

    def start_rest(self) -> None:
        """Starts what the backward did not: it may leave out parameters, or not run at all."""
        self.unhook()
        while self._num_started < len(self._buckets):
            self._start_next()

    def unhook(self) -> None:
        """Starts nothing by itself any more."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def wait(self) -> None:
        """Puts the averages into the parameters' gradients."""
        for bucket in self._buckets:
            bucket.wait()


class _Bucket:
    """Parameters of one type whose gradients travel together."""

    def __init__(self, pg: dist.ProcessGroup, parameters: Sequence[nn.Parameter]) -> None:
        self._pg = pg
        self.parameters = parameters

    def start(self) -> None:
        """Starts the sum of the gradients as they are."""
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters]
        has_grad = grads[0].new_ones(len(grads))
        self._missing = [place for place, p in enumerate(self.parameters) if p.grad is None]
        for place in self._missing:
            has_grad[place].zero_()
        flat = torch.cat([*(grad.reshape(-1) for grad in grads), has_grad])
        self._flat = flat.div_(self._pg.size())
        self._work = start_sum(self._pg, self._flat)

    def wait(self) -> None:
        """Puts the averages into the parameters' gradients."""
        assert self._work is not None
        wait_for(self._work)
        sizes = [parameter.numel() for parameter in self.parameters]
        *means, has_grad = self._flat.split([*sizes, len(sizes)])
        # only of a gradient that is missing here it is not known whether it is anywhere
        anywhere = has_grad.tolist() if self._missing else [1.0] * len(sizes)
        for parameter, mean, is_anywhere in zip(self.parameters, means, anywhere):
            if is_anywhere:
                parameter.grad = mean.view_as(parameter).clone()


def _groups(parameters: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Parameters by bucket, the last first: backward comes to them in about that order."""
    groups: list[list[nn.Parameter]] = []
    for dtype in sorted({parameter.dtype for parameter in parameters}, key=str):
        group: list[nn.Parameter] = []
        for parameter in reversed([p for p in parameters if p.dtype == dtype]):
            group.append(parameter)
            if sum(p.numel() * p.element_size() for p in group) >= _BUCKET_BYTES:
                groups.append(group)
                group = []
        if group:
            groups.append(group)
    return groups
