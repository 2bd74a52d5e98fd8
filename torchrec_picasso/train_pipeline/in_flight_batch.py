"""An in-flight batch: a batch between its request and its update, with all its own state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_picasso.batches.feed import Fetched
from torchrec_picasso.errors import CompatError
from torchrec_picasso.rows.batch_gradients import BatchGradients
from torchrec_picasso.rows.batch_rows import BatchRows, MicroBatchRows
from torchrec_picasso.rows.request import RowRequest
from torchrec_picasso.schedule.schedule import Setting, backward_order
from torchrec_picasso.train_pipeline.full_batch_output import FullBatchOutput, UnsplitOutput
from torchrec_picasso.train_pipeline.model_parts import ProcessedModule
from torchrec_picasso.train_pipeline.module_group import ModuleGroup


@dataclass(eq=False)
class GroupBatch:
    """An in-flight batch as one module group sees it."""

    group: ModuleGroup
    request: RowRequest
    rows: BatchRows = field(init=False)
    """Set with the gradients once the layout, the request's result, is built."""
    gradients: BatchGradients = field(init=False)


@dataclass(frozen=True)
class ModelRun:
    """A forward and a backward of the model, of a micro-batch or of the whole batch."""

    number: int
    """Position among the runs of the batch."""
    forward_at: int
    """Index of the schedule's forward that it runs in."""
    backward_at: int
    """Index of the schedule's backward that it runs in."""
    batch: Any
    num_samples: int
    micro_batches: Sequence[int]
    """Micro-batches whose rows it uses."""


@dataclass(eq=False, kw_only=True)
class InFlightBatch(Fetched):
    """One in-flight batch of the pipeline."""

    setting: Setting
    sizes_K: Sequence[int]
    micro_batches_K: Sequence[Any]
    features_of: Mapping[str, KeyedJaggedTensor] = field(default_factory=dict)
    """Features that each interleaved module looks up for the whole batch, by its name."""
    forwards_first: bool = True
    """Whether all micro-batches run forward before any runs backward."""
    groups: list[GroupBatch] = field(default_factory=list)
    """The batch by module group, from its request on."""
    full_outputs: dict[str, FullBatchOutput | UnsplitOutput] = field(default_factory=dict)
    """Full-batch outputs by module name: outputs of plain modules, and weights that feature
    processors make for interleaved ones."""
    losses_K: dict[int, Any] = field(default_factory=dict)
    outputs_K: dict[int, Any] = field(default_factory=dict)
    trained: set[tuple[str, int]] = field(default_factory=set)
    """Interleaved modules that received a gradient, by name, and of which micro-batch."""
    is_whole: bool = False
    """Whether the model runs on the whole batch, although rows travel by micro-batch."""
    is_end: bool = False
    """Whether all ranks' data has ended: the batch trains nothing."""
    takes_gradients: bool = True
    """Whether a backward of a training step may still reach its rows."""

    @property
    def num_samples(self) -> int:
        """Samples of the whole batch on this rank."""
        return sum(self.sizes_K)

    @property
    def filled(self) -> Sequence[int]:
        """Indices of the micro-batches with samples, or the first."""
        return [index for index, size in enumerate(self.sizes_K) if size] or [0]

    @property
    def runs(self) -> Sequence[ModelRun]:
        """The runs of the model, in the order of their samples."""
        if self.is_whole:
            # gradients of rows are sent from the schedule's first backward on
            first = self.backward_order[0]
            return [ModelRun(0, 0, first, self.batch, self.num_samples, self.filled)]
        batches, sizes = self.micro_batches_K, self.sizes_K
        filled = enumerate(self.filled)
        return [ModelRun(number, k, k, batches[k], sizes[k], [k]) for number, k in filled]

    @property
    def backward_order(self) -> Sequence[int]:
        """Micro-batches in the order of the schedule's backwards.

        At the last one all ranks reduce dense gradients and run backward of full-batch outputs,
        also those whose micro-batch has no samples, so that all start collectives in one order.
        """
        return backward_order(self.setting, self.forwards_first)

    @property
    def is_one_backward(self) -> bool:
        """Whether the model runs once, and dense gradients are reduced in its only backward."""
        return self.is_whole or self.filled == [self.backward_order[-1]]

    def acquire(
        self, indices: Sequence[int], group_batch: GroupBatch, name: str, trains: bool
    ) -> list[tuple[MicroBatchRows, int]]:
        """Returns rows and samples of micro-batches that a module uses in one run of the model. A
        run that does not train takes no gradients, and the rows stay for the training step."""
        weights, number = self._weights_of(group_batch, name), group_batch.group.number_of(name)
        acquired = []
        for index in indices:
            take = partial(self._take_gradients, group_batch, name, index)
            sink = take if trains else (lambda grads_M: None)
            is_last = trains and index == self.filled[-1]  # the last use of rows may free them
            rows = group_batch.rows.acquire(index, sink, weights, is_last=is_last, module=number)
            acquired.append((rows, self.sizes_K[index]))
        return acquired

    def _take_gradients(
        self, group_batch: GroupBatch, name: str, index: int, grads_M: Sequence[Tensor]
    ) -> None:
        """Receives the gradients ``(n, D_m)`` of the rows of each matrix, in a backward. If the
        model runs a module without gradients, or stops its gradients, this is not called."""
        if not self.takes_gradients:
            raise CompatError(
                f"{name}: a backward outside of the one of a training step reaches its tables, "
                "which TorchRec updates in every backward; add what it starts from to the losses, "
                "detach() the pipeline to train by hand, or use TrainPipelineSparseDist with stock "
                "tables"
            )
        if (name, index) in self.trained:
            raise CompatError(
                f"{name}: a second backward of one step reaches its tables, which TorchRec updates "
                "in every backward; run one backward, of the sum of the losses, or use "
                "TrainPipelineSparseDist with stock tables"
            )
        self.trained.add((name, index))
        group_batch.gradients.add(index, grads_M, group_batch.group.number_of(name))

    def forget(self) -> None:
        """Drops losses and outputs: their graphs hold gradient sinks, which hold this object."""
        self.losses_K.clear()
        self.outputs_K.clear()

    def _weights_of(self, group_batch: GroupBatch, name: str) -> Tensor | None:
        """Computes the whole batch's weights ``(N,)`` for a module with feature processors.

        The backward of each micro-batch adds to the gradient of the weights; the feature processors
        run backward once, with the sums. ``None`` = the module uses the weights of the batch.
        """
        module = group_batch.group.modules[name]
        if not isinstance(module, ProcessedModule):
            return None
        if name not in self.full_outputs:
            number = group_batch.group.number_of(name)
            self._keep_full(name, module.weights(group_batch.rows, number))
        return self.full_outputs[name].part([self.num_samples], 0)

    def _keep_full(self, name: str, output: Any) -> None:
        """Keeps a full-batch output. If any rank may run several backwards, all ranks run that of
        the output last, so that collectives have one order; else it is part of the only one."""
        is_in_backward = self.is_whole or self.setting.num_micro_batches == 1
        keep = UnsplitOutput if is_in_backward else FullBatchOutput
        self.full_outputs[name] = keep(output, name)

    def compute_plain(self, plain: Mapping[str, Any]) -> None:
        """Computes the full-batch outputs of the plain modules, once. Collective."""
        for name, module in plain.items():
            if name not in self.full_outputs:
                module.forward.set_context(self.context)
                self._keep_full(name, module.forward.whole_batch())

    def full_batch_outputs(self, plain: Mapping[str, Any]) -> dict[str, FullBatchOutput]:
        """Computes each pipelined module's output for the whole batch, without its graph.
        Collective. The modules are those of all groups, and ``plain`` ones."""
        self.compute_plain(plain)
        outputs = {name: self.full_outputs[name].detached() for name in plain}
        for group_batch in self.groups:
            group_batch.rows.relay(len(self.sizes_K) - 1)
            for name in group_batch.group.modules:
                self._weights_of(group_batch, name)  # once, with their graph
                with torch.no_grad():
                    acquired = self.acquire(self.filled, group_batch, name, trains=False)
                    whole = group_batch.group.output(name, acquired).wait()
                outputs[name] = FullBatchOutput(whole, name, always_leaves=True)
        return outputs
