"""Steps of a model with hot/cold tables: schedules run them, on sharded modules taken over."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.modules.regroup import KTRegroupAsDict

from torchrec_picasso._torchrec import TrainPipelineContext
from torchrec_picasso.errors import CompatError
from torchrec_picasso.exchange.waiting import STEP_RANGE, named_range
from torchrec_picasso.schedule.schedule import Setting
from torchrec_picasso.sharding.delta_tracker import step_trackers
from torchrec_picasso.train_pipeline.batch_queue import BatchQueue
from torchrec_picasso.train_pipeline.cut_check import CutEvidence
from torchrec_picasso.train_pipeline.hot_sets import HotSets
from torchrec_picasso.train_pipeline.in_flight_batch import InFlightBatch
from torchrec_picasso.train_pipeline.lifecycle import Lifecycle, State
from torchrec_picasso.train_pipeline.micro_batch_policy import MicroBatchPolicy
from torchrec_picasso.train_pipeline.operations import Operations, Program
from torchrec_picasso.train_pipeline.pipelined_model import PipelinedModel
from torchrec_picasso.train_pipeline.preparation import Preparation
from torchrec_picasso.train_pipeline.rewrite import replace_regroups, restore_regroups
from torchrec_picasso.train_pipeline.steps import Step, Steps

Trace = Callable[[Any, TrainPipelineContext], PipelinedModel]
"""Traces the model and replaces its sharded modules' forwards, with a batch or without (None)."""


class InterleavedSteps(Steps):
    """Takes over the sharded modules of a model at its first batch, then runs schedules."""

    def __init__(
        self,
        program: Program,
        trace: Trace,
        queue: BatchQueue,
        policy: MicroBatchPolicy,
        hot_sets: HotSets,
        lifecycle: Lifecycle,
    ) -> None:
        super().__init__(program.model)
        self._program, self._trace = program, trace
        self._queue, self._policy = queue, policy
        self._hot_sets, self._lifecycle = hot_sets, lifecycle
        self._pipelined: PipelinedModel | None = None
        self._is_taken_over = False
        self._regroups: list[KTRegroupAsDict] = []
        self._num_steps = 0

    @property
    def doing(self) -> str:
        """The current operation, for messages of errors."""
        return self._queue.doing

    @property
    def is_settled(self) -> bool:
        """Whether all further batches have the setting of the next batch."""
        return self._policy.is_settled

    @property
    def setting(self) -> Setting | None:
        """The setting of all further batches; ``None`` before it is chosen."""
        return self._policy.chosen

    def take(self, batches: Iterator[Any], pipeline: TrainPipelineSparseDist[Any, Any]) -> Step:
        """Takes a step on this rank's next batch; see :class:`.Steps`. Collective."""
        with self._program.inference.left():
            inflight = self._run(batches)
        outputs_K = list(inflight.outputs_K.values())
        sizes_K, is_proved = [run.num_samples for run in inflight.runs], self._policy.is_proved
        output = self._program.options.join(outputs_K, sizes_K, is_proved=is_proved)
        inflight.forget()
        return Step(output, inflight.num_samples, inflight.groups)

    def _run(self, batches: Iterator[Any]) -> InFlightBatch:
        """Takes a step; returns its batch. Collective."""
        queue = self._queue
        fetched = None if len(queue) else queue.fetch_first(batches)
        if self._lifecycle.state is State.NEW:  # a model is examined by its first batch
            first = fetched or queue.first
            self._take_over(first.batch, first.context)
        if fetched is not None:
            queue.begin(fetched)
        step_trackers(self._model)
        assert self._pipelined is not None
        self._pipelined.check_forwards()
        # batches in flight have layouts of an older hot set, or inputs of the model's other mode
        if self._hot_sets.have_changed() or queue.is_of_other_mode():
            queue.request_again()
        queue.read_batches(batches)
        with named_range(STEP_RANGE, self._num_steps):
            queue.run_step()
            if self._model.training:
                self._hot_sets.end_step()
        self._num_steps += 1
        return queue.end_step()

    def _take_over(self, batch: Any, context: TrainPipelineContext) -> None:
        """Takes over the sharded modules of the model. Collective."""
        found = self._trace(batch, context)
        # batches in flight stay grouped by the facts that they were read by
        known = self._pipelined.first_batch if len(self._queue) and self._pipelined else None
        found.examine_first_batch(batch, context, known)
        try:
            self._policy.begin(CutEvidence(self._program, found))
        except CompatError:
            found.release()
            self._lifecycle.change_to(State.DETACHED)
            raise
        found.join_splits()
        self._hot_sets.attach(found.groups)
        self._queue.work_with(Operations(self._program, found))
        self._pipelined, self._is_taken_over = found, True
        self._regroups = replace_regroups(found.inner, found.device)
        self._lifecycle.change_to(State.ATTACHED)

    def forget(self) -> None:
        """Drops all batches, and leaves the failed state."""
        self._queue.clear()

    def release(self) -> None:
        """Gives the model its own forwards back; batches in flight stay."""
        if self._pipelined is not None and self._is_taken_over:
            self._pipelined.release()
        self.begin_again()
        self._policy.train_whole_next()

    def begin_again(self) -> None:
        """Lets the next step take over the sharded modules again."""
        self._is_taken_over = False
        restore_regroups(self._regroups)

    def preparation(self) -> Preparation:
        """Returns a reader of ids, for the setting of the next batch; may trace the model."""
        pipelined = self._pipelined
        if pipelined is None:
            pipelined = self._trace(None, TrainPipelineContext())
            pipelined.release()
        number = self._policy.current.num_micro_batches
        return replace(pipelined.preparation, num_micro_batches=number)

    def summary(self) -> str:
        """Describes how each sharded module is run, after a step, and the setting."""
        lines = [] if self._pipelined is None else self._pipelined.lines()
        return "\n".join([*lines, str(self._policy)])
