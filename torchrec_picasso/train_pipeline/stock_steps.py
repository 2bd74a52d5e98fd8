"""Steps of a model without hot/cold tables: TorchRec's own pipeline takes them.

Nothing of such a model can be interleaved, so its step is TorchRec's, operator by operator. Around
it remain what users of the pipeline rely on: ranks may have different numbers of batches, losses
may be a ratio, and steps are reported.

TorchRec's pipeline stops a rank at the end of its data, and the others would wait for it forever.
Here it goes on with empty batches. The input dist of TorchRec's tables tells every rank the batch
size of all ranks, so the end of all data costs nothing: only a batch that may have no samples
anywhere makes ranks ask each other.
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
from torchrec_picasso.batches.feed import (
    PreparedBatch,
    empty_batch,
    find_data,
    share_empty_batch,
)
from torchrec_picasso.batches.split import count_samples
from torchrec_picasso.errors import CompatError
from torchrec_picasso.exchange.agreement import Agreement
from torchrec_picasso.schedule.schedule import Setting
from torchrec_picasso.sharding.sharded_module import HotColdModule
from torchrec_picasso.train_pipeline.data_parallel import no_gradients, note_reduction
from torchrec_picasso.train_pipeline.losses import Losses
from torchrec_picasso.train_pipeline.model_parts import has_stock_means, inner_model
from torchrec_picasso.train_pipeline.options import PipelineOptions
from torchrec_picasso.train_pipeline.preparation import Preparation
from torchrec_picasso.train_pipeline.steps import Step, Steps

_BATCHES = 3
"""In flight in the middle of a step of TorchRec's pipeline."""


class StockSteps(Steps, Iterator[Any]):
    """Gives TorchRec's pipeline batches until the data of all ranks has ended, and a forward.

    As an iterator it yields this rank's batches, on the host, and after the last one empty ones.
    Collective: all ranks ask for batches equally often. The first batch costs 16 bytes to each
    rank. Unless all batches are to be executed, all ranks stop as soon as one has none.
    """

    def __init__(
        self, model: nn.Module, options: PipelineOptions, device: torch.device, executes_all: bool
    ) -> None:
        super().__init__(model)
        self._options = options
        self._forward = options.custom_model_fwd or model
        self._device, self._execute_all_batches = device, executes_all
        self._losses = Losses(options.loss_reduction)
        self._are_data: deque[bool] = deque()
        """Whether each batch in flight is this rank's data, or an empty one after its end."""
        self._num_samples = 0
        self._source: Iterator[Any] | None = None
        self._has_ended = False  # the source, which is not asked again
        self._own: deque[Any] = deque()  # batches of this rank that were read
        self._last: Any = None

    @classmethod
    def find(cls, model: nn.Module, *arguments: Any) -> StockSteps | None:
        """Returns the steps of a model, by the arguments of this class; ``None`` if any of its
        tables is hot/cold."""
        modules = inner_model(model).modules()
        if any(isinstance(module, HotColdModule) and module.has_hot_cold for module in modules):
            return None
        return cls(model, *arguments)

    @cached_property
    def _asks_ahead(self) -> bool:
        """Whether ranks tell each other of every batch, at the cost of the first, so that none is
        empty on all ranks. Set to true if a rank's batch cannot be cut to no samples."""
        # TorchRec has no means of no samples
        has_means = has_stock_means([self._model])
        return has_means or not self._execute_all_batches or self._pg.size() == 1

    def take(self, batches: Iterator[Any], pipeline: TrainPipelineSparseDist[Any, Any]) -> Step:
        """Takes a step of TorchRec's pipeline; see :class:`.Steps`. Collective."""
        try:
            output = TrainPipelineSparseDist.progress(pipeline, self.batches(batches, pipeline))
        except StopIteration:
            self._has_ended = False  # the next step may read the iterator again
            raise
        return Step(output, self._end_step(pipeline))

    def batches(
        self, batches: Iterator[Any], pipeline: TrainPipelineSparseDist[Any, Any]
    ) -> Iterator[Any]:
        """Returns the batches of a step, with empty ones after them. Collective.

        They are read first: an error of the data loses nothing, since no operation of the step has
        begun.
        """
        in_flight = len(pipeline.batches)
        while len(self._are_data) > in_flight:
            self._are_data.pop()  # of a batch that could not be copied to the device
        if batches is not self._source:
            self._source, self._has_ended = batches, False
        while len(self._own) < _BATCHES - in_flight and not self._has_ended:
            batch = next(batches, None)
            if isinstance(batch, PreparedBatch):  # by another model's plan
                batch = batch.batch
            self._has_ended = batch is None
            self._own += [] if batch is None else [batch]
        if not in_flight:
            self._last = None
        if in_flight == 1:
            pipeline.enqueue_batch(chain(self))  # a step begins with two batches
        return chain(self)  # a new object, or TorchRec asks no more after StopIteration

    def __next__(self) -> Any:
        """Returns the next batch, maybe an empty one.

        Raises StopIteration on all ranks at once; CompatError if a rank needs an empty batch and a
        batch cannot be cut.
        """
        own = self._own.popleft() if self._own else None
        is_data = own is not None
        if self._last is None or self._asks_ahead:
            own = self._agree_on_data(own)
        elif own is None:
            own = empty_batch(self._last, self._options.split)
        self._last = own
        self._are_data.append(is_data)
        return own

    def _agree_on_data(self, own: Any) -> Any:
        """Returns the batch, or an empty one if only other ranks have data. Collective."""
        asks_ahead = self._asks_ahead or (own is not None and not self._can_be_cut(own))
        by_rank = Agreement(self._pg, self._device, [own is not None, asks_ahead]).wait()
        have_data_W, asks_W = zip(*by_rank)
        self._asks_ahead = any(asks_W)
        if not any(have_data_W) or not (all(have_data_W) or self._execute_all_batches):
            self._own.extendleft([] if own is None else [own])
            raise StopIteration
        split = self._options.split
        if self._last is None and not all(have_data_W):
            # a rank without any batch so far has nothing to make an empty batch from
            source = have_data_W.index(True)
            empty = share_empty_batch(self._pg, self._device, source, own, split)
            return empty if own is None else own
        return empty_batch(self._last, split) if own is None else own

    def _can_be_cut(self, batch: Any) -> bool:
        try:
            empty_batch(batch, self._options.split)
        except CompatError:
            return False
        return True

    def _is_over(self, context: TrainPipelineContext) -> bool:
        """Whether the next batch in flight is no rank's data. Collective."""
        if self._asks_ahead:
            return False
        sizes_W = _batch_sizes(context)
        if len(sizes_W) == self._pg.size() and any(sizes_W):
            return False
        source, _ = find_data(self._pg, self._device, self._are_data[0])
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

    def _end_step(self, pipeline: TrainPipelineSparseDist[Any, Any]) -> int:
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
        self.__dict__.pop("_asks_ahead", None)
        self._source, self._has_ended, self._last = None, False, None
        self._own.clear()
        self._are_data.clear()

    @property
    def setting(self) -> Setting:
        """Whole batches, whatever is asked for."""
        return Setting(1, self._options.lookahead is not False)

    def preparation(self) -> Preparation:
        """Returns a function that reads no ids: a step of TorchRec's does."""
        return Preparation()

    def summary(self) -> str:
        """Names the pipeline whose step it is."""
        return "no table is hot/cold: a step is that of TorchRec's TrainPipelineSparseDist"


def _batch_sizes(context: TrainPipelineContext) -> Sequence[int]:
    """Returns the batch sizes ``(W,)`` of a batch that its input dist knows, equal on all ranks.
    None are known of tables that each rank stores, and of features with own batch sizes."""
    for request in context.input_dist_tensors_requests.values():
        for awaitable in getattr(request, "awaitables", ()):
            sizes_W: Sequence[int] | None = getattr(awaitable, "_stride_per_rank", None)
            if sizes_W is not None:
                return sizes_W
    return ()
