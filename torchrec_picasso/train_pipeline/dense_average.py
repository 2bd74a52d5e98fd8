"""Lets ranks step their dense weights apart, and averages the weights every few steps.

Not exact. Without it DDP averages dense gradients in every step. With it each rank's dense
optimizer takes the rank's own gradients, and the weights are averaged after every k-th step, which
divides the bytes by k. Tables are updated as without it: a row by the mean of all ranks' gradients,
which come from the dense weights that each rank has at that step.

Only weights are averaged. Optimizer state is each rank's own, as under torch's
``PostLocalSGDOptimizer``, and so is what follows from gradients, such as a clipped norm.

Source: local SGD (arXiv 1808.07217, torch's ``PeriodicModelAverager``); for the dense part of
models of ads, the k-step merging of Baidu's "Communication-Efficient TeraByte-Scale Model Training
Framework for Online Advertising" (arXiv 2201.05500).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchrec_picasso.errors import CompatError
from torchrec_picasso.exchange.waiting import note_all_reduce, wait_for
from torchrec_picasso.train_pipeline.data_parallel import (
    records_static_graph,
    why_one_backward,
    without_reduction,
    wrapper_of,
)


class DenseAverage:
    """Averages the dense weights of a model after every ``every`` training steps; with 1 it leaves
    the steps to DDP.

    Raises CompatError if ``every`` is more than 1 and DDP does other work than to average gradients
    after a backward.
    """

    def __init__(self, model: nn.Module, every: int) -> None:
        self._model, self._every = model, every
        self._num_apart = 0
        """Training steps since the weights were equal on all ranks."""
        self._apart: dict[Tensor, None] = {}
        """Weights that these steps may have changed."""
        reason = None if every == 1 else _why_not(model)
        if reason is not None:
            raise CompatError(f"average_dense_every is {every}, but {reason}; leave it at 1")
        self.lines = [f"dense weights: averaged every {every} steps, not exact"] * (every > 1)
        """Lines of the pipeline's summary."""

    @contextmanager
    def in_step(self) -> Iterator[None]:
        """Context of a step, in which DDP reduces nothing. Collective.

        DDP reduces in the first step of a static graph, in which it counts gradients, also where
        a run goes on from a checkpoint, so it does not repeat the bits of a run without a stop;
        with TorchRec's ``DefaultDataParallelWrapper(static_graph=False)`` no step is reduced.
        Evaluation begins with an average.
        """
        is_training = self._model.training
        if not is_training:
            self.average()
        is_apart = self._every > 1 and not records_static_graph(self._model)
        with without_reduction(self._model) if is_apart else nullcontext():
            yield
        wrapper = wrapper_of(self._model)
        if is_apart and is_training and wrapper is not None:
            self._num_apart += 1
            # a mean of equal weights may round to another weight, and frozen ones must stay
            self._apart |= dict.fromkeys(w for w in wrapper._module_parameters if w.requires_grad)
        if self._num_apart == self._every:
            self.average()

    @torch.no_grad()
    def average(self) -> None:
        """Averages the weights if ranks have stepped them apart. Collective: an all-reduce."""
        wrapper, weights = wrapper_of(self._model), list(self._apart)
        self._num_apart, self._apart = 0, {}
        if not weights or wrapper is None:
            return
        size = wrapper.process_group.size()
        # one vector for one all-reduce; torch's average_parameters would leave weights in it, at
        # addresses that are not aligned
        flat = torch.cat([weight.reshape(-1) for weight in weights])
        note_all_reduce(flat.nbytes, size)
        wait_for(dist.all_reduce(flat, group=wrapper.process_group, async_op=True))
        averages = flat.div_(size).split([weight.numel() for weight in weights])
        for weight, average in zip(weights, averages):
            weight.copy_(average.view_as(weight))


def _why_not(model: nn.Module) -> str | None:
    """Reason why ranks cannot step the dense weights apart; ``None`` = they can."""
    wrapper = wrapper_of(model)
    if wrapper is None:
        return "no DistributedDataParallel inside DistributedModelParallel wraps the dense part"
    if wrapper._comm_hooks:
        return "a communication hook on DistributedDataParallel would not run"
    if wrapper.broadcast_buffers and wrapper.modules_buffers:
        return "DistributedDataParallel broadcasts buffers in every forward"
    return why_one_backward(model)
