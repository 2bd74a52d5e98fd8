"""A train pipeline that hides the exchange of rows and gradients behind the dense part.

Each batch is cut into micro-batches; while one computes, rows of the next one, gradients of the
last one and the next batch's ids and clean rows are on the wire. The result is that of the plain
loop: every row is updated once per batch, from the sum of its gradients.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.distributed.types import ShardedModule

from torchrec_picasso._torchrec import (
    PipelinedForward,
    TrainPipelineContext,
    override_input_dist_forwards,
    rewrite_model,
    start_data_dist,
)
from torchrec_picasso.errors import CompatError, ConfigError
from torchrec_picasso.ops.segments import CLEAN, DIRTY
from torchrec_picasso.sharding.interleaved_step import InterleavedStep, MicroRows
from torchrec_picasso.sharding.sharded_ebc import ShardedHotColdEmbeddingBagCollection
from torchrec_picasso.train_pipeline.dense_reduction import DenseReduction
from torchrec_picasso.train_pipeline.join_outputs import join_outputs as join_known_outputs
from torchrec_picasso.train_pipeline.schedule import (
    Op,
    Schedule,
    evaluation_schedule,
    training_schedule,
)
from torchrec_picasso.train_pipeline.split_batch import (
    micro_batch_sizes,
    num_samples,
)
from torchrec_picasso.train_pipeline.split_batch import split_batch as split_known_batch
from torchrec_picasso.train_pipeline.timeline import op_range, step_range
from torchrec_picasso.train_pipeline.whole_output import WholeOutput

__all__ = ["InterleavedTrainPipeline"]

In = TypeVar("In")
Out = TypeVar("Out")


@dataclass
class _Flight:
    """A batch between its request and its update."""

    batch: Any
    sizes_K: Sequence[int]
    micro_batches_K: Sequence[Any]
    context: TrainPipelineContext
    module_contexts: dict[str, Any] = field(default_factory=dict)
    steps: dict[str, InterleavedStep] = field(default_factory=dict)
    """By name of the module."""
    wholes: dict[str, WholeOutput] = field(default_factory=dict)
    """What modules that are not interleaved gave for the whole batch, by name."""
    losses_K: dict[int, Tensor] = field(default_factory=dict)
    outputs_K: dict[int, Any] = field(default_factory=dict)
    dense: DenseReduction | None = None

    @property
    def num_samples(self) -> int:
        """Samples of the whole batch on this rank."""
        return sum(self.sizes_K)


class InterleavedTrainPipeline(TrainPipelineSparseDist[In, Out]):
    """Trains like TorchRec's ``TrainPipelineSparseDist``, with the exchange hidden.

    ``progress(iterator)`` takes one step and returns the model's output for the whole batch, and
    raises ``StopIteration`` after the last batch. Modules that are wholly hot/cold are interleaved;
    others are listed by :meth:`summary`.

    Args:
        model: ``DistributedModelParallel``; its forward returns ``(losses, output)``, losses being
            means over the samples.
        optimizer: Dense and fused optimizers, as for TorchRec's pipelines.
        device: Where batches go.
        num_micro_batches: Pieces K that a batch is cut into; 1 still overlaps with the next batch.
        lookahead: Whether rows of the next batch that this one does not update are fetched early.
        split_batch: Cuts a batch into parts of given sizes, ``(batch, sizes) -> parts``; ``None``
            knows tensors, KeyedJaggedTensors, dataclasses and containers of them.
        join_outputs: Joins the parts' outputs, ``(outputs, sizes) -> output``; ``None`` knows the
            same types.
        loss_reduction: Whether the model's losses are a ``"mean"`` over samples or a ``"sum"``; a
            sum within the model's output needs ``join_outputs``.
        execute_all_batches: As for TorchRec's pipelines.

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
        split_batch: Callable[[Any, Sequence[int]], Sequence[Any]] | None = None,
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
        self._lookahead = lookahead
        self._losses_are_means = loss_reduction == "mean"
        self._split_batch = split_batch or split_known_batch
        self._join_outputs = join_outputs or join_known_outputs
        self._flights: deque[_Flight] = deque()
        self._training = training_schedule(num_micro_batches, lookahead)
        self._evaluation = evaluation_schedule(num_micro_batches)
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
            StopIteration: After the last batch.
            InputError: On all ranks, if a rank's batch is bad.
        """
        if not self._model_attached:
            self.attach(self._model)
        if not self._flights:
            self._take_off(dataloader_iter)
        if not self._flights:
            raise StopIteration
        flight = self._flights[0]
        if not self._is_rewritten:  # attached again
            self._rewrite(flight.batch, flight.context)
        for step in flight.steps.values():
            step.refresh()
        is_training = self._model.training
        if is_training:
            self._optimizer.zero_grad()
        batch = self._next(dataloader_iter)
        if batch is not None:
            self._flights.append(batch)
        with step_range(self._batch_count):
            for op in self._training if is_training else self._evaluation:
                if op.batch < len(self._flights):
                    with op_range(op):
                        getattr(self, f"_{op.kind}")(self._flights[op.batch], op)
        self._flights.popleft()
        self._batch_count += 1
        outputs = list(flight.outputs_K.values())
        sizes = [flight.sizes_K[index] for index in flight.outputs_K]
        return self._join_outputs(outputs, sizes)

    def attach(self, model: nn.Module | None = None, sparse_dist: bool = True) -> None:
        """Takes over the model's sharded modules again, see TorchRec's ``detach``."""
        super().attach(model, sparse_dist)
        self._is_rewritten = False

    def reset(self) -> None:
        """Forgets the batches in flight; all ranks do."""
        super().reset()
        self._flights.clear()

    def _take_off(self, dataloader_iter: Iterator[In]) -> None:
        """Prepares the first batch: nothing is updated meanwhile, so all rows are clean."""
        flight = self._next(dataloader_iter)
        if flight is None:
            return
        self._flights.append(flight)
        for op in self._evaluation:
            if op.kind != "forward":
                getattr(self, f"_{op.kind}")(flight, op)
        for step in flight.steps.values():
            step.accept_writes()

    def _next(self, dataloader_iter: Iterator[In]) -> _Flight | None:
        batch, context = self.copy_batch_to_gpu(dataloader_iter)
        if batch is None:
            return None
        assert context is not None
        if not self._is_rewritten:
            self._rewrite(batch, context)
        sizes_K = micro_batch_sizes(num_samples(batch), self._num_micro_batches)
        return _Flight(batch, sizes_K, self._split_batch(batch, sizes_K), context)

    def _rewrite(self, batch: In, context: TrainPipelineContext) -> None:
        """Finds the sharded modules and takes over their forwards."""
        found, self._model, self._original_forwards, self._pipelined_postprocs, _ = rewrite_model(
            model=self._model,
            context=context,
            dist_stream=self._data_dist_stream,
            default_stream=torch.get_device_module(self._device).current_stream(),
            batch=batch,
            apply_jit=False,
            pipelined_forward=_InterleavedForward,
            pipeline_postproc=False,
        )
        self._pipelined_modules = found
        self._interleaved, self._plain = {}, {}
        for module in found:
            ours = (
                isinstance(module, ShardedHotColdEmbeddingBagCollection) and module.can_interleave
            )
            (self._interleaved if ours else self._plain)[module.forward.name] = module
        self._original_kjt_dist_forwards.clear()
        self._inner: nn.Module = self._model
        pg = dist.group.WORLD
        if isinstance(self._model, DistributedModelParallel):
            self._inner, pg = self._model.module, self._model._env.process_group
        assert pg is not None, "init_process_group comes first"
        self._process_group = pg
        self._dense_parameters = _dense_parameters(self._inner)
        if self._num_micro_batches > 1:
            _refuse_batch_norm(self._inner)
        self._is_rewritten = True

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
            known = {id(m) for m in (*self._interleaved.values(), *self._plain.values())}
            lines += [
                f"{name}: not pipelined: its input is changed inside the model"
                for name, module in self._inner.named_modules()
                if isinstance(module, ShardedModule) and id(module) not in known
            ]
        return "\n".join(lines)

    # -- the operations of a schedule ----------------------------------------------------------

    def _request(self, flight: _Flight, op: Op) -> None:
        for name, module in self._interleaved.items():
            args, kwargs = module.forward.args.build_args_kwargs(flight.batch)
            args, _ = module.preprocess_input(args, kwargs)
            context = module.create_context()
            flight.module_contexts[name] = context
            flight.steps[name] = module.start_step(context, flight.sizes_K, *args)
        if self._plain:
            plain = list(self._plain.values())
            start_data_dist(plain, flight.batch, flight.context)
            if not self._original_kjt_dist_forwards:  # from now on their splits travel together
                self._original_kjt_dist_forwards = override_input_dist_forwards(plain)

    def _send_ids(self, flight: _Flight, op: Op) -> None:
        for step in flight.steps.values():
            step.send_ids()
        if self._plain:
            self.wait_sparse_data_dist(flight.context)

    def _receive_ids(self, flight: _Flight, op: Op) -> None:
        for step in flight.steps.values():
            step.receive_ids()

    def _send_marks(self, flight: _Flight, op: Op) -> None:
        before = self._flights[op.batch - 1]
        for name, step in flight.steps.items():
            step.send_marks(before.steps[name])

    def _lay_out(self, flight: _Flight, op: Op) -> None:
        mark = DIRTY if self._model.training and len(self._flights) > 1 else CLEAN
        for step in flight.steps.values():
            step.lay_out(mark)

    def _fetch_clean(self, flight: _Flight, op: Op) -> None:
        assert op.index is not None
        for step in flight.steps.values():
            step.fetch(op.index, CLEAN)

    def _fetch_dirty(self, flight: _Flight, op: Op) -> None:
        assert op.index is not None
        for step in flight.steps.values():
            step.fetch(op.index, DIRTY)

    def _read_hot(self, flight: _Flight, op: Op) -> None:
        for step in flight.steps.values():
            step.read_hot()

    def _forward(self, flight: _Flight, op: Op) -> None:
        assert op.index is not None
        size = flight.sizes_K[op.index]
        if not size and flight.num_samples:
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
        if size and losses.requires_grad:
            share = size / flight.num_samples if self._losses_are_means else 1.0
            flight.losses_K[op.index] = torch.sum(losses, dim=0) * share
        flight.outputs_K[op.index] = output

    def _backward(self, flight: _Flight, op: Op) -> None:
        assert op.index is not None
        loss = flight.losses_K.pop(op.index, None)
        if loss is not None:
            loss.backward()
        if op.index == 0:
            for whole in flight.wholes.values():
                whole.backward()

    def _send_gradients(self, flight: _Flight, op: Op) -> None:
        assert op.index is not None
        for step in flight.steps.values():
            step.send_gradients(op.index)

    def _reduce_hot(self, flight: _Flight, op: Op) -> None:
        for step in flight.steps.values():
            step.reduce_hot()

    def _reduce_dense(self, flight: _Flight, op: Op) -> None:
        flight.dense = DenseReduction(self._process_group, self._dense_parameters)

    def _update(self, flight: _Flight, op: Op) -> None:
        for step in flight.steps.values():
            step.update()

    def _dense_step(self, flight: _Flight, op: Op) -> None:
        assert flight.dense is not None
        flight.dense.wait()
        self._optimizer.step()


class _InterleavedForward(PipelinedForward):
    """Stands in for a sharded module's forward while a micro-batch runs."""

    _taken: Callable[[], Any] | None = None

    def take(self, rows: MicroRows, context: Any) -> None:
        """The next call pools these rows."""
        self._taken = lambda: self._module.compute_and_output_dist(context, [rows])

    def give(self, output: Any) -> None:
        """The next call returns this output."""
        self._taken = lambda: output

    def of_whole_batch(self) -> Any:
        """What TorchRec's pipelined forward returns."""
        return super().__call__()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Gives what the micro-batch asks for."""
        taken, self._taken = self._taken, None
        assert taken is not None, f"{self._name} is called twice in one forward"
        return taken()


def _dense_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Parameters outside sharded modules, which update theirs themselves."""
    found: dict[int, nn.Parameter] = {}

    def walk(module: nn.Module) -> None:
        if isinstance(module, ShardedModule):
            return
        for parameter in module.parameters(recurse=False):
            if parameter.requires_grad:
                found.setdefault(id(parameter), parameter)
        for child in module.children():
            walk(child)

    walk(model)
    return list(found.values())


def _refuse_batch_norm(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            raise CompatError(
                f"{name} is a {type(module).__name__}, whose statistics would be those of a "
                "micro-batch; use num_micro_batches=1, or a norm over features such as LayerNorm"
            )
