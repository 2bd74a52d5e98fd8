"""The batches that a step works on: fetched, split, agreed on, and run through its schedule."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from itertools import takewhile
from typing import Any

import torch.distributed as dist
from torch import nn

from torchrec_picasso._torchrec import TrainPipelineContext
from torchrec_picasso.batches.feed import BatchFeed, Fetched
from torchrec_picasso.batches.id_stream import IdStream
from torchrec_picasso.batches.split import micro_batch_sizes, reason_of
from torchrec_picasso.errors import CompatError, InputError, PicassoError
from torchrec_picasso.exchange.agreement import Agreement, Flags
from torchrec_picasso.exchange.peers import Peers
from torchrec_picasso.exchange.waiting import OP_RANGE, named_range
from torchrec_picasso.schedule.schedule import (
    NUM_BATCHES,
    Op,
    Schedule,
    evaluation_schedule,
    first_batch_schedule,
    second_batch_schedule,
    training_schedule,
)
from torchrec_picasso.train_pipeline.cuts import Cuts
from torchrec_picasso.train_pipeline.data_parallel import counts_gradients
from torchrec_picasso.train_pipeline.flight import Flight
from torchrec_picasso.train_pipeline.lifecycle import Lifecycle, State
from torchrec_picasso.train_pipeline.model_parts import process_group_of
from torchrec_picasso.train_pipeline.operations import Operations, Program
from torchrec_picasso.train_pipeline.options import PipelineOptions
from torchrec_picasso.train_pipeline.pipelined_model import PipelinedModel

__all__ = ["InFlight"]

_log = logging.getLogger(__name__)

_LEADING = ("lay_out", "request")


class InFlight:
    """A queue of at most three batches: of this step, of the next, and of the one after.

    Args:
        model: The model that was passed to the pipeline.
        feed: Fetches batches.
        options: Functions that split batches and join outputs.
        cuts: Decides how the next batch is split.
        lifecycle: The state of the pipeline.
        id_stream: Stream on which batches are split and ids are prepared.
    """

    def __init__(
        self,
        model: nn.Module,
        feed: BatchFeed,
        options: PipelineOptions,
        cuts: Cuts,
        lifecycle: Lifecycle,
        id_stream: IdStream,
    ) -> None:
        self._model = model
        self._feed = feed
        self._options = options
        self._cuts = cuts
        self._lifecycle = lifecycle
        self._id_stream = id_stream
        self._flights: deque[Flight] = deque()
        self._taken: PipelinedModel | None = None
        self._program: Program | None = None
        self._operations: Operations | None = None
        self._peers: Peers | None = None
        self._agreement: Agreement | None = None  # of a step that has not begun
        self._op: Op | None = None
        self._led: set[Op] = set()  # operations that ran ahead of a step that has not begun
        self._has_logged = False

    def __len__(self) -> int:
        return len(self._flights)

    @property
    def first(self) -> Flight:
        """The batch of this step."""
        return self._flights[0]

    @property
    def num_waves(self) -> int:
        """Waves that the plan gives the packs; known from the first step on."""
        return 1 if self._taken is None else self._taken.num_waves

    def work_with(
        self,
        taken: PipelinedModel,
        program: Program,
        wait_plain: Callable[[TrainPipelineContext], None],
    ) -> None:
        """Sets the model that the operations of schedules run.

        Args:
            taken: The sharded modules of the model.
            program: Model, backward and optimizer.
            wait_plain: Waits for the input dists of the non-interleaved modules.
        """
        self._taken, self._program = taken, program
        self._feed.asks_ahead = taken.has_stock_means
        self._operations = Operations(program, taken, self._id_stream, wait_plain)

    def fetch_first(self, batches: Iterator[Any]) -> Fetched:
        """Fetches the batch of a step while no batch is in flight. Collective.

        Raises:
            StopIteration: On all ranks, if no rank has a batch.
        """
        return self._feed.first(self._pg, batches)

    def begin(self, fetched: Fetched) -> None:
        """Puts the first batch in flight and fetches its rows. Collective."""
        self._flights.append(self._prepared(fetched))
        try:
            self._fetch_rows()
        except BaseException:  # no step has begun: the next call fetches another batch
            self.clear()
            raise

    def prepare_again(self) -> None:
        """Prepares all batches again, by the current hot set and setting. Collective."""
        before = list(self._flights)
        self._flights.clear()
        self._led.clear()
        for flight in before:
            context = self._feed.create_context()
            context.postproc_fwd_results = flight.context.postproc_fwd_results
            again = self._prepared(replace(flight.fetched, context=context))
            again.wholes = flight.wholes
            self._add(again)
            if again is self.first:
                self._fetch_rows()

    def start_step(self, batches: Iterator[Any]) -> None:
        """Starts to agree on flags with all ranks, and fetches batches meanwhile. Collective.

        Args:
            batches: This rank's batches.

        Raises:
            StopIteration: On all ranks, if not all have a batch and all must: the step does not
                begin.
            PicassoError: If this rank's flags differ from those before, in a step that an exception
                of its data iterator left unbegun: the others may be in it.
        """
        self._ask()
        while len(self._flights) < NUM_BATCHES and not self._feed.has_ended:
            try:
                fetched = self._feed.following(self._pg, batches, self._flights[-1].batch)
            except StopIteration:
                self._agreed()
                raise
            if fetched is None:
                return
            self._add(self._prepared(fetched))

    def run_step(self, *, fetch_again: bool) -> None:
        """Runs the operations of a step. Collective.

        Args:
            fetch_again: Whether rows of the batch may have been updated since they were fetched.

        Raises:
            CompatError: See :meth:`.Cuts.decide`.
        """
        flight, settings = self.first, [flight.setting for flight in self._flights]
        is_training = self._model.training
        make = training_schedule if is_training else evaluation_schedule
        schedule = make(*settings, num_waves=self.num_waves)
        self._cuts.start_step()
        self._lead(schedule)
        flags = self._agreed()
        if fetch_again or flags.homes_written:
            for rows in flight.rows:
                rows.fetch_again()
        if not is_training:
            flight.is_whole = True
            self._cuts.train_whole_next()
            self._run(schedule)
            return
        assert self._program is not None
        self._program.zero_grad()  # first of all: it passes learning rates to FBGEMM
        flight.is_whole = counts_gradients(self._model)
        self._cuts.decide(flight, flags.model_changed)
        self._run(schedule)
        self._cuts.end_step(settings)

    def end_step(self) -> Flight:
        """Removes and returns the batch of this step."""
        self._led.clear()
        return self._flights.popleft()

    def hear_of_failures(self, step: int) -> AbstractContextManager[None]:
        """In this context, errors name the operation, and the rank that caused them.

        Args:
            step: Number of the step that runs in the context.
        """
        if self._peers is None:
            self._peers = Peers(self._pg)
        return self._peers.hear_of_failures(lambda: f"step {step}, {self._doing}")

    def clear(self) -> None:
        """Drops all batches, also a batch that was fetched and kept, and ends a failure."""
        for flight in self._flights:
            flight.forget()
        self._flights.clear()
        self._feed.forget()
        self._led.clear()
        self._agreement = None
        self._lifecycle.reset()

    @property
    def _pg(self) -> dist.ProcessGroup:
        return process_group_of(self._model)

    @property
    def _doing(self) -> str:
        """The current operation, for messages of errors."""
        is_halfway = self._lifecycle.state in (State.IN_STEP, State.FAILED)
        return str(self._op) if is_halfway else "next batch"

    def _ask(self) -> None:
        """Starts to agree with all ranks on the flags of a step. Collective."""
        assert self._taken is not None
        flags = Flags(
            homes_written=self._taken.was_written(),
            model_changed=self._model.training and self._cuts.has_changed(self.first.batch),
        )
        if self._agreement is None:
            self._agreement = Agreement(self._pg, self._taken.device, flags)
        elif self._agreement.mine != flags:
            raise PicassoError(
                "tables or the model were changed after an exception in the data iterator, and "
                "other ranks may have begun the step; change them between steps, or call reset() "
                "on all ranks"
            )

    def _agreed(self) -> Flags:
        """Returns the flags of all ranks, before the step begins. Collective."""
        assert self._agreement is not None
        asked, self._agreement = self._agreement, None
        return asked.wait()

    def _lead(self, schedule: Schedule) -> None:
        """Runs the first operations of a schedule, those of later batches alone. Collective.

        They need no answer of other ranks and change nothing of this batch or the model, so they
        run while the answer to :meth:`_ask` and the rows of this batch travel.
        """
        ahead = takewhile(lambda op: op.kind in _LEADING, schedule)
        missing = Schedule(tuple(op for op in ahead if op not in self._led))
        self._run(missing)
        self._led.update(missing)

    def _run(self, schedule: Schedule) -> None:
        """Runs the operations of a schedule on those of its batches that exist. Collective."""
        assert self._operations is not None
        assert self._taken is not None
        with self._lifecycle.in_step():
            for op in schedule:
                if op.batch < len(self._flights) and op not in self._led:
                    self._op = op
                    in_postprocs = self._taken.postprocs.of_op(op, self._flights[op.batch])
                    with named_range(OP_RANGE, op), in_postprocs:
                        self._operations.run(op, self._flights)
                    if self._flights[-1].is_end:  # other operations of the batch are left out
                        self._feed.end()
                        self._flights.pop()

    def _add(self, flight: Flight) -> None:
        """Adds a batch; the second one starts to request its rows before the step. Collective."""
        self._flights.append(flight)
        if len(self._flights) == 2:
            self._run(second_batch_schedule(flight.setting))

    def _fetch_rows(self) -> None:
        """Fetches the rows of the first batch before any step. Collective."""
        assert self._taken is not None
        self._ask()
        if self._agreed().homes_written:
            self._taken.take_writes()
        self._run(first_batch_schedule(self.first.setting, num_waves=self.num_waves))

    def _prepared(self, fetched: Fetched) -> Flight:
        """Splits a batch into micro-batches by the current setting, and reads its inputs.

        A batch of few samples, or one that cannot be split, becomes the first micro-batch, and the
        others are empty. Other ranks may still split theirs.

        Raises:
            CompatError: If features have their own batch sizes (VBE), unlike those of the first
                batch.
        """
        assert self._taken is not None
        batch, setting = fetched.batch, self._cuts.current
        if not self._model.training:  # evaluation is never split
            setting = replace(setting, num_micro_batches=1)
        with self._id_stream.working():
            self._id_stream.take_batch(batch)
            inputs, num_samples = self._taken.read(batch, fetched.context)
            sizes_K = micro_batch_sizes(num_samples, setting.num_micro_batches)
            micro_batches_K = [batch, *[None] * (setting.num_micro_batches - 1)]
            # sizes_K[0] == num_samples: too few samples for more than one micro-batch
            if sizes_K[0] < num_samples:
                try:
                    micro_batches_K = list(self._options.split(batch, sizes_K))
                except (CompatError, InputError) as error:
                    self._log_unsplit(error)
                    sizes_K = [num_samples, *[0] * (setting.num_micro_batches - 1)]
        return Flight(fetched, setting, sizes_K, micro_batches_K, inputs)

    def _log_unsplit(self, error: Exception) -> None:
        """Logs that a batch could not be split; once, since later batches are like it."""
        if not self._has_logged:
            self._has_logged = True
            _log.info("a batch is trained whole, it cannot be split: %s", reason_of(error))
