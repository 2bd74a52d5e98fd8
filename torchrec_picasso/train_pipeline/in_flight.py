"""The batches that a step works on: fetched, cut, agreed on, and run through schedules."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from itertools import takewhile
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from torchrec_picasso.errors import CompatError
from torchrec_picasso.exchange.agreement import Agreement, Flags
from torchrec_picasso.exchange.consensus import agree_on
from torchrec_picasso.feed.batch_feed import BatchFeed, Fetched
from torchrec_picasso.feed.end_of_data import take_census
from torchrec_picasso.schedule.schedule import (
    NUM_BATCHES,
    Op,
    Schedule,
    Setting,
    first_batch_schedule,
    second_batch_schedule,
)
from torchrec_picasso.train_pipeline.boarding import Boarding
from torchrec_picasso.train_pipeline.cuts import Cuts
from torchrec_picasso.train_pipeline.flight import Flight
from torchrec_picasso.train_pipeline.model_parts import process_group_of
from torchrec_picasso.train_pipeline.operations import Operations
from torchrec_picasso.train_pipeline.pieces import Cut
from torchrec_picasso.train_pipeline.pipelined_model import PipelinedModel
from torchrec_picasso.train_pipeline.ranges import op_range

__all__ = ["InFlight"]

_LEADING = ("lay_out", "request")


class InFlight:
    """A queue of at most three batches: of this step, of the next, and of the one after.

    Args:
        model: As given to the pipeline.
        feed: Fetches batches.
        boarding: Cuts them.
        cuts: Decides how the next batch is cut.
        device: Where collectives run.
    """

    def __init__(
        self,
        model: nn.Module,
        feed: BatchFeed,
        boarding: Boarding,
        cuts: Cuts,
        device: torch.device,
    ) -> None:
        self._model = model
        self._feed = feed
        self._boarding = boarding
        self._cuts = cuts
        self._device = device
        self._flights: deque[Flight] = deque()
        self._taken: PipelinedModel | None = None
        self._operations: Operations | None = None
        self._op: Op | str = ""
        self._led: set[Op] = set()  # operations that ran ahead of a step that has not begun
        self.is_halfway = False
        """Whether operations have begun and not ended: an exception ended them."""

    def __len__(self) -> int:
        return len(self._flights)

    def __iter__(self) -> Iterator[Flight]:
        return iter(self._flights)

    @property
    def first(self) -> Flight:
        """The batch of this step."""
        return self._flights[0]

    @property
    def settings(self) -> list[Setting]:
        """How the batches are cut, in order."""
        return [flight.setting for flight in self._flights]

    @property
    def doing(self) -> str:
        """The operation that runs, for messages of errors."""
        return str(self._op) if self.is_halfway else "next batch"

    @property
    def _pg(self) -> dist.ProcessGroup:
        return process_group_of(self._model)

    def work_with(self, taken: PipelinedModel, operations: Operations) -> None:
        """Takes the sharded modules of the model, and what the operations of a schedule do."""
        self._taken, self._operations = taken, operations

    def fetch_first(self, batches: Iterator[Any]) -> Fetched:
        """The batch of a step that no batch is in flight for. Collective.

        Raises:
            StopIteration: On all ranks, if no rank has a batch.
        """
        return self._feed.first(self._pg, batches)

    def begin(self, fetched: Fetched) -> None:
        """Puts the first batch in flight and brings its rows. Collective."""
        flight = self._prepared(fetched)
        self._flights.append(flight)
        try:
            self._bring_rows(flight)
        except BaseException:  # no step has begun: the next call starts anew
            self.clear()
            raise

    def fill(self, batches: Iterator[Any]) -> None:
        """Adds batches until there are as many as a step works on, or data has ended. Collective.

        Raises:
            StopIteration: On all ranks, if not all have a batch and all must: the step does not
                begin.
        """
        while len(self._flights) < NUM_BATCHES and not self._feed.has_ended:
            fetched = self._feed.following(self._pg, batches, self._flights[-1].batch)
            if fetched is None:
                return
            self._flights.append(self._prepared(fetched))
            if len(self._flights) == 2:  # before the first step
                self.run(second_batch_schedule(self._flights[1].setting))

    def prepare_again(self) -> None:
        """Prepares all batches once more, by the hot set and the setting of now. Collective."""
        before = list(self._flights)
        self._flights.clear()
        self._led.clear()
        with self._working():  # an exception loses batches
            for flight in before:
                context = self._feed.create_context()
                context.postproc_fwd_results = flight.context.postproc_fwd_results
                again = self._prepared(replace(flight.fetched, context=context))
                again.wholes = flight.wholes
                self._flights.append(again)
                if len(self._flights) == 1:
                    self._bring_rows(again)
                elif len(self._flights) == 2:
                    self.run(second_batch_schedule(again.setting))

    def end_step(self) -> Flight:
        """Takes the batch of this step out."""
        self._led.clear()
        return self._flights.popleft()

    def clear(self) -> None:
        """Forgets all batches, those that were fetched but not cut among them."""
        for flight in self._flights:
            flight.forget()
        self._flights.clear()
        self._feed.forget()
        self._led.clear()
        self.is_halfway = False

    def lead(self, schedule: Schedule, *, fetch_again: bool) -> Flags:
        """Begins a step: all ranks agree, while first operations of its schedule run. Collective.

        These are operations of later batches alone: they need no answer of other ranks and change
        nothing of this batch or the model, so they run while the answer and the rows of this batch
        travel.

        Args:
            schedule: The operations of the step.
            fetch_again: Whether the rows of this batch are fetched again, as after a write.

        Returns:
            The flags of all ranks.

        Raises:
            CompatError: On all ranks, if a batch of any rank cannot be trained.
        """
        agreement = self._ask()
        with self._working():
            ahead = takewhile(lambda op: op.kind in _LEADING, schedule)
            missing = Schedule(tuple(op for op in ahead if op not in self._led))
            self.run(missing)
            self._led.update(missing)
            told = self._agreed(agreement)
            if fetch_again or told.homes_written:
                for rows in self.first.rows:
                    rows.fetch_again()
        return told

    def run(self, schedule: Schedule) -> None:
        """Runs the operations of a schedule on those of its batches that there are. Collective."""
        assert self._operations is not None
        with self._working():
            for op in schedule:
                if op.batch < len(self._flights) and op not in self._led:
                    self._op = op
                    with op_range(op), self._postprocs_in(op):
                        self._operations.run(op, self._flights)
                    if self._flights[-1].is_end:  # what else the schedule has for it is left out
                        self._feed.end()
                        self._flights.pop()

    @contextmanager
    def _working(self) -> Iterator[None]:
        """Context of operations after which, if one raises, all ranks :meth:`clear`."""
        before, self.is_halfway = self.is_halfway, True
        yield
        self.is_halfway = before  # not after an exception

    def _ask(self) -> Agreement:
        """Starts to ask all ranks what they have to say before a step. Collective."""
        assert self._taken is not None
        flags = Flags(
            homes_written=any(group.rows.was_written() for group in self._taken.groups),
            model_changed=self._model.training and self._cuts.has_changed(self.first.batch),
            refused=any(flight.fetched.refusal for flight in self._flights),
        )
        return Agreement(self._pg, self._device, flags)

    def _agreed(self, agreement: Agreement) -> Flags:
        """Returns the flags of all ranks, or raises a rank's refusal on all ranks. Collective."""
        self._op = "agreement of ranks"
        told = agreement.wait()
        if told.refused:
            # a rank that can make no empty batch needs one only if another rank has data
            census = take_census(self._pg, self._device, self._flights[-1].has_data)
            if census.first_with_data is not None:
                found = [flight.fetched.refusal for flight in self._flights]
                own = next((f"rank {self._pg.rank()}: {each}" for each in found if each), None)
                raise CompatError(agree_on(self._pg, self._device, own))
        return told

    def _bring_rows(self, flight: Flight) -> None:
        """Brings the rows of a batch that no step comes before. Collective."""
        assert self._taken is not None
        if self._agreed(self._ask()).homes_written:
            for group in self._taken.groups:
                group.rows.take_writes()
        self.run(first_batch_schedule(flight.setting, num_waves=self._taken.num_waves))

    def _prepared(self, fetched: Fetched) -> Flight:
        """Cuts a batch into micro-batches, by the setting of now.

        A batch of this rank that cannot be trained is refused before the step, on all ranks; until
        then the batch before stands in for it.
        """
        assert self._taken is not None
        setting = self._cuts.choice.current
        if not self._model.training:  # evaluation is never cut
            setting = replace(setting, num_micro_batches=1)
        try:
            return self._boarding.board(fetched, setting, self._taken)
        except CompatError as refusal:
            if not self._flights:  # all ranks agree before an operation needs it
                return Flight(replace(fetched, refusal=refusal), setting, [0], [fetched.batch])
            before, context = self._flights[-1].batch, self._feed.create_context()
            stand_in = Fetched(before, context, refusal=refusal)
            return self._boarding.board(stand_in, setting, self._taken)

    def _postprocs_in(self, op: Op) -> AbstractContextManager[None]:
        """What modules that run ahead of the model work with in an operation."""
        assert self._taken is not None
        flight = self._flights[op.batch]
        if op.kind == "request":
            return self._taken.postprocs.of_batch(flight.context)
        if op.kind == "forward" and op.index in flight.run_indices:
            run, cut = flight.run_indices.index(op.index), Cut.in_order(flight.run_sizes)
            return self._taken.postprocs.of_part(flight.context, cut, run)
        return nullcontext()
