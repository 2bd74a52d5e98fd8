"""A train pipeline that hides the exchange of rows and gradients behind the dense part.

While a batch computes, row numbers and clean rows of later batches are on the wire. A batch may be
cut into micro-batches; then also its own rows and gradients are, while another one computes. The
result is that of the plain loop: every row is updated once per batch, by the sum of its gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeVar

import torch
from torch import Tensor, nn
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist

from torchrec_picasso._torchrec import BackwardHookWork, InjectionSite, TrainPipelineContext
from torchrec_picasso.batches.feed import BatchFeed, IdStream, SplitBatch
from torchrec_picasso.exchange.waiting import outlast_gloo_threads
from torchrec_picasso.rows.hot_rows import SavedUses
from torchrec_picasso.rows.refresh_policy import Refresh
from torchrec_picasso.rows.refresher import Refreshed
from torchrec_picasso.schedule.schedule import Schedule, Setting
from torchrec_picasso.train_pipeline.batch_queue import BatchQueue
from torchrec_picasso.train_pipeline.dense_average import DenseAverage
from torchrec_picasso.train_pipeline.hot_sets import HotSets
from torchrec_picasso.train_pipeline.interleaved_steps import InterleavedSteps
from torchrec_picasso.train_pipeline.lifecycle import Lifecycle, State
from torchrec_picasso.train_pipeline.losses import Losses
from torchrec_picasso.train_pipeline.micro_batch_policy import MicroBatchPolicy
from torchrec_picasso.train_pipeline.model_parts import inner_model
from torchrec_picasso.train_pipeline.operations import Program
from torchrec_picasso.train_pipeline.options import (
    JoinOutputs,
    PipelineOptions,
    refuse_backward_hook,
    refuse_model,
    refuse_options,
    refuse_overrides,
)
from torchrec_picasso.train_pipeline.pipelined_model import PipelinedModel
from torchrec_picasso.train_pipeline.preparation import Preparation
from torchrec_picasso.train_pipeline.rewrite import explained_tracing
from torchrec_picasso.train_pipeline.step_report import OnStep, StepWatch
from torchrec_picasso.train_pipeline.steps import Steps
from torchrec_picasso.train_pipeline.stock_steps import StockSteps

In = TypeVar("In")
Out = TypeVar("Out")

_REFRESH = Refresh()


class InterleavedTrainPipeline(TrainPipelineSparseDist[In, Out]):
    """Trains like TorchRec's ``TrainPipelineSparseDist``, with the exchange hidden.

    Hot/cold tables are interleaved, those of all modules in one exchange; others, in the same
    module or not, are trained as by TorchRec's pipeline and listed by :meth:`summary`, with the
    reason. Ranks may have different numbers of batches: a rank whose data has ended continues with
    empty ones, whose loss counts nothing, until all have ended.

    Args:
        model: ``DistributedModelParallel``; its forward returns ``(losses, output)``, losses being
            means over the samples. Or any model that TorchRec's pipeline takes.
        optimizer: Dense and fused optimizers, as for TorchRec's pipelines.
        device: Device of the batches.
        execute_all_batches: If not, all ranks stop before the step in which the first of them has
            no next batch; batches in flight wait for a new iterator. Costs a small exchange a step.
        pipeline_postproc: Modules without parameters between batch and tables run ahead of the
            model, once per batch. Micro-batches get their parts.
        custom_model_fwd: See :class:`.PipelineOptions`, also for the keyword arguments. Other
            arguments: as for TorchRec's pipelines, or refused (:data:`.REFUSED_OPTIONS`).

    Raises:
        ConfigError: If an option is out of range.
        CompatError: If an argument of TorchRec's or a wrapper of the model is refused; in a step,
            if the model cannot be trained in as many micro-batches as were requested.
    """

    _model: nn.Module
    _batch_count: int

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
        join_outputs: JoinOutputs | None = None,
        loss_reduction: str = "mean",
        refresh: Refresh | None = _REFRESH,
        verify_every: int | None = None,
        average_dense_every: int = 1,
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
            average_dense_every=average_dense_every,
            custom_model_fwd=custom_model_fwd,
            on_step=on_step,
        )
        refuse_options(
            apply_jit=apply_jit,
            enqueue_batch_after_forward=enqueue_batch_after_forward,
            free_features_storage_early=free_features_storage_early,
            clear_data_dist_inputs=clear_data_dist_inputs,
            async_inplace_copy=async_inplace_copy,
        )
        refuse_overrides(type(self))
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
        outlast_gloo_threads()
        self._id_stream = IdStream(self._data_dist_stream, self._memcpy_stream)
        self._feed = BatchFeed(
            self.inplace_copy_batch_to_gpu if enable_inplace_copy_batch else self.copy_batch_to_gpu,
            self._create_context,
            device,
            self._options.split,
            execute_all_batches,
            self._id_stream,
        )
        self._lifecycle = Lifecycle()
        self._hot_sets = HotSets(refresh, verify_every, self._id_stream)
        self._watch = StepWatch(on_step, device)
        self._injected: list[str] = []
        self._begin_with(model)

    def _begin_with(self, model: nn.Module) -> None:
        """Starts with a model that no step has run; no batch is in flight."""
        self._dense_average = DenseAverage(model, self._options.average_dense_every)
        stock = StockSteps.find(model, self._options, self._device, self._execute_all_batches)
        asked = self._options.num_micro_batches if stock is None else 1
        self._policy = MicroBatchPolicy(asked, self._options.lookahead, self._device)
        self._queue = BatchQueue(
            model, self._feed, self._options, self._policy, self._lifecycle, self._id_stream
        )
        if stock is not None:
            self._steps: Steps = stock
            self._model_fwd = stock.forward
            return
        self._steps = InterleavedSteps(
            self._program(),
            lambda batch, context: PipelinedModel(
                model, batch, context, self._id_stream, self._device, self._pipeline_postproc
            ),
            self._queue,
            self._policy,
            self._hot_sets,
            self._lifecycle,
        )

    def _program(self) -> Program:
        """Collects the functions of the pipeline's user; each is looked up when it is called."""
        return Program(
            model=self._model,
            forward=self._options.custom_model_fwd or (lambda batch: self._model(batch)),
            backward=lambda losses: self._backward(losses),
            step=lambda: self._optimizer_step(),
            zero_grad=lambda: self._optimizer.zero_grad(),
            wait_plain=self.wait_sparse_data_dist,
            losses=Losses(self._options.loss_reduction),
            options=self._options,
            pipeline=type(self),
            injected=self._injected,
        )

    @property
    def num_micro_batches(self) -> int:
        """Number of micro-batches of the next batch."""
        return self._policy.current.num_micro_batches

    @property
    def lookahead(self) -> bool:
        """Whether the next batch's clean rows will be fetched early."""
        return self._policy.current.lookahead

    @property
    def is_settled(self) -> bool:
        """Whether all further batches have the setting of the next batch."""
        return self._steps.is_settled

    @property
    def setting(self) -> Setting | None:
        """The setting that the autotuner chose, for a later run; ``None`` before, and while batches
        are whole for a reason."""
        return self._steps.setting

    def settle_on(self, setting: Setting) -> None:
        """Adopts an earlier run's :attr:`setting`, if allowed, without autotuning; on all ranks."""
        self._policy.settle_on(setting)

    @property
    def last_refresh(self) -> Refreshed | None:
        """Result of the last refresh evaluation, with ``refresh``; the same on all ranks."""
        return self._hot_sets.last

    def hot_rows(self) -> dict[str, Tensor]:
        """The hot rows of interleaved tables by name, ascending int64, after the first step."""
        return self._hot_sets.hot_rows()

    def saved_uses(self) -> SavedUses | None:
        """The access counts so far, for a later run; ``None`` without ``refresh``. Collective."""
        return self._hot_sets.saved_uses()

    def restore_uses(self, saved: SavedUses) -> None:
        """Continues from the access counts of :meth:`saved_uses`; on all ranks."""
        self._hot_sets.restore_uses(saved)

    @property
    def schedule(self) -> Schedule:
        """The operations of a training step, in order."""
        return self._queue.schedule(self._policy.current)

    def progress(self, dataloader_iter: Iterator[In]) -> Out:
        """Takes one step. Collective.

        Args:
            dataloader_iter: This rank's batches.

        Returns:
            The model's output beside the losses, for the whole batch.

        Raises:
            StopIteration: After the last batch of the rank that has most; on all ranks at once.
            InputError: On all ranks, if a rank's batch is bad.
            PeerError: If another rank failed, with its message, or does not answer.
            PicassoError: If the step before did not end; see :meth:`reset`.
        """
        self._lifecycle.check_step()  # peers shall hear why the step before raised, not of this
        is_training, number, steps = self._model.training, self._batch_count, self._steps
        naming_ranks = steps.peers.propagate_errors(lambda: f"step {number}, {steps.doing}")
        try:
            measuring = self._watch.measuring()
            with naming_ranks, measuring, explained_tracing(), self._dense_average.in_step():
                if self._lifecycle.state is State.DETACHED:
                    self.attach(self._model)
                step = steps.take(dataloader_iter, self)
        except StopIteration:
            # a DataLoader with persistent workers starts its next epoch on the same iterator
            self._dataloader_exhausted = False
            self.average_dense()
            raise
        self._batch_count = number + 1
        if is_training:
            self._watch.report(step.num_samples, step.groups, self.last_refresh)
        output: Out = step.output
        return output

    def _optimizer_step(self) -> None:
        """Steps the optimizer; a subclass may override it, as in TorchRec's pipeline."""
        self._optimizer.step()

    def register_backward_hook(self, site: InjectionSite, work: BackwardHookWork) -> None:
        """Runs work in the backward of a module, as TorchRec does; batches are whole from then on.

        Raises:
            CompatError: If the module has hot/cold tables, whose backward this pipeline schedules,
                or if micro-batches were requested.
        """
        refuse_backward_hook(inner_model(self._model), site.fqn)
        super().register_backward_hook(site, work)
        self._injected.append(site.fqn)

    def average_dense(self) -> None:
        """Averages dense weights that ranks have stepped apart (``average_dense_every``), as before
        a checkpoint; evaluation, the end of all data and :meth:`detach` do so too. Collective."""
        self._dense_average.average()

    def detach(self) -> nn.Module:
        """Gives the model back with its own forwards; batches in flight stay. Collective.

        Until :meth:`attach` the model may be used, trained and loaded, on all ranks alike.
        """
        self.average_dense()
        self._lifecycle.change_to(State.DETACHED)
        self._steps.release()
        return super().detach()

    def attach(self, model: nn.Module | None = None, sparse_dist: bool = True) -> None:
        """Takes over the model's sharded modules again; another model drops batches in flight."""
        if model is not None and model is not self._model:
            self.average_dense()
            self.reset()
            self._steps.begin_again()
            self._model = model
            self._begin_with(model)
        self._lifecycle.change_to(State.NEW)
        self._steps.begin_again()
        super().attach(model, sparse_dist)
        if self.contexts:  # of a stock plan: TorchRec has started their input dist again
            self.wait_sparse_data_dist(self.contexts[0])

    def reset(self) -> None:
        """Drops the batches in flight, for a new start after an exception; all ranks call it.

        After an exception in a step these are its batch, which no weight has learned from unless
        an update or the optimizer's step raised, and the next two. After an exception in the data
        iterator no reset is needed: the next call begins the step again, and loses nothing.
        Messages on the wire end by themselves, so all ranks must have failed at the same operation.
        """
        super().reset()
        self._steps.forget()

    def preparation(self) -> Preparation:
        """Returns a function that reads the ids of a batch ahead of its step, in any process.

        Before the first step the model is traced for it, without a batch. Sequences are prepared
        for the current number of micro-batches.

        Raises:
            CompatError: If the model cannot be traced.
        """
        return self._steps.preparation()

    def summary(self) -> str:
        """Describes how each sharded module is run, after a step, and the setting, line by line."""
        return "\n".join([self._steps.summary(), *self._dense_average.lines])
