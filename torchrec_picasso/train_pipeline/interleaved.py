"""A train pipeline that hides the exchange of rows and gradients behind the dense part.

Each batch is cut into micro-batches; while one computes, rows of the next one, gradients of the
last one and the next batch's ids and clean rows are on the wire. The result is that of the plain
loop: every row is updated once per batch, from the sum of its gradients.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from time import perf_counter
from typing import Any, TypeVar

import torch
from torch import nn
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.distributed.types import ShardedModule

from torchrec_picasso._torchrec import (
    TrainPipelineContext,
    override_input_dist_forwards,
    rewrite_model,
    start_data_dist,
)
from torchrec_picasso.batches.join import join_outputs as join_known_outputs
from torchrec_picasso.batches.split import micro_batch_sizes, num_samples
from torchrec_picasso.batches.split import split_batch as split_known_batch
from torchrec_picasso.errors import CompatError, ConfigError, PicassoError
from torchrec_picasso.sharding.sharded_ebc import ShardedHotColdEmbeddingBagCollection
from torchrec_picasso.train_pipeline.batch_feed import BatchFeed, Fetched
from torchrec_picasso.train_pipeline.data_parallel import renew_data_parallel
from torchrec_picasso.train_pipeline.end_of_data import SplitBatch
from torchrec_picasso.train_pipeline.flight import Flight
from torchrec_picasso.train_pipeline.id_stream import IdStream
from torchrec_picasso.train_pipeline.interleaved_forward import InterleavedForward
from torchrec_picasso.train_pipeline.model_parts import (
    inner_model,
    process_group_of,
    refuse_variable_batch,
    unpipelined_modules,
    why_whole_batches,
)
from torchrec_picasso.train_pipeline.operations import Operations
from torchrec_picasso.train_pipeline.ranges import op_range, step_range
from torchrec_picasso.train_pipeline.schedule import (
    NUM_BATCHES,
    Schedule,
    evaluation_schedule,
    first_batch_schedule,
    second_batch_schedule,
    training_schedule,
)
from torchrec_picasso.train_pipeline.setting_choice import SettingChoice, candidates

__all__ = ["InterleavedTrainPipeline"]

In = TypeVar("In")
Out = TypeVar("Out")


class InterleavedTrainPipeline(TrainPipelineSparseDist[In, Out]):
    """Trains like TorchRec's ``TrainPipelineSparseDist``, with the exchange hidden.

    ``progress(iterator)`` takes one step and returns the model's output for the whole batch, and
    raises ``StopIteration`` after the last batch. Modules that are wholly hot/cold are interleaved;
    others are listed by :meth:`summary`.

    Ranks may have different numbers of batches. One whose data has ended goes on with empty batches
    until all have ended, as in a plain loop that is given them, except that its loss counts
    nothing; then all ranks raise ``StopIteration`` at the same call.

    Args:
        model: ``DistributedModelParallel``; its forward returns ``(losses, output)``, losses being
            means over the samples.
        optimizer: Dense and fused optimizers, as for TorchRec's pipelines.
        device: Where batches go.
        num_micro_batches: Pieces K that a batch is cut into; 1 still overlaps with the next batch.
            ``None`` = chosen by trying some on the first steps.
        lookahead: Whether rows of the next batch that this one does not update are fetched early.
            ``None`` = chosen likewise.
        split_batch: Cuts a batch into parts of given sizes, ``(batch, sizes) -> parts``; ``None``
            knows tensors, KeyedJaggedTensors, dataclasses and containers of them. Sizes may be 0.
            On an accelerator it runs on the stream of input dists.
        join_outputs: Joins the parts' outputs, ``(outputs, sizes) -> output``; ``None`` knows the
            same types.
        loss_reduction: Whether the model's losses are a ``"mean"`` over samples or a ``"sum"``; a
            sum within the model's output needs ``join_outputs``.
        execute_all_batches: As for TorchRec's pipelines. If not, all ranks stop before the step in
            which the first of them has no next batch; what is in flight or fetched waits for a new
            iterator. Costs a small all-reduce per step.

    Raises:
        ConfigError: If ``num_micro_batches`` is less than 1, or the reduction is not known.
        CompatError: On the first step, if the model cannot be trained in micro-batches.
    """

    _model: nn.Module
    _original_kjt_dist_forwards: list[Any]

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        *,
        num_micro_batches: int | None = 1,
        lookahead: bool | None = True,
        split_batch: SplitBatch | None = None,
        join_outputs: Callable[[Sequence[Any], Sequence[int]], Any] | None = None,
        loss_reduction: str = "mean",
        execute_all_batches: bool = True,
    ) -> None:
        if loss_reduction not in ("mean", "sum"):
            raise ConfigError(f"loss_reduction is {loss_reduction!r}, expected 'mean' or 'sum'")
        if num_micro_batches is not None and num_micro_batches < 1:
            raise ConfigError(f"num_micro_batches is {num_micro_batches}, expected at least 1")
        super().__init__(model, optimizer, device, execute_all_batches)
        self._losses_are_means = loss_reduction == "mean"
        self._split_batch = split_batch or split_known_batch
        self._join_outputs = join_outputs or join_known_outputs
        self._id_stream = IdStream(self._data_dist_stream, self._memcpy_stream)
        fetch = self.copy_batch_to_gpu, self._create_context
        self._feed = BatchFeed(
            *fetch, device, self._split_batch, execute_all_batches, self._id_stream
        )
        self._flights: deque[Flight] = deque()
        self._is_halfway = self._has_ended = self._has_trained = False
        self._choice = SettingChoice(candidates(num_micro_batches, lookahead))
        self._is_rewritten = False
        self._interleaved: dict[str, ShardedHotColdEmbeddingBagCollection] = {}
        self._plain: dict[str, ShardedModule] = {}

    @property
    def num_micro_batches(self) -> int:
        """Pieces that the next batch will be cut into."""
        return self._choice.current.num_micro_batches

    @property
    def lookahead(self) -> bool:
        """Whether the next batch's clean rows will be fetched early."""
        return self._choice.current.lookahead

    @property
    def is_settled(self) -> bool:
        """Whether all further batches will be cut and fetched like the next one."""
        return self._choice.is_settled

    @property
    def schedule(self) -> Schedule:
        """The operations of a training step, in order."""
        return training_schedule(self._choice.current, num_waves=self._num_waves)

    @property
    def _num_waves(self) -> int:
        """Waves that the plan cut the packs into; known from the first step on."""
        return max((module.num_waves for module in self._interleaved.values()), default=1)

    # -- TorchRec's contract -------------------------------------------------------------------

    def progress(self, dataloader_iter: Iterator[In]) -> Out:
        """Takes one step. Collective.

        Args:
            dataloader_iter: This rank's batches.

        Returns:
            What the model returns beside the losses, for the whole batch.

        Raises:
            StopIteration: After the last batch of the rank that has most; on all ranks at once.
            InputError: On all ranks, if a rank's batch is bad.
            PicassoError: If the step before did not end; see :meth:`reset`.
        """
        if self._is_halfway:
            raise PicassoError(
                "the step before raised and did not end; call reset() on all ranks, which forgets "
                "its batches, then go on"
            )
        if not self._model_attached:
            self.attach(self._model)
        if not self._flights:
            self._take_off(dataloader_iter)
        flight, pg = self._flights[0], process_group_of(self._model)
        attached_again = not self._is_rewritten
        if attached_again:
            self._rewrite(flight.batch, flight.context)
        for rows in flight.rows.values():
            if attached_again or rows.are_outdated:  # it may have been trained while detached
                rows.fetch_again()
        while len(self._flights) < NUM_BATCHES and self._follow(dataloader_iter):
            if len(self._flights) == 2:  # the first step
                self._walk(second_batch_schedule(self._flights[1].setting))
        settings = [flight.setting for flight in self._flights]
        if self._model.training:
            self._has_trained = True
            self._optimizer.zero_grad()
            start_s = self._now_s()
            with step_range(self._batch_count):
                self._walk(training_schedule(*settings, num_waves=self._num_waves))
            self._choice.note_step(settings, self._now_s() - start_s, pg, self._device)
        else:
            with step_range(self._batch_count):
                self._walk(evaluation_schedule(*settings, num_waves=self._num_waves))
        self._flights.popleft()
        self._batch_count += 1
        sizes = [flight.sizes_K[index] for index in flight.outputs_K]
        return self._join_outputs(list(flight.outputs_K.values()), sizes)

    def detach(self) -> nn.Module:
        """Gives the model back as it was; batches in flight wait for :meth:`attach`. Collective.

        The model may be used, trained and loaded meanwhile, on all ranks alike.
        """
        if self._has_trained:
            renew_data_parallel(self._model)
        self._has_trained = False
        return super().detach()

    def attach(self, model: nn.Module | None = None, sparse_dist: bool = True) -> None:
        """Takes over the model's sharded modules again; another model forgets batches in flight."""
        if model is not None and model is not self._model:
            self.reset()
        super().attach(model, sparse_dist)
        self._is_rewritten = False

    def reset(self) -> None:
        """Forgets the batches in flight, for a new start after an exception; all ranks do.

        After an exception in a step these are its batch, which no weight has learned from unless
        an update or the optimizer's step raised, and the next two. An exception in the data
        iterator leaves the step unbegun: then the next call may as well go on without reset, and
        loses nothing.
        Messages on the wire end by themselves, so all ranks must have failed at the same operation.
        """
        super().reset()
        for flight in self._flights:
            if flight.dense is not None:
                flight.dense.unhook()
        self._flights.clear()
        self._feed.forget()
        self._is_halfway = self._has_ended = False

    def _take_off(self, dataloader_iter: Iterator[In]) -> None:
        """Prepares the first batch."""
        fetched = self._feed.first(process_group_of(self._model), dataloader_iter)
        if not self._is_rewritten:
            self._rewrite(fetched.batch, fetched.context)
        self._has_ended = False
        flight = self._board(fetched)
        self._flights.append(flight)
        try:
            self._walk(first_batch_schedule(flight.setting, num_waves=self._num_waves))
        except BaseException:  # no step has begun: the next call starts anew
            self.reset()
            raise
        for module in self._interleaved.values():
            module.group.accept_writes()

    def _follow(self, dataloader_iter: Iterator[In]) -> bool:
        """Boards the batch after the last in flight, unless every rank's data has ended."""
        if self._has_ended:
            return False
        pg = process_group_of(self._model)
        fetched = self._feed.following(pg, dataloader_iter, self._flights[-1].batch)
        self._has_ended = fetched is None
        if fetched is not None:
            self._flights.append(self._board(fetched))
        return fetched is not None

    def _now_s(self) -> float:
        """The time; while steps are compared, that of the device, which the host runs ahead of."""
        if self._device.type != "cpu" and not self._choice.is_settled:
            torch.get_device_module(self._device).synchronize()
        return perf_counter()

    def _walk(self, schedule: Schedule) -> None:
        """Runs the operations on those batches that there are."""
        self._is_halfway = True
        for op in schedule:
            if op.batch < len(self._flights):
                with op_range(op):
                    self._operations.run(op, self._flights)
                if self._flights[-1].is_end:  # what else the schedule has for it is left out
                    self._has_ended = True
                    self._flights.pop()
        self._is_halfway = False

    def _board(self, fetched: Fetched) -> Flight:
        """Cuts a batch into micro-batches."""
        batch, setting = fetched.batch, self._choice.current
        with self._id_stream.working():
            self._id_stream.take_batch(batch)
            for name, module in self._interleaved.items():
                refuse_variable_batch(name, *module.forward.args.build_args_kwargs(batch))
            sizes_K = micro_batch_sizes(num_samples(batch), setting.num_micro_batches)
            # of no samples, every micro-batch is the batch itself
            parts_K = self._split_batch(batch, sizes_K) if any(sizes_K) else [batch] * len(sizes_K)
        return Flight(fetched, setting, sizes_K, parts_K)

    def _rewrite(self, batch: In, context: TrainPipelineContext) -> None:
        """Finds the sharded modules and takes over their forwards."""
        inner = inner_model(self._model)
        found, self._model, self._original_forwards, self._pipelined_postprocs, _ = rewrite_model(
            model=self._model,
            context=context,
            dist_stream=self._data_dist_stream,
            default_stream=torch.get_device_module(self._device).current_stream(),
            batch=batch,
            apply_jit=False,
            pipelined_forward=InterleavedForward,
            pipeline_postproc=False,
        )
        self._pipelined_modules = found
        self._interleaved, self._plain = {}, {}
        for module in found:
            is_hot_cold = isinstance(module, ShardedHotColdEmbeddingBagCollection)
            ours = is_hot_cold and module.can_interleave
            (self._interleaved if ours else self._plain)[module.forward.name] = module
        self._original_kjt_dist_forwards.clear()
        self._join_splits()
        self._unpipelined = unpipelined_modules(inner, found)
        try:
            self._choice.restrict(why_whole_batches(inner, self._unpipelined))
        except CompatError:
            self.detach()
            raise
        self._operations = Operations(
            process_group_of(self._model),
            self._device,
            inner,
            self._optimizer,
            self._interleaved,
            self._plain,
            id_stream=self._id_stream,
            start_plain=self._start_plain,
            wait_plain=self.wait_sparse_data_dist,
            losses_are_means=self._losses_are_means,
        )
        self._is_rewritten = True

    def _start_plain(self, flight: Flight) -> None:
        """Starts the input dists of the stock modules, as TorchRec does, on the ids' stream."""
        start_data_dist(list(self._plain.values()), flight.batch, flight.context)
        self._join_splits()

    def _join_splits(self) -> None:
        """From now on the splits of stock input dists travel together, once these are made."""
        plain = list(self._plain.values())
        made = not any(getattr(m, "_has_uninitialized_input_dist", False) for m in plain)
        if plain and made and not self._original_kjt_dist_forwards:
            self._original_kjt_dist_forwards = override_input_dist_forwards(plain)

    def summary(self) -> str:
        """Which sharded modules are interleaved and which are not, with the reason; after a step.

        Returns:
            One line per module, then one on micro-batches and lookahead.
        """
        lines = []
        for name, module in self._interleaved.items():
            waves = f" in {module.num_waves} waves" if module.num_waves > 1 else ""
            lines.append(f"{name}: interleaved{waves}")
        lines += [
            f"{name}: computed once per batch, exchange not hidden: not all of its tables are "
            "hot/cold"
            for name in self._plain
        ]
        if self._is_rewritten:
            lines += [
                f"{name}: not pipelined: its input is changed inside the model"
                for name in self._unpipelined
            ]
        return "\n".join([*lines, str(self._choice)])
