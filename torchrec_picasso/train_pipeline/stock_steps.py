"""Steps of a model without hot/cold tables: TorchRec's own pipeline takes them.

Nothing of such a model can be interleaved, so its step is TorchRec's, operator by operator. Around
it remain what users of the pipeline rely on: ranks may have different numbers of batches, losses
may be a ratio, and steps are reported.

The input dist of TorchRec's tables tells every rank the batch size of all ranks, so the end of all
data costs nothing: only a batch that may have no samples anywhere makes ranks ask each other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import chain
from typing import Any

import torch
from torch import nn
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist

from torchrec_picasso._torchrec import TrainPipelineContext
from torchrec_picasso.batches.feed import find_data
from torchrec_picasso.batches.split import count_samples
from torchrec_picasso.batches.until_all_end import UntilAllEnd
from torchrec_picasso.sharding.sharded_module import HotColdModule
from torchrec_picasso.train_pipeline.data_parallel import no_gradients, note_reduction
from torchrec_picasso.train_pipeline.losses import Losses
from torchrec_picasso.train_pipeline.model_parts import (
    has_stock_means,
    inner_model,
    process_group_of,
)
from torchrec_picasso.train_pipeline.options import PipelineOptions

_BATCHES = 3
"""In flight in the middle of a step of TorchRec's pipeline."""


class StockSteps:
    """Gives TorchRec's pipeline batches until the data of all ranks has ended, and a forward."""

    def __init__(
        self, model: nn.Module, options: PipelineOptions, device: torch.device, executes_all: bool
    ) -> None:
        self._model, self._options = model, options
        self._forward = options.custom_model_fwd or model
        self._device, self._execute_all_batches = device, executes_all
        self._losses = Losses(options.loss_reduction)
        self._are_data: deque[bool] = deque()
        """Whether each batch in flight is this rank's data, or an empty one after its end."""
        self._num_samples = 0

    @classmethod
    def find(cls, model: nn.Module, *arguments: Any) -> StockSteps | None:
        """Returns the steps of a model, by the arguments of this class; ``None`` if any of its
        tables is hot/cold."""
        modules = inner_model(model).modules()
        if any(isinstance(module, HotColdModule) and module.has_hot_cold for module in modules):
            return None
        return cls(model, *arguments)

    @cached_property
    def _batches(self) -> UntilAllEnd:
        return UntilAllEnd(
            process_group_of(self._model),
            self._device,
            self._options.split,
            self._execute_all_batches,
            # TorchRec has no means of no samples
            asks_ahead=has_stock_means([self._model]),
            are_data=self._are_data,
        )

    def batches(
        self, batches: Iterator[Any], pipeline: TrainPipelineSparseDist[Any, Any]
    ) -> Iterator[Any]:
        """Returns the batches of a step, with empty ones after them. Collective."""
        in_flight = len(pipeline.batches)
        while len(self._are_data) > in_flight:
            self._are_data.pop()  # of a batch that could not be copied to the device
        self._batches.read(batches, _BATCHES - in_flight, is_first=not in_flight)
        if in_flight == 1:
            pipeline.enqueue_batch(chain(self._batches))  # a step begins with two batches
        return chain(self._batches)  # a new object, or TorchRec asks no more after StopIteration

    def ask_data_again(self) -> None:
        """Lets the next step read an iterator that has ended."""
        self._batches.has_ended = False

    def _is_over(self, context: TrainPipelineContext) -> bool:
        """Whether the next batch in flight is no rank's data. Collective."""
        if self._batches.asks_ahead:
            return False
        sizes_W = _batch_sizes(context)
        if len(sizes_W) == process_group_of(self._model).size() and any(sizes_W):
            return False
        source, _ = find_data(process_group_of(self._model), self._device, self._are_data[0])
        return source is None

    def forward(self, batch: Any) -> tuple[Any, Any]:
        """Runs the model; the losses of an empty batch, which only fills up, count nothing."""
        losses, output = self._forward(batch)
        if self._options.on_step is not None:
            self._num_samples = count_samples(batch) or 0
        if not self._model.training:
            return losses, output
        note_reduction(self._model)
        losses = self._losses.checked(losses)
        if self._are_data[0]:
            return self._losses.whole(losses), output
        loss = self._losses.stand_in(losses)
        return (loss * 0.0 if loss.requires_grad else no_gradients(self._model)), output

    def end_step(self, pipeline: TrainPipelineSparseDist[Any, Any]) -> int:
        """Drops the next batches in flight if they are no rank's data. Collective.

        Returns the samples of the batch that was trained, for reports; 0 if uncountable.
        """
        self._are_data.popleft()
        while pipeline.batches and self._is_over(pipeline.contexts[0]):
            for request in pipeline.contexts[0].input_dist_tensors_requests.values():
                request.wait()
            pipeline.dequeue_batch()
            self._are_data.popleft()
            if pipeline.batches:  # another empty one, or the first of another iterator
                pipeline.start_sparse_data_dist(pipeline.batches[0], pipeline.contexts[0])
                pipeline.wait_sparse_data_dist(pipeline.contexts[0])
        return self._num_samples

    def forget(self) -> None:
        """Drops batches that were read, and what is known of those in flight."""
        self.__dict__.pop("_batches", None)
        self._are_data.clear()


def _batch_sizes(context: TrainPipelineContext) -> Sequence[int]:
    """Returns the batch sizes ``(W,)`` of a batch that its input dist knows, equal on all ranks.
    None are known of tables that each rank stores, and of features with own batch sizes."""
    for request in context.input_dist_tensors_requests.values():
        for awaitable in getattr(request, "awaitables", ()):
            sizes_W: Sequence[int] | None = getattr(awaitable, "_stride_per_rank", None)
            if sizes_W is not None:
                return sizes_W
    return ()
