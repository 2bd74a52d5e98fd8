"""An in-flight batch: a batch between its request and its update, with all its own state."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from torchrec_picasso._torchrec import TrainPipelineContext
from torchrec_picasso.batches.end_of_data import AnyData
from torchrec_picasso.batches.feed import Fetched
from torchrec_picasso.rows.batch_gradients import BatchGradients
from torchrec_picasso.rows.batch_rows import BatchRows, GradientSink, PartRows
from torchrec_picasso.rows.request import RowRequest
from torchrec_picasso.schedule.schedule import Setting
from torchrec_picasso.train_pipeline.full_batch_output import FullBatchOutput, UnsplitOutput
from torchrec_picasso.train_pipeline.module_group import ModuleGroup, ModuleInput
from torchrec_picasso.train_pipeline.processed_module import ProcessedModule

__all__ = ["InFlightBatch"]


@dataclass(eq=False)
class InFlightBatch:
    """One in-flight batch of the pipeline."""

    fetched: Fetched
    setting: Setting
    sizes_K: Sequence[int]
    micro_batches_K: Sequence[Any]
    inputs: Mapping[str, ModuleInput] = field(default_factory=dict)
    """Input of each interleaved module for the whole batch, by name."""
    any_data: AnyData | None = None
    """The all-reduce that asks whether any rank has data, if no header carries the answer."""
    requests: list[RowRequest] = field(default_factory=list)
    """The request of each module group."""
    rows: list[BatchRows] = field(default_factory=list)
    """The rows of each module group, after its request has ended."""
    gradients: list[BatchGradients] = field(default_factory=list)
    """The gradients of each module group, after its request has ended."""
    full_outputs: dict[str, FullBatchOutput | UnsplitOutput] = field(default_factory=dict)
    """Full-batch outputs by module name: outputs of non-interleaved modules, and weights that
    feature processors make for interleaved ones."""
    losses_K: dict[int, Any] = field(default_factory=dict)
    outputs_K: dict[int, Any] = field(default_factory=dict)
    trained: set[str] = field(default_factory=set)
    """Names of interleaved modules that received a gradient."""
    is_whole: bool = False
    """Whether the model runs on the whole batch, although rows travel by micro-batch."""
    is_end: bool = False
    """Whether all ranks' data has ended: the batch trains nothing."""

    @property
    def batch(self) -> Any:
        """The whole batch."""
        return self.fetched.batch

    @property
    def context(self) -> TrainPipelineContext:
        """TorchRec's pipeline context of the batch."""
        return self.fetched.context

    @property
    def has_data(self) -> bool:
        """Whether the batch comes from this rank's data."""
        return self.fetched.has_data

    @property
    def num_samples(self) -> int:
        """Samples of the whole batch on this rank."""
        return sum(self.sizes_K)

    @property
    def run_indices(self) -> Sequence[int]:
        """Indices of the micro-batches that the model runs on: those with samples, or the first."""
        if self.is_whole:
            return [0]
        return [index for index, size in enumerate(self.sizes_K) if size] or [0]

    @property
    def run_sizes(self) -> Sequence[int]:
        """Samples of each run of the model."""
        if self.is_whole:
            return [self.num_samples]
        return [self.sizes_K[index] for index in self.run_indices]

    def run_batch(self, run: int) -> Any:
        """Returns the input of one run of the model.

        Args:
            run: Position in :attr:`run_indices`.
        """
        return self.batch if self.is_whole else self.micro_batches_K[self.run_indices[run]]

    def runs_backward_at(self, index: int) -> bool:
        """Whether a backward runs at the schedule's slot for one micro-batch.

        The backward of a whole batch runs in the first backward slot, which is that of the last
        micro-batch: from there on gradients of rows are sent.
        """
        return index == len(self.sizes_K) - 1 if self.is_whole else index in self.run_indices

    def acquire(
        self,
        rows: BatchRows,
        run: int,
        sink: Callable[[int], GradientSink],
        weights: Tensor | None,
        number: int,
    ) -> list[tuple[PartRows, int]]:
        """Returns the rows that a module uses in one run of the model.

        Args:
            rows: Rows of the module's group.
            run: Position in :attr:`run_indices`.
            sink: Makes the function that receives the gradients of a micro-batch, by its index.
            weights: Per-sample weights of the whole batch; ``None`` = those of the batch.
            number: Position of the module in its group.

        Returns:
            The rows of each micro-batch of the run, with the number of its samples.
        """
        counted = [index for index, size in enumerate(self.sizes_K) if size] or [0]
        # a run on the whole batch uses the rows of all micro-batches with samples, one after
        # another; the last use of a micro-batch's rows may free them
        indices = counted if self.is_whole else [counted[run]]
        return [
            (
                rows.acquire(
                    index, sink(index), weights, is_last=index == counted[-1], module=number
                ),
                self.sizes_K[index],
            )
            for index in indices
        ]

    def forget(self) -> None:
        """Drops losses and outputs: their graphs hold gradient sinks, which hold this object."""
        self.losses_K.clear()
        self.outputs_K.clear()

    def take_gradients(
        self,
        name: str,
        gradients: BatchGradients,
        number: int,
        index: int,
        grads_M: Sequence[Tensor],
    ) -> None:
        """Receives the gradients of the rows that a micro-batch uses, in its backward.

        If the model runs a module without gradients, or stops its gradients, this is not called.

        Args:
            name: Name of the module.
            gradients: Gradients of the module's group.
            number: Position of the module in its group.
            index: Index of the micro-batch.
            grads_M: Gradients of the rows ``(n, D_m)`` of each matrix.
        """
        self.trained.add(name)
        gradients.add(index, grads_M, number)

    def weights_of(self, name: str, module: Any, rows: BatchRows, number: int) -> Tensor | None:
        """Computes per-sample weights of the whole batch for modules with feature processors.

        The backward of each micro-batch adds to the gradient of the weights; the feature processors
        run backward once, with the sums.

        Args:
            name: Name of the module.
            module: The interleaved module.
            rows: Rows of the module's group.
            number: Position of the module in its group.

        Returns:
            The weights ``(N,)``; ``None`` = the module uses those of the batch.
        """
        if not isinstance(module, ProcessedModule):
            return None
        if name not in self.full_outputs:
            self.full_outputs[name] = self._whole(module.weights(rows, number), name)
        weights: Tensor = self.full_outputs[name].part([self.num_samples], 0)
        return weights

    def _whole(self, output: Any, name: str) -> FullBatchOutput | UnsplitOutput:
        """Wraps a full-batch output; one run of the model needs no split of it."""
        return (UnsplitOutput if len(self.run_sizes) == 1 else FullBatchOutput)(output, name)

    def full_batch_outputs(
        self, groups: Sequence[ModuleGroup], plain: Mapping[str, Any]
    ) -> dict[str, FullBatchOutput]:
        """Computes each pipelined module's output for the whole batch, without its graph.

        Collective: every rank calls this for the same batch.

        Args:
            groups: Modules whose exchange a schedule drives.
            plain: Non-interleaved modules, by name.
        """
        self.compute_full_outputs(plain)
        outputs = {name: self.full_outputs[name].detached() for name in plain}
        counted = [index for index, size in enumerate(self.sizes_K) if size] or [0]
        for group, rows in zip(groups, self.rows):
            for number, (name, module) in enumerate(group.modules.items()):
                weights = self.weights_of(name, module, rows, number)
                with torch.no_grad():
                    # the rows stay for the training step: no sink, and not the last use
                    parts = [
                        (
                            rows.acquire(index, lambda _: None, weights, module=number),
                            self.sizes_K[index],
                        )
                        for index in counted
                    ]
                    whole = group.joined_output(name, parts).wait()
                outputs[name] = FullBatchOutput(whole, name, always_leaves=True)
        return outputs

    def compute_full_outputs(self, plain: Mapping[str, Any]) -> None:
        """Computes the non-interleaved modules once per batch; a second call does nothing.

        Collective: every rank calls this for the same batch.

        Args:
            plain: Non-interleaved modules, by name.
        """
        for name, module in plain.items():
            if name not in self.full_outputs:
                module.forward.set_context(self.context)
                self.full_outputs[name] = self._whole(module.forward.whole_batch(), name)
