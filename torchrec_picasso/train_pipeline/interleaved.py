"""A train pipeline that hides the exchange of rows and gradients behind the dense part.

Each batch is cut into micro-batches; while one computes, rows of the next one, gradients of the
last one and the next batch's ids and clean rows are on the wire. The result is that of the plain
loop: every row is updated once per batch, from the sum of its gradients.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist

from torchrec_picasso._torchrec import BackwardHookWork, InjectionSite, TrainPipelineContext
from torchrec_picasso.errors import CompatError, ConfigError, PicassoError
from torchrec_picasso.exchange.agreement import Agreement, Flags
from torchrec_picasso.exchange.peers import Peers
from torchrec_picasso.feed.batch_feed import BatchFeed, Fetched
from torchrec_picasso.feed.end_of_data import SplitBatch
from torchrec_picasso.feed.id_stream import IdStream
from torchrec_picasso.options.refresh import Refresh
from torchrec_picasso.placement import HotColdParams
from torchrec_picasso.refresh.refresher import Refreshed
from torchrec_picasso.refresh.saved_uses import SavedUses
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
from torchrec_picasso.schedule.step_clock import StepClock
from torchrec_picasso.sharding.delta_tracker import begin_batch
from torchrec_picasso.train_pipeline.boarding import Boarding
from torchrec_picasso.train_pipeline.cut_check import CutCheck
from torchrec_picasso.train_pipeline.cuts import Cuts
from torchrec_picasso.train_pipeline.data_parallel import counts_gradients
from torchrec_picasso.train_pipeline.evidence import CutEvidence
from torchrec_picasso.train_pipeline.flight import Flight
from torchrec_picasso.train_pipeline.hot_sets import HotSets
from torchrec_picasso.train_pipeline.losses import Losses
from torchrec_picasso.train_pipeline.model_parts import (
    inner_model,
    process_group_of,
)
from torchrec_picasso.train_pipeline.operations import Operations, Program
from torchrec_picasso.train_pipeline.parent_options import (
    refuse_backward_hook,
    refuse_model,
    refuse_options,
)
from torchrec_picasso.train_pipeline.pieces import Cut
from torchrec_picasso.train_pipeline.pipelined_model import FirstLook, PipelinedModel
from torchrec_picasso.train_pipeline.ranges import op_range, step_range
from torchrec_picasso.train_pipeline.regroup import Regroups
from torchrec_picasso.train_pipeline.step_report import OnStep, StepWatch

__all__ = ["InterleavedTrainPipeline"]

In = TypeVar("In")
Out = TypeVar("Out")

_REFRESH = Refresh()


class InterleavedTrainPipeline(TrainPipelineSparseDist[In, Out]):
    """Trains like TorchRec's ``TrainPipelineSparseDist``, with the exchange hidden.

    ``progress(iterator)`` takes one step and returns the model's output for the whole batch, and
    raises ``StopIteration`` after the last batch. Hot/cold tables are interleaved, those of all
    modules in one exchange; others, in the same module or not, are trained as by TorchRec's
    pipeline and listed by :meth:`summary`, with the reason.

    How a batch is interleaved is chosen by trying on the first training steps, beginning with what
    the plan was priced for: some 12 steps, 28 at most. Before a model is
    trained in micro-batches, and again in steps 2, 4, 8, ..., it is compared whether they give what
    the whole batch gives (:mod:`.cut_check`). If not, batches are not cut any more, with a warning
    if some were; where micro-batches were asked for, all ranks raise instead.

    Ranks may have different numbers of batches. One whose data has ended goes on with empty batches
    until all have ended, as in a plain loop that is given them, except that its loss counts
    nothing; then all ranks raise ``StopIteration`` at the same call.

    Args:
        model: ``DistributedModelParallel``; its forward returns ``(losses, output)``, losses being
            means over the samples. Or any model that TorchRec's pipeline takes.
        optimizer: Dense and fused optimizers, as for TorchRec's pipelines.
        device: Where batches go.
        execute_all_batches: As for TorchRec's pipelines. If not, all ranks stop before the step in
            which the first of them has no next batch; what is in flight or fetched waits for a new
            iterator. Costs a small all-reduce per step.
        apply_jit: Refused, as are the others that say so; the error tells what to do.
        context_type: What TorchRec keeps with a batch.
        pipeline_postproc: As for TorchRec's pipelines: modules without parameters between batch and
            tables run ahead of the model, once per batch. Micro-batches get their parts.
        custom_model_fwd: Called instead of the model with every micro-batch, and by the comparison
            of micro-batches with the whole batch; gives ``(losses, output)``.
        dmp_collection_sync_interval_batches: Of no effect; a ``DMPCollection`` is refused.
        enqueue_batch_after_forward: Refused.
        enable_inplace_copy_batch: As for TorchRec's pipelines.
        free_features_storage_early: Refused.
        clear_data_dist_inputs: Refused.
        async_inplace_copy: Refused.
        num_micro_batches: Pieces K that a batch is cut into; 1 still overlaps with the next batch.
            ``None`` = chosen by trying some on the first steps, 1 where batches cannot be cut.
        lookahead: Whether rows of the next batch that this one does not update are fetched early.
            ``None`` = chosen likewise.
        split_batch: Cuts a batch into parts of given sizes, ``(batch, sizes) -> parts``; ``None``
            knows tensors, KeyedJaggedTensors, dataclasses and containers of them. Sizes may be 0.
            On an accelerator it runs on the stream of input dists.
        join_outputs: Joins the parts' outputs, ``(outputs, sizes) -> output``; ``None`` knows the
            same types.
        loss_reduction: Whether the model's losses are a ``"mean"`` over samples, a ``"sum"``, or a
            ``"ratio"`` of two sums, such as weighted losses over weights: then the model returns
            ``((numerators, denominators), output)``. A sum or ratio within the model's output needs
            ``join_outputs``.
        refresh: How the hot rows of interleaved tables follow what is looked up; ``None`` = they
            stay the plan's. Results are the same either way.
        verify_every: Training steps between two comparisons of all replicas with their homes, to
            the bit; ``None`` = none. A comparison sends all hot rows to all ranks.
        on_step: Called on every rank with a report of each training step, after it, or several such
            in turn; if one raises, the step's output is lost and the next call goes on.

    Raises:
        ConfigError: If ``num_micro_batches`` or ``verify_every`` is less than 1, or the reduction
            is not known.
        CompatError: If an argument of TorchRec's or a wrapper of the model is refused; in a step,
            if the model cannot be trained in as many micro-batches as were asked for.
    """

    _model: nn.Module
    _original_kjt_dist_forwards: list[Any]

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        execute_all_batches: bool = True,
        apply_jit: bool = False,
        context_type: type[TrainPipelineContext] = TrainPipelineContext,
        pipeline_postproc: bool = False,
        custom_model_fwd: Callable[[In | None], tuple[Tensor, Out]] | None = None,
        dmp_collection_sync_interval_batches: int | None = 1,
        enqueue_batch_after_forward: bool = False,
        enable_inplace_copy_batch: bool = False,
        free_features_storage_early: bool = False,
        clear_data_dist_inputs: bool = False,
        async_inplace_copy: bool = False,
        *,
        num_micro_batches: int | None = None,
        lookahead: bool | None = None,
        split_batch: SplitBatch | None = None,
        join_outputs: Callable[[Sequence[Any], Sequence[int]], Any] | None = None,
        loss_reduction: str = "mean",
        refresh: Refresh | None = _REFRESH,
        verify_every: int | None = None,
        on_step: OnStep | None = None,
    ) -> None:
        losses = Losses(loss_reduction)
        for name, number in (
            ("num_micro_batches", num_micro_batches),
            ("verify_every", verify_every),
        ):
            if number is not None and number < 1:
                raise ConfigError(f"{name} is {number}, expected at least 1")
        refuse_options(
            {
                "apply_jit": apply_jit,
                "enqueue_batch_after_forward": enqueue_batch_after_forward,
                "free_features_storage_early": free_features_storage_early,
                "clear_data_dist_inputs": clear_data_dist_inputs,
                "async_inplace_copy": async_inplace_copy,
            }
        )
        refuse_model(model)
        super().__init__(
            model,
            optimizer,
            device,
            execute_all_batches=execute_all_batches,
            context_type=context_type,
            pipeline_postproc=pipeline_postproc,
            custom_model_fwd=custom_model_fwd,
            dmp_collection_sync_interval_batches=dmp_collection_sync_interval_batches,
            enable_inplace_copy_batch=enable_inplace_copy_batch,
        )
        self._custom_forward, self._losses = custom_model_fwd, losses
        own = {"custom_model_fwd": custom_model_fwd, "split_batch": split_batch}
        own["join_outputs"] = join_outputs
        self._own_parts = [name for name, function in own.items() if function is not None]
        self._id_stream = IdStream(self._data_dist_stream, self._memcpy_stream)
        self._boarding = Boarding(split_batch, join_outputs, self._id_stream)
        fetch = self.copy_batch_to_gpu
        if enable_inplace_copy_batch:
            fetch = self.inplace_copy_batch_to_gpu
        self._feed = BatchFeed(
            fetch,
            self._create_context,
            device,
            self._boarding.split,
            execute_all_batches,
            self._id_stream,
        )
        self._flights: deque[Flight] = deque()
        self._is_halfway = False
        # whether the next training step is whole: the first is, and one after forwards without
        # backwards, which leave the wrapper waiting
        self._expects_gradients = True
        self._op: Op | None = None
        self._peers: Peers | None = None
        self._asked, self._lookahead = num_micro_batches, lookahead
        self._cuts = Cuts(num_micro_batches, lookahead)
        self._injected: list[str] = []
        self._clock = StepClock(device)
        self._taken: PipelinedModel | None = None
        self._regroups = Regroups()
        self._look = FirstLook()
        self._hot_sets = HotSets(refresh, verify_every)
        self._agreement: Agreement | None = None  # of a step that has not begun
        self._watch = StepWatch(on_step, device)

    @property
    def num_micro_batches(self) -> int:
        """Pieces that the next batch will be cut into."""
        return self._cuts.choice.current.num_micro_batches

    @property
    def lookahead(self) -> bool:
        """Whether the next batch's clean rows will be fetched early."""
        return self._cuts.choice.current.lookahead

    @property
    def is_settled(self) -> bool:
        """Whether all further batches will be cut and fetched like the next one."""
        return self._cuts.is_settled

    @property
    def setting(self) -> Setting | None:
        """What the trial has chosen, for a later run; ``None`` before."""
        return self._cuts.chosen

    def settle_on(self, setting: Setting) -> None:
        """Takes an earlier run's :attr:`setting`, if allowed, and tries none; all ranks do."""
        self._cuts.settle_on(setting)

    @property
    def last_refresh(self) -> Refreshed | None:
        """What came of the last look at the hot set, with ``refresh``; the same on all ranks."""
        return self._hot_sets.last

    def hot_rows(self) -> dict[str, Tensor]:
        """The hot rows of interleaved tables by name, ascending int64, after the first step."""
        return self._hot_sets.hot_rows()

    def saved_uses(self) -> SavedUses | None:
        """What ``refresh`` has counted, for a later run; ``None`` if nothing. Collective."""
        return self._hot_sets.saved_uses()

    def go_on_with(self, saved: SavedUses) -> None:
        """Has ``refresh`` count on from what :meth:`saved_uses` gave; all ranks do."""
        self._hot_sets.go_on_with(saved)

    @property
    def schedule(self) -> Schedule:
        """The operations of a training step, in order."""
        return training_schedule(self._cuts.choice.current, num_waves=self._num_waves)

    @property
    def _num_waves(self) -> int:
        """Waves that the plan cut the packs into; known from the first step on."""
        return 1 if self._taken is None else self._taken.num_waves

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
            PeerError: If another rank failed, with its message, or does not answer.
            PicassoError: If the step before did not end; see :meth:`reset`.
        """
        is_training = self._model.training
        if self._peers is None:
            self._peers = Peers(process_group_of(self._model))
        with self._peers.hear_of_failures(self._doing), self._watch.measuring():
            flight = self._take_step(dataloader_iter)
            output: Out = self._boarding.output_of(flight)
        flight.forget()
        if is_training:
            self._watch.report(flight, self.last_refresh)
        return output

    def _doing(self) -> str:
        """What a step was at when it failed."""
        return f"step {self._batch_count}, {self._op if self._is_halfway else 'next batch'}"

    def _take_step(self, dataloader_iter: Iterator[In]) -> Flight:
        """Takes one step; gives the batch that it was of. Collective."""
        if self._is_halfway:
            raise PicassoError(
                "the step before raised and did not end; call reset() on all ranks, which forgets "
                "its batches, then go on"
            )
        if not self._model_attached:
            self.attach(self._model)
        if not self._flights:
            self._take_off(dataloader_iter)
        begin_batch(self._model)
        flight = self._flights[0]
        attached_again = self._taken is None
        if attached_again:
            self._rewrite(flight.batch, flight.context)
        if self._hot_sets.have_changed():  # those in flight were laid out by others
            self._id_stream.take_over(self._hot_sets.tensors())
            self._board_again()
            flight = self._flights[0]
        self._ask()
        while len(self._flights) < NUM_BATCHES and self._follow(dataloader_iter):
            if len(self._flights) == 2:  # the first step
                self._walk(second_batch_schedule(self._flights[1].setting))
        told = self._agreed()
        if attached_again or told.homes_written:  # it may have been trained while detached
            for rows in flight.rows:
                rows.fetch_again()
        if self._model.training:
            self._train(flight, told.model_changed)
        else:
            flight.is_whole = self._expects_gradients = True
            settings = [each.setting for each in self._flights]
            with step_range(self._batch_count):
                self._walk(evaluation_schedule(*settings, num_waves=self._num_waves))
        self._flights.popleft()
        self._batch_count += 1
        return flight

    def _train(self, flight: Flight, has_changed: bool) -> None:
        """Takes a training step, of a model that may be another one than was proved. Collective."""
        pg = process_group_of(self._model)
        self._optimizer.zero_grad()  # first of all: it hands learning rates to FBGEMM
        # before any look: then all of its graph is in one backward
        flight.is_whole = self._expects_gradients or counts_gradients(self._model)
        self._cuts.look(flight, has_changed, pg, self._device)
        flight.is_whole |= self._cuts.is_whole
        self._expects_gradients = False
        settings = [each.setting for each in self._flights]
        start = self._clock.stamp()
        with step_range(self._batch_count):
            self._walk(training_schedule(*settings, num_waves=self._num_waves))
        span = start, self._clock.stamp()
        if len(settings) == NUM_BATCHES:
            self._cuts.choice.note_step(settings, span, self._clock, pg, self._device)
        self._hot_sets.end_step()

    def _optimizer_step(self) -> None:
        """Steps the optimizer; a subclass may do it otherwise, as in TorchRec's pipeline."""
        self._optimizer.step()

    def register_backward_hook(self, site: InjectionSite, work: BackwardHookWork) -> None:
        """Runs work in the backward of a module, as TorchRec does; batches are whole from then on.

        Args:
            site: Which module, and where in it.
            work: Takes this pipeline.

        Raises:
            CompatError: If the module has hot/cold tables, whose backward this pipeline schedules,
                or if micro-batches were asked for.
        """
        refuse_backward_hook(inner_model(self._model), site.fqn)
        super().register_backward_hook(site, work)
        self._injected.append(site.fqn)

    def detach(self) -> nn.Module:
        """Gives the model back as it was; batches in flight wait for :meth:`attach`. Collective.

        The model may be used, trained and loaded meanwhile, on all ranks alike.
        """
        if self._taken is not None:
            self._original_kjt_dist_forwards = self._taken.original_dist_forwards
        self._regroups.give_back()
        self._expects_gradients = True
        return super().detach()

    def attach(self, model: nn.Module | None = None, sparse_dist: bool = True) -> None:
        """Takes over the model's sharded modules again; another model forgets batches in flight."""
        if model is not None and model is not self._model:
            self.reset()
            self._cuts = Cuts(self._asked, self._lookahead)
            self._peers = None
        self._regroups.give_back()
        super().attach(model, sparse_dist)
        self._taken = None

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
            flight.forget()
        self._flights.clear()
        self._feed.forget()
        self._is_halfway, self._agreement = False, None

    def _take_off(self, dataloader_iter: Iterator[In]) -> None:
        """Prepares the first batch."""
        fetched = self._feed.first(process_group_of(self._model), dataloader_iter)
        if self._taken is None:
            self._rewrite(fetched.batch, fetched.context)
        flight = self._board(fetched)
        self._flights.append(flight)
        try:
            self._fetch_first(flight)
        except BaseException:  # no step has begun: the next call starts anew
            self.reset()
            raise

    def _fetch_first(self, flight: Flight) -> None:
        """Brings the rows of a batch that no step comes before. Collective."""
        assert self._taken is not None
        self._ask()
        if self._agreed().homes_written:
            for group in self._taken.groups:
                group.rows.take_writes()
        self._walk(first_batch_schedule(flight.setting, num_waves=self._num_waves))

    def _flags(self) -> Flags:
        """What this rank has to say before a step."""
        assert self._taken is not None
        batch = self._flights[0].batch
        return Flags(
            homes_written=any(group.rows.was_written() for group in self._taken.groups),
            model_changed=self._model.training and self._cuts.has_changed(batch),
        )

    def _ask(self) -> None:
        """Starts to ask all ranks what they have to say, once a step. Collective.

        Raises:
            PicassoError: If this rank says something else than before, in a step that an exception
                of its data iterator left unbegun: the others may be in it.
        """
        flags = self._flags()
        if self._agreement is None:
            self._agreement = Agreement(process_group_of(self._model), self._device, flags)
        elif self._agreement.mine != flags:
            raise PicassoError(
                "tables or the model were changed after an exception in the data iterator, and "
                "other ranks may have begun the step; change them between steps, or call reset() "
                "on all ranks"
            )

    def _agreed(self) -> Flags:
        """What all ranks say, before the step begins."""
        assert self._agreement is not None
        asked, self._agreement = self._agreement, None
        return asked.wait()

    def _follow(self, dataloader_iter: Iterator[In]) -> bool:
        """Boards the batch after the last in flight, unless every rank's data has ended."""
        if self._feed.has_ended:
            return False
        pg = process_group_of(self._model)
        try:
            fetched = self._feed.following(pg, dataloader_iter, self._flights[-1].batch)
        except StopIteration:  # on all ranks: the step that was asked about does not begin
            self._agreed()
            raise
        if fetched is None:
            return False
        self._flights.append(self._board(fetched))
        return True

    def _board_again(self) -> None:
        """Prepares the batches in flight anew, by the settings of now. Collective."""
        before = list(self._flights)
        self._flights.clear()
        for flight in before:
            context = self._create_context()
            context.postproc_fwd_results = flight.context.postproc_fwd_results
            again = self._board(replace(flight.fetched, context=context))
            again.wholes = flight.wholes
            self._flights.append(again)
            if len(self._flights) == 1:
                self._fetch_first(again)
            elif len(self._flights) == 2:
                self._walk(second_batch_schedule(again.setting))

    def _walk(self, schedule: Schedule) -> None:
        """Runs the operations on those batches that there are."""
        self._is_halfway = True
        for op in schedule:
            if op.batch < len(self._flights):
                self._op = op
                with op_range(op), self._postprocs_in(op):
                    self._operations.run(op, self._flights)
                if self._flights[-1].is_end:  # what else the schedule has for it is left out
                    self._feed.end()
                    self._flights.pop()
        self._is_halfway = False

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

    def _board(self, fetched: Fetched) -> Flight:
        """Cuts a batch into micro-batches, by the setting of now."""
        assert self._taken is not None
        setting = self._cuts.choice.current
        if not self._model.training:  # evaluation is never cut
            setting = replace(setting, num_micro_batches=1)
        return self._boarding.board(fetched, setting, self._taken)

    def _rewrite(self, batch: In, context: TrainPipelineContext) -> None:
        """Takes over the model. Collective."""
        pg = process_group_of(self._model)
        found = PipelinedModel(
            self._model,
            batch,
            context,
            stream=self._data_dist_stream,
            device=self._device,
            pipeline_postproc=self._pipeline_postproc,
        )
        self._pipelined_modules = found.pipelined
        self._original_forwards = found.original_forwards
        self._pipelined_postprocs = found.postproc_modules
        if not self._flights:  # else those in flight were boarded as the first batch told
            with self._id_stream.working():
                self._id_stream.take_batch(batch)
                self._look = found.look_at(batch, context, pg, self._device)
        found.join_exchanges(self._look.weighted, self._look.odd)
        program = self._program_of()
        try:
            self._cuts.begin(
                self._evidence_of(program, found),
                self._look.why_whole or found.why_whole_batches(),
                planned=_planned_micro_batches(found.interleaved.values()),
                num_samples=self._look.num_samples,
                is_interleaved=bool(found.interleaved),
            )
        except CompatError:
            self.detach()
            raise
        found.join_splits()
        self._hot_sets.take(found.groups)
        self._id_stream.take_over(self._hot_sets.tensors())
        self._feed.asks_ahead = found.has_stock_means
        self._operations = Operations(
            pg,
            self._device,
            program,
            found.groups,
            found.plain,
            id_stream=self._id_stream,
            start_plain=found.start_plain,
            wait_plain=self.wait_sparse_data_dist,
        )
        self._taken, self._regroups = found, Regroups.of(found.inner, self._device)

    def _program_of(self) -> Program:
        """The model, its backward and the optimizer's step, each looked up where it is called."""
        return Program(
            model=self._model,
            forward=self._custom_forward or (lambda batch: self._model(batch)),
            backward=lambda losses: self._backward(losses),
            step=lambda: self._optimizer_step(),
            losses=self._losses,
        )

    def _evidence_of(self, program: Program, taken: PipelinedModel) -> CutEvidence:
        """What speaks for and against micro-batches of the model."""
        check = CutCheck(
            program,
            taken,
            split=self._boarding.split,
            join=self._boarding.join,
            pg=process_group_of(self._model),
            device=self._device,
        )
        return CutEvidence(program, type(self), self._injected, taken, check, self._own_parts)

    def summary(self) -> str:
        """How each sharded module is run, with the reason if it is not interleaved; after a step.

        Returns:
            One line per module, then one on micro-batches and lookahead.
        """
        lines = [] if self._taken is None else self._taken.lines()
        return "\n".join([*lines, str(self._cuts)])


def _planned_micro_batches(modules: Iterable[nn.Module]) -> int | None:
    """Micro-batches that the plan of some sharded modules was priced for, if it says so."""
    for module in modules:
        for placed in getattr(module, "module_sharding_plan", {}).values():
            if isinstance(placed.cache_params, HotColdParams):
                return placed.cache_params.num_micro_batches
    return None
