"""A train pipeline that hides the exchange of rows and gradients behind the dense part.

Each batch is cut into micro-batches; while one computes, rows of the next one, gradients of the
last one and the next batch's ids and clean rows are on the wire. The result is that of the plain
loop: every row is updated once per batch, from the sum of its gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist

from torchrec_picasso._torchrec import BackwardHookWork, InjectionSite, TrainPipelineContext
from torchrec_picasso.errors import CompatError, PicassoError
from torchrec_picasso.exchange.peers import Peers
from torchrec_picasso.feed.batch_feed import BatchFeed
from torchrec_picasso.feed.end_of_data import SplitBatch
from torchrec_picasso.feed.id_stream import IdStream
from torchrec_picasso.options.refresh import Refresh
from torchrec_picasso.refresh.refresher import Refreshed
from torchrec_picasso.refresh.saved_uses import SavedUses
from torchrec_picasso.schedule.schedule import (
    NUM_BATCHES,
    Schedule,
    Setting,
    evaluation_schedule,
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
from torchrec_picasso.train_pipeline.in_flight import InFlight
from torchrec_picasso.train_pipeline.losses import Losses
from torchrec_picasso.train_pipeline.model_parts import (
    inner_model,
    process_group_of,
)
from torchrec_picasso.train_pipeline.operations import Operations, Program
from torchrec_picasso.train_pipeline.options import PipelineOptions
from torchrec_picasso.train_pipeline.parent_options import (
    refuse_backward_hook,
    refuse_model,
    refuse_options,
)
from torchrec_picasso.train_pipeline.pipelined_model import FirstLook, PipelinedModel
from torchrec_picasso.train_pipeline.ranges import step_range
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

    The number of micro-batches is chosen by trying some on the first 12 training steps or so,
    beginning with what the plan was priced for. A batch is cut only if it is proved that its
    micro-batches train what the batch trains (:mod:`torchrec_picasso.proof`); else batches are
    whole, and :meth:`summary` names the line of the model that stands in the way. A number that is
    asked for without a proof is compared with the whole batch in steps 1, 2, 4, 8, ... and refused
    on all ranks where it differs (:mod:`.cut_check`).

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
        num_micro_batches: These and the following are explained in :class:`.PipelineOptions`.
        lookahead: Rows of the next batch are fetched early.
        split_batch: Cuts a batch.
        join_outputs: Joins outputs.
        loss_reduction: What the model's losses are.
        refresh: How hot rows follow what is looked up.
        verify_every: Steps between two checks of replicas.
        on_step: Takes a report of each step.

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
        self._options = PipelineOptions(
            num_micro_batches=num_micro_batches,
            lookahead=lookahead,
            split_batch=split_batch,
            join_outputs=join_outputs,
            loss_reduction=loss_reduction,
            refresh=refresh,
            verify_every=verify_every,
            on_step=on_step,
        )
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
        self._custom_forward = custom_model_fwd
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
        self._begin_with(model)
        # whether the next training step is whole: the first is, and one after forwards without
        # backwards, which leave the wrapper waiting
        self._expects_gradients = True
        self._injected: list[str] = []
        self._clock = StepClock(device)
        self._regroups = Regroups()
        self._look = FirstLook()
        self._hot_sets = HotSets(refresh, verify_every)
        self._watch = StepWatch(on_step, device)

    def _begin_with(self, model: nn.Module) -> None:
        """Begins with a model: nothing of it is known, and no batch is in flight."""
        self._cuts = Cuts(self._options.num_micro_batches, self._options.lookahead)
        self._in_flight = InFlight(model, self._feed, self._boarding, self._cuts, self._device)
        self._taken: PipelinedModel | None = None
        self._peers: Peers | None = None

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
        return f"step {self._batch_count}, {self._in_flight.doing}"

    def _take_step(self, dataloader_iter: Iterator[In]) -> Flight:
        """Takes one step; gives the batch that it was of. Collective."""
        in_flight = self._in_flight
        if in_flight.is_halfway:
            raise PicassoError(
                "the step before raised and did not end; call reset() on all ranks, which forgets "
                "its batches, then go on"
            )
        if not self._model_attached:
            self.attach(self._model)
        if not in_flight:
            fetched = in_flight.fetch_first(dataloader_iter)
            if self._taken is None:
                self._take_over(fetched.batch, fetched.context)
            in_flight.begin(fetched)
        begin_batch(self._model)
        attached_again = self._taken is None
        if attached_again:
            self._take_over(in_flight.first.batch, in_flight.first.context)
        if self._hot_sets.have_changed():  # those in flight were laid out by others
            self._id_stream.take_over(self._hot_sets.tensors())
            in_flight.prepare_again()
        in_flight.fill(dataloader_iter)
        schedule, start = self._schedule_of_step(), self._clock.stamp()
        with step_range(self._batch_count):
            # the model may have been trained while detached
            told = in_flight.lead(schedule, fetch_again=attached_again)
            flight = in_flight.first
            if self._model.training:
                self._train(flight, schedule, start, told.model_changed)
            else:
                flight.is_whole = self._expects_gradients = True
                in_flight.run(schedule)
        self._batch_count += 1
        return in_flight.end_step()

    def _schedule_of_step(self) -> Schedule:
        """The operations of this step, by the settings of its batches."""
        make = training_schedule if self._model.training else evaluation_schedule
        return make(*self._in_flight.settings, num_waves=self._num_waves)

    def _train(self, flight: Flight, schedule: Schedule, start: Any, has_changed: bool) -> None:
        """Takes a training step, of a model that may be another one than was proved. Collective."""
        pg = process_group_of(self._model)
        self._optimizer.zero_grad()  # first of all: it hands learning rates to FBGEMM
        # before any look: then all of its graph is in one backward
        flight.is_whole = self._expects_gradients or counts_gradients(self._model)
        has_looked = self._cuts.look(flight, has_changed, pg, self._device)
        flight.is_whole |= self._cuts.is_whole
        self._expects_gradients = False
        settings = self._in_flight.settings
        self._in_flight.run(schedule)
        # from before the wait for other ranks, in which rows of this batch travel
        span = None if has_looked else (start, self._clock.stamp())
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
            self._begin_with(model)
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
        self._in_flight.clear()

    def _take_over(self, batch: In, context: TrainPipelineContext) -> None:
        """Takes over the sharded modules of the model. Collective."""
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
        if not self._in_flight:  # else those in flight were boarded as the first batch told
            with self._id_stream.working():
                self._id_stream.take_batch(batch)
                self._look = found.look_at(batch, context, pg, self._device)
        found.join_exchanges(self._look.weighted, self._look.odd)
        program = self._program_of()
        check = CutCheck(
            program,
            found,
            split=self._boarding.split,
            join=self._boarding.join,
            pg=pg,
            device=self._device,
        )
        own = self._options.own_functions + ["custom_model_fwd"] * bool(self._custom_forward)
        try:
            self._cuts.begin(
                CutEvidence(program, type(self), self._injected, found, check, own),
                self._look.why_whole or found.why_whole_batches(),
                planned=found.planned_micro_batches,
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
        operations = Operations(
            pg,
            self._device,
            program,
            found.groups,
            found.plain,
            id_stream=self._id_stream,
            start_plain=found.start_plain,
            wait_plain=self.wait_sparse_data_dist,
        )
        self._in_flight.work_with(found, operations)
        self._taken, self._regroups = found, Regroups.of(found.inner, self._device)

    def _program_of(self) -> Program:
        """The model, its backward and the optimizer's step, each looked up where it is called."""
        return Program(
            model=self._model,
            forward=self._custom_forward or (lambda batch: self._model(batch)),
            backward=lambda losses: self._backward(losses),
            step=lambda: self._optimizer_step(),
            losses=Losses(self._options.loss_reduction),
        )

    def summary(self) -> str:
        """How each sharded module is run, with the reason if it is not interleaved; after a step.

        Returns:
            One line per module, then one on micro-batches and lookahead.
        """
        lines = [] if self._taken is None else self._taken.lines()
        return "\n".join([*lines, str(self._cuts)])
