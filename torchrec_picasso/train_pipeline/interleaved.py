"""A train pipeline that hides the exchange of rows and gradients behind the dense part.

Each batch is cut into micro-batches; while one computes, rows of the next one, gradients of the
last one and the next batch's ids and clean rows are on the wire. The result is that of the plain
loop: every row is updated once per batch, from the sum of its gradients.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
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
from torchrec_picasso.errors import CompatError, ConfigError, PicassoError
from torchrec_picasso.ops.segments import CLEAN, DIRTY
from torchrec_picasso.sharding.sharded_ebc import ShardedHotColdEmbeddingBagCollection
from torchrec_picasso.train_pipeline.batch_feed import BatchFeed, Fetched
from torchrec_picasso.train_pipeline.data_parallel import renew_data_parallel
from torchrec_picasso.train_pipeline.dense_reduction import DenseReduction
from torchrec_picasso.train_pipeline.end_of_data import AnyData, SplitBatch
from torchrec_picasso.train_pipeline.flight import Flight
from torchrec_picasso.train_pipeline.interleaved_forward import InterleavedForward
from torchrec_picasso.train_pipeline.join_outputs import join_outputs as join_known_outputs
from torchrec_picasso.train_pipeline.model_parts import (
    dense_parameters,
    inner_model,
    process_group_of,
    refuse_batch_norm,
    refuse_unpipelined,
    refuse_variable_batch,
    unpipelined_modules,
)
from torchrec_picasso.train_pipeline.schedule import (
    Op,
    Schedule,
    evaluation_schedule,
    training_schedule,
)
from torchrec_picasso.train_pipeline.split_batch import micro_batch_sizes, num_samples
from torchrec_picasso.train_pipeline.split_batch import split_batch as split_known_batch
from torchrec_picasso.train_pipeline.whole_output import WholeOutput

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
        lookahead: Whether rows of the next batch that this one does not update are fetched early.
        split_batch: Cuts a batch into parts of given sizes, ``(batch, sizes) -> parts``; ``None``
            knows tensors, KeyedJaggedTensors, dataclasses and containers of them. Sizes may be 0.
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
        num_micro_batches: int = 1,
        lookahead: bool = True,
        split_batch: SplitBatch | None = None,
        join_outputs: Callable[[Sequence[Any], Sequence[int]], Any] | None = None,
        loss_reduction: str = "mean",
        execute_all_batches: bool = True,
    ) -> None:
        if loss_reduction not in ("mean", "sum"):
            raise ConfigError(f"loss_reduction is {loss_reduction!r}, expected 'mean' or 'sum'")
        if num_micro_batches < 1:
            raise ConfigError(f"num_micro_batches is {num_micro_batches}, expected at least 1")
        super().__init__(model, optimizer, device, execute_all_batches)
        self._num_micro_batches = num_micro_batches
        self._losses_are_means = loss_reduction == "mean"
        self._split_batch = split_batch or split_known_batch
        self._join_outputs = join_outputs or join_known_outputs
        fetch = self.copy_batch_to_gpu, self._create_context
        self._feed = BatchFeed(*fetch, device, self._split_batch, execute_all_batches)
        self._flights: deque[Flight] = deque()
        self._is_halfway = self._has_trained = False
        self._training = training_schedule(num_micro_batches, lookahead)
        self._evaluation = evaluation_schedule(num_micro_batches)
        self._training.check()
        self._evaluation.check()
        self._is_rewritten = False
        self._interleaved: dict[str, ShardedModule] = {}
        self._plain: dict[str, ShardedModule] = {}

    @property
    def schedule(self) -> Schedule:
        """The operations of a training step, in order."""
        return self._training

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
        flight = self._flights[0]
        attached_again = not self._is_rewritten
        if attached_again:
            self._rewrite(flight.batch, flight.context)
        for step in flight.steps.values():
            step.refresh(attached_again)  # the model may have been trained while detached
        pg = process_group_of(self._model)
        fetched = self._feed.following(pg, dataloader_iter, flight.batch)
        following = [] if fetched is None else [self._board(fetched)]
        self._is_halfway = True
        is_training = self._model.training
        if is_training:
            self._has_trained = True
            self._optimizer.zero_grad()
        self._flights += following
        for op in self._training if is_training else self._evaluation:
            if op.batch < len(self._flights):
                getattr(self, f"_{op.kind}")(self._flights[op.batch], op)
        self._flights.popleft()
        self._is_halfway = False
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
        the optimizer's own step raised, and the next one. An exception in the data iterator leaves
        the step unbegun: then the next call may as well go on without reset, and loses nothing.
        Messages on the wire end by themselves, so all ranks must have failed at the same operation.
        """
        super().reset()
        self._flights.clear()
        self._feed.forget()
        self._is_halfway = False

    def _take_off(self, dataloader_iter: Iterator[In]) -> None:
        """Prepares the first batch: nothing is updated meanwhile, so all rows are clean."""
        fetched = self._feed.first(process_group_of(self._model), dataloader_iter)
        if not self._is_rewritten:
            self._rewrite(fetched.batch, fetched.context)
        flight = self._board(fetched)
        for op in self._evaluation:
            if op.kind != "forward":
                getattr(self, f"_{op.kind}")(flight, op)
        for step in flight.steps.values():
            step.accept_writes()
        self._flights.append(flight)

    def _board(self, fetched: Fetched) -> Flight:
        """Cuts a batch into micro-batches."""
        batch = fetched.batch
        for name, module in self._interleaved.items():
            refuse_variable_batch(name, *module.forward.args.build_args_kwargs(batch))
        sizes_K = micro_batch_sizes(num_samples(batch), self._num_micro_batches)
        # of no samples, every micro-batch is the batch itself
        parts_K = self._split_batch(batch, sizes_K) if any(sizes_K) else [batch] * len(sizes_K)
        return Flight(fetched, sizes_K, parts_K)

    def _rewrite(self, batch: In, context: TrainPipelineContext) -> None:
        """Finds the sharded modules and takes over their forwards."""
        self._inner = inner_model(self._model)
        if self._num_micro_batches > 1:
            refuse_batch_norm(self._inner)
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
        self._dense_parameters = dense_parameters(self._inner)
        if self._num_micro_batches > 1:
            try:
                refuse_unpipelined(unpipelined_modules(self._inner, found))
            except CompatError:
                self.detach()
                raise
        self._is_rewritten = True

    def _join_splits(self) -> None:
        """From now on the splits of stock input dists travel together, once these are made."""
        plain = list(self._plain.values())
        made = not any(getattr(m, "_has_uninitialized_input_dist", False) for m in plain)
        if plain and made and not self._original_kjt_dist_forwards:
            self._original_kjt_dist_forwards = override_input_dist_forwards(plain)

    def summary(self) -> str:
        """Which sharded modules are interleaved and which are not, with the reason; after a step.

        Returns:
            One line per module.
        """
        lines = [f"{name}: interleaved" for name in self._interleaved]
        lines += [
            f"{name}: computed once per batch, exchange not hidden: not all of its tables are "
            "hot/cold"
            for name in self._plain
        ]
        if self._is_rewritten:
            lines += [
                f"{name}: not pipelined: its input is changed inside the model"
                for name in unpipelined_modules(self._inner, self._pipelined_modules)
            ]
        return "\n".join(lines)

    # -- the operations of a schedule ----------------------------------------------------------

    def _request(self, flight: Flight, op: Op) -> None:
        for name, module in self._interleaved.items():
            args, kwargs = module.forward.args.build_args_kwargs(flight.batch)
            args, _ = module.preprocess_input(args, kwargs)
            context = module.create_context()
            flight.module_contexts[name] = context
            flight.steps[name] = module.start_step(
                context, flight.sizes_K, *args, has_data=flight.has_data
            )
        if not self._interleaved:
            flight.any_data = AnyData(process_group_of(self._model), self._device, flight.has_data)
        if self._plain:
            start_data_dist(list(self._plain.values()), flight.batch, flight.context)
            self._join_splits()

    def _send_ids(self, flight: Flight, op: Op) -> None:
        go_on = [step.send_ids() for step in flight.steps.values()]
        if self._plain:
            self.wait_sparse_data_dist(flight.context)
        if flight.any_data is not None:
            go_on.append(flight.any_data.wait())
        if not all(go_on):  # every rank's data has ended: what else the schedule has is left out
            for request in flight.context.input_dist_tensors_requests.values():
                request.wait()
            self._flights.pop()
        elif flight.fetched.refusal is not None:
            raise flight.fetched.refusal

    def _receive_ids(self, flight: Flight, op: Op) -> None:
        for step in flight.steps.values():
            step.receive_ids()

    def _send_marks(self, flight: Flight, op: Op) -> None:
        before = self._flights[op.batch - 1]
        for name, step in flight.steps.items():
            step.send_marks(before.steps[name])

    def _lay_out(self, flight: Flight, op: Op) -> None:
        mark = DIRTY if self._model.training and len(self._flights) > 1 else CLEAN
        for step in flight.steps.values():
            step.lay_out(mark)

    def _fetch_clean(self, flight: Flight, op: Op) -> None:
        assert op.index is not None
        for step in flight.steps.values():
            step.fetch(op.index, CLEAN)

    def _fetch_dirty(self, flight: Flight, op: Op) -> None:
        assert op.index is not None
        for step in flight.steps.values():
            step.fetch(op.index, DIRTY)

    def _read_hot(self, flight: Flight, op: Op) -> None:
        for step in flight.steps.values():
            step.read_hot()

    def _forward(self, flight: Flight, op: Op) -> None:
        assert op.index is not None
        if flight.num_samples and not flight.sizes_K[op.index]:
            return  # nothing to learn from no samples
        for name, module in self._interleaved.items():
            rows = flight.steps[name].micro_rows(op.index)
            module.forward.take(rows, flight.module_contexts[name])
        for name, module in self._plain.items():
            if name not in flight.wholes:
                module.forward.set_context(flight.context)
                flight.wholes[name] = WholeOutput(module.forward.of_whole_batch(), name)
            module.forward.give(flight.wholes[name].part(flight.sizes_K, op.index))
        losses, output = self._inner(flight.micro_batches_K[op.index])
        if losses.requires_grad:
            share = flight.share(op.index, self._losses_are_means)
            flight.losses_K[op.index] = torch.sum(losses, dim=0) * share
        flight.outputs_K[op.index] = output

    def _backward(self, flight: Flight, op: Op) -> None:
        assert op.index is not None
        loss = flight.losses_K.pop(op.index, None)
        if loss is not None:
            loss.backward()
        if op.index == 0:
            for whole in flight.wholes.values():
                whole.backward()

    def _send_gradients(self, flight: Flight, op: Op) -> None:
        assert op.index is not None
        for step in flight.steps.values():
            step.send_gradients(op.index)

    def _reduce_hot(self, flight: Flight, op: Op) -> None:
        for step in flight.steps.values():
            step.reduce_hot()

    def _reduce_dense(self, flight: Flight, op: Op) -> None:
        flight.dense = DenseReduction(process_group_of(self._model), self._dense_parameters)

    def _update(self, flight: Flight, op: Op) -> None:
        for step in flight.steps.values():
            step.update()

    def _dense_step(self, flight: Flight, op: Op) -> None:
        assert flight.dense is not None
        flight.dense.wait()
        self._optimizer.step()
