"""The batches that a step works on: fetched, cut, agreed on, and run through its schedule."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import takewhile
from typing import Any

import torch.distributed as dist
from torch import nn

from torchrec_picasso.batches.feed import BatchFeed, Fetched, IdStream, find_data
from torchrec_picasso.batches.split import micro_batch_sizes, reason_of
from torchrec_picasso.errors import CompatError, InputError
from torchrec_picasso.exchange.agreement import Flags, agree_on
from torchrec_picasso.exchange.by_host import FlagsAgreement
from torchrec_picasso.exchange.waiting import OP_RANGE, named_range
from torchrec_picasso.schedule.kinds import KINDS
from torchrec_picasso.schedule.schedule import (
    NUM_BATCHES,
    Op,
    Schedule,
    Setting,
    evaluation_schedule,
    first_batch_schedule,
    second_batch_schedule,
    training_schedule,
)
from torchrec_picasso.train_pipeline.batch_watch import WrittenBatchError
from torchrec_picasso.train_pipeline.data_parallel import records_static_graph
from torchrec_picasso.train_pipeline.equal_rows import are_uneven
from torchrec_picasso.train_pipeline.in_flight_batch import InFlightBatch
from torchrec_picasso.train_pipeline.lifecycle import Lifecycle, State
from torchrec_picasso.train_pipeline.micro_batch_policy import MicroBatchPolicy
from torchrec_picasso.train_pipeline.model_parts import has_stock_means, process_group_of
from torchrec_picasso.train_pipeline.operations import Operations
from torchrec_picasso.train_pipeline.options import PipelineOptions
from torchrec_picasso.train_pipeline.pipelined_model import PipelinedModel

_log = logging.getLogger(__name__)


class BatchQueue:
    """A queue of at most three batches: of this step, of the next, and of the one after."""

    def __init__(
        self,
        model: nn.Module,
        feed: BatchFeed,
        options: PipelineOptions,
        policy: MicroBatchPolicy,
        lifecycle: Lifecycle,
        id_stream: IdStream,
    ) -> None:
        self._model = model
        self._feed = feed
        self._options = options
        self._policy = policy
        self._lifecycle = lifecycle
        self._id_stream = id_stream
        self._inflights: deque[InFlightBatch] = deque()
        self._operations: Operations  # from work_with() on
        # Both follow from the plan, and are known from the first step on.
        self._num_waves, self._forwards_first = 1, True
        self._op: Op | str = ""
        self._led: set[Op] = set()  # operations that ran ahead of a step that has not begun
        self._num_changes = 0  # of the tables, when this pipeline last fetched rows
        self._has_logged = False

    def __len__(self) -> int:
        return len(self._inflights)

    @property
    def first(self) -> InFlightBatch:
        """The batch of this step."""
        return self._inflights[0]

    def schedule(self, *settings: Setting) -> Schedule:
        """Returns the schedule of a training step on batches with these settings, by the plan's
        waves of packs and order of micro-batches, which are known from the first step on."""
        return training_schedule(
            *settings,
            num_waves=self._num_waves,
            forwards_first=self._forwards_first,
            waits_on_stream=self._id_stream.stream is not None,
        )

    def work_with(self, operations: Operations) -> None:
        """Sets what runs the operations of schedules, and the model that they run."""
        self._operations = operations
        pipelined = operations.pipelined
        self._feed.asks_ahead = has_stock_means(pipelined.plain.values()) or not pipelined.groups
        self._num_waves = pipelined.num_waves
        # a ratio needs the sums over all micro-batches before the first backward, as rows do
        self._forwards_first = self._options.loss_reduction == "ratio" or pipelined.shares_rows
        # a model that is attached again may have new modules for the batches in flight
        for inflight in self._inflights:
            for each, group in zip(inflight.groups, pipelined.groups):
                each.group = group

    def fetch_first(self, batches: Iterator[Any]) -> Fetched:
        """Fetches a batch when none is in flight; see :meth:`.BatchFeed.first`. Collective."""
        return self._feed.first(self._pg, batches)

    def begin(self, fetched: Fetched) -> None:
        """Puts the first batch in flight and fetches its rows. Collective."""
        self._inflights.append(self._new_inflight(fetched))
        try:
            self._fetch_rows()
        except BaseException:  # no step has begun: the next call fetches another batch
            self.clear()
            raise

    def request_again(self) -> None:
        """Requests rows of all batches again, by the current hot set and setting. Collective."""
        self._policy.forget_step()  # rows of the next step travel before it
        before = list(self._inflights)
        self._inflights.clear()
        self._led.clear()
        with self._lifecycle.in_step():  # an exception loses batches
            for inflight in before:
                context = self._feed.create_context()
                context.postproc_fwd_results = inflight.context.postproc_fwd_results
                facts = inflight.has_data, inflight.refusal, inflight.prepared
                again = self._new_inflight(Fetched(inflight.batch, context, *facts))
                again.full_outputs = inflight.full_outputs
                self._add(again)
                if again is self.first:
                    self._fetch_rows()

    def is_of_other_mode(self) -> bool:
        """Whether a batch in flight has inputs that the model makes in its other mode (training,
        evaluation), or made before it was attached again."""
        made_ahead = self._pipelined.made_ahead
        return any(made_ahead.is_of_other_mode(each.context) for each in self._inflights)

    def read_batches(self, batches: Iterator[Any]) -> None:
        """Fetches batches until a step has all that it works on, or data has ended. Collective.

        As in TorchRec's pipeline, gradients are cleared before the last one is read: ``zero_grad``
        passes learning rates to FBGEMM, and a user's own may change the model. Without
        ``execute_all_batches`` all ranks raise StopIteration before the step if one has no batch.
        """
        self._fetch_up_to(NUM_BATCHES - 1, batches)
        if self._model.training:
            self._operations.program.zero_grad()
        self._fetch_up_to(NUM_BATCHES, batches)

    def _fetch_up_to(self, num_batches: int, batches: Iterator[Any]) -> None:
        while len(self._inflights) < num_batches and not self._feed.has_ended:
            fetched = self._feed.following(self._pg, batches, self._inflights[-1].batch)
            if fetched is None:
                return
            self._add(self._new_inflight(fetched))

    def run_step(self) -> None:
        """Runs the operations of a step. Collective.

        Raises CompatError on all ranks, if a batch of any rank cannot be trained; and see
        :meth:`.MicroBatchPolicy.decide_whether_whole`.
        """
        inflight, is_training = self.first, self._model.training
        settings = [each.setting for each in self._inflights]
        if is_training:
            schedule = self.schedule(*settings)
        else:
            schedule = evaluation_schedule(*settings, num_waves=self._num_waves)
        agreement = self._start_agreement()
        with self._lifecycle.in_step():
            # The operations at the head of the schedule are of later batches, need no answer of
            # other ranks and change nothing of this batch or the model, so they run while the
            # answer and the rows of this batch travel.
            ahead = [*takewhile(lambda op: KINDS[op.kind].leads, schedule)]
            self._run(ahead)
            self._led.update(ahead)
            flags = self._end_agreement(agreement)
            if flags.homes_written:
                for each in inflight.groups:
                    each.rows.fetch_again()
                self._num_changes = self._pipelined.num_changes
        if not is_training:
            inflight.is_whole, inflight.takes_gradients = True, False
            self._policy.train_whole_next()
            self._run(schedule)
            return
        inflight.is_whole = records_static_graph(self._model) or flags.parts_fail
        self._policy.decide_whether_whole(inflight, flags.model_changed)
        self._run(schedule)
        self._num_changes = self._pipelined.num_changes
        self._policy.end_step(settings, inflight.num_samples)

    def end_step(self) -> InFlightBatch:
        """Removes and returns the batch of this step."""
        self._led.clear()
        return self._inflights.popleft()

    def clear(self) -> None:
        """Drops all batches, also a batch that was fetched and kept, and ends a failure."""
        for inflight in self._inflights:
            inflight.forget()
        self._inflights.clear()
        self._feed.forget()
        self._led.clear()
        self._policy.forget_step()
        self._lifecycle.reset()

    @property
    def _pipelined(self) -> PipelinedModel:
        return self._operations.pipelined

    @property
    def _pg(self) -> dist.ProcessGroup:
        return process_group_of(self._model)

    @property
    def doing(self) -> str:
        """The current operation, for messages of errors."""
        is_halfway = self._lifecycle.state in (State.IN_STEP, State.FAILED)
        return str(self._op) if is_halfway else "next batch"

    def _start_agreement(self) -> FlagsAgreement:
        """Starts to agree with all ranks on the flags of a step. Collective."""
        # another driver of the tables may have trained them, or taken over what was written, while
        # rows of this one were in flight
        was_changed = self._pipelined.num_changes != self._num_changes
        groups = [group.row_group for group in self._pipelined.groups]
        flags = Flags(
            homes_written=was_changed or any(group.was_written() for group in groups),
            model_changed=self._model.training and self._policy.has_changed(self.first.batch),
            refused=any(inflight.refusal for inflight in self._inflights),
            parts_fail=self._model.training and self._parts_fail(),
        )
        return FlagsAgreement(self._pg, self._pipelined.device, flags)

    def _parts_fail(self) -> bool:
        """Whether the model would raise in a micro-batch of the first batch, by its lookups."""
        groups, pipelined = self._policy.equal_rows, self._pipelined
        if not groups or len(self.first.filled) == 1:
            return False
        with self._id_stream.working():
            return are_uneven(groups, self.first, pipelined.looked_up(groups, self.first))

    def _end_agreement(self, agreement: FlagsAgreement) -> Flags:
        """Returns the flags of all ranks, or raises a rank's refusal on all ranks. Collective."""
        self._op = "agreement of ranks"
        flags = agreement.wait()
        if flags.refused:
            device = self._pipelined.device
            first_with_data, _ = find_data(self._pg, device, self._inflights[-1].has_data)
            # a rank that can make no empty batch needs one only if another rank has data
            if first_with_data is not None:
                refusals = [inflight.refusal for inflight in self._inflights]
                own = next((f"rank {self._pg.rank()}: {each}" for each in refusals if each), None)
                raise CompatError(agree_on(self._pg, device, own))
        return flags

    def _run(self, schedule: Iterable[Op]) -> None:
        """Runs the operations of a schedule on those of its batches that exist. Collective."""
        with self._lifecycle.in_step():
            for op in schedule:
                if op.batch < len(self._inflights) and op not in self._led:
                    self._op = op
                    with named_range(OP_RANGE, op):
                        self._operations.run(op, self._inflights)
                    if self._inflights[-1].is_end:  # other operations of the batch are left out
                        self._feed.has_ended = True
                        self._inflights.pop()

    def _add(self, inflight: InFlightBatch) -> None:
        """Adds a batch; the second one starts to request its rows before the step. Collective."""
        self._inflights.append(inflight)
        if len(self._inflights) == 2:
            self._run(second_batch_schedule(inflight.setting))

    def _fetch_rows(self) -> None:
        """Fetches the rows of the first batch before any step. Collective."""
        if self._end_agreement(self._start_agreement()).homes_written:
            for group in self._pipelined.groups:
                group.row_group.apply_writes()
        self._num_changes = self._pipelined.num_changes
        self._run(first_batch_schedule(self.first.setting, num_waves=self._num_waves))

    def _new_inflight(self, fetched: Fetched) -> InFlightBatch:
        """Splits a batch by the current setting. A batch that cannot be trained is refused on all
        ranks before the step; until then the batch before stands in for it."""
        setting = self._policy.current
        if not self._model.training:  # evaluation is never cut
            setting = replace(setting, num_micro_batches=1)
        try:
            return self._split(fetched, setting)
        except CompatError as refusal:
            if not self._inflights:  # all ranks agree before an operation needs the batch
                refused = vars(replace(fetched, refusal=refusal))
                return InFlightBatch(
                    **refused, setting=setting, sizes_K=[0], micro_batches_K=[fetched.batch]
                )
            before, context = self._inflights[-1], self._feed.create_context()
            # the model's code, which may have raised, does not run again
            context.postproc_fwd_results = before.context.postproc_fwd_results
            stand_in = Fetched(before.batch, context, has_data=fetched.has_data, refusal=refusal)
            return self._split(stand_in, setting)

    def _split(self, fetched: Fetched, setting: Setting) -> InFlightBatch:
        """Splits a batch into micro-batches, and reads its inputs; may raise on this rank alone.

        A batch of few samples, or one that cannot be cut, becomes the first micro-batch, and the
        others are empty. Other ranks may still cut theirs.
        """
        batch, prepared = fetched.batch, fetched.prepared
        if prepared is not None and prepared.plan != self._pipelined.preparation.plan:
            fetched = replace(fetched, prepared=None)  # of another model
        with self._id_stream.working():
            self._id_stream.take_batch(batch if prepared is None else prepared)
            features_of, num_samples = self._pipelined.read(batch, fetched.context)
            sizes_K = micro_batch_sizes(num_samples, setting.num_micro_batches)
            micro_batches_K = [batch, *[None] * (setting.num_micro_batches - 1)]
            # sizes_K[0] == num_samples: too few samples for more than one micro-batch
            if sizes_K[0] < num_samples:
                try:
                    micro_batches_K = list(self._options.split(batch, sizes_K))
                    parts = micro_batches_K, sizes_K, self._policy.is_proved
                    self._pipelined.make_parts(fetched.context, *parts)
                except WrittenBatchError:
                    raise  # the whole batch is written
                except (CompatError, InputError) as error:
                    if not self._has_logged:  # later batches are like it
                        self._has_logged = True
                        reason = reason_of(error)
                        _log.info("a batch is trained whole, it cannot be cut: %s", reason)
                    micro_batches_K = [batch, *[None] * (setting.num_micro_batches - 1)]
                    sizes_K = [num_samples, *[0] * (setting.num_micro_batches - 1)]
        inflight = InFlightBatch(
            **vars(fetched), setting=setting, sizes_K=sizes_K, micro_batches_K=micro_batches_K
        )
        inflight.features_of, inflight.forwards_first = features_of, self._forwards_first
        return inflight
