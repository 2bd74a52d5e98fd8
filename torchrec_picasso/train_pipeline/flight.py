"""A batch between its request and its update, with everything that belongs to it alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from torchrec_picasso._torchrec import TrainPipelineContext
from torchrec_picasso.feed.batch_feed import Fetched
from torchrec_picasso.feed.end_of_data import AnyData
from torchrec_picasso.rows.batch_gradients import BatchGradients
from torchrec_picasso.rows.batch_rows import BatchRows, GradientSink, PartRows
from torchrec_picasso.rows.request import RowRequest
from torchrec_picasso.schedule.schedule import Setting
from torchrec_picasso.train_pipeline.module_group import ModuleGroup
from torchrec_picasso.train_pipeline.processed_module import ProcessedModule
from torchrec_picasso.train_pipeline.whole_output import UncutOutput, WholeOutput

__all__ = ["Flight"]


@dataclass(eq=False)
class Flight:
    """One batch of the pipeline."""

    fetched: Fetched
    setting: Setting
    sizes_K: Sequence[int]
    micro_batches_K: Sequence[Any]
    any_data: AnyData | None = None
    """The question whether any rank has data, where no header carries the answer."""
    requests: list[RowRequest] = field(default_factory=list)
    """By group of modules."""
    rows: list[BatchRows] = field(default_factory=list)
    """By group, once its request has ended."""
    gradients: list[BatchGradients] = field(default_factory=list)
    """By group, likewise."""
    wholes: dict[str, WholeOutput | UncutOutput] = field(default_factory=dict)
    """What modules gave for the whole batch that are not interleaved, or make weights; by name."""
    losses_K: dict[int, Any] = field(default_factory=dict)
    outputs_K: dict[int, Any] = field(default_factory=dict)
    trained: set[str] = field(default_factory=set)
    """Interleaved modules that a gradient has come to, by name."""
    is_whole: bool = False
    """Whether the model runs on the whole batch, though rows travel by micro-batch."""
    is_end: bool = False
    """Whether no rank has data any more: nothing is trained on it."""

    @property
    def batch(self) -> Any:
        """The whole batch."""
        return self.fetched.batch

    @property
    def context(self) -> TrainPipelineContext:
        """What TorchRec keeps with the batch."""
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
        """The micro-batches that the model runs on, by index: those with samples, or the first."""
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
        """What the model runs on.

        Args:
            run: Place in :attr:`run_indices`.
        """
        return self.batch if self.is_whole else self.micro_batches_K[self.run_indices[run]]

    def runs_backward_at(self, index: int) -> bool:
        """Whether a backward runs in the schedule's place for one micro-batch.

        That of a whole batch runs in the first place, that of the last micro-batch: gradients of
        rows are sent from there on.
        """
        return index == len(self.sizes_K) - 1 if self.is_whole else index in self.run_indices

    def hand_out(
        self,
        rows: BatchRows,
        run: int,
        sink: Callable[[int], GradientSink],
        weights: Tensor | None,
        number: int,
    ) -> list[tuple[PartRows, int]]:
        """The rows that a module uses in one run of the model, each part with its samples.

        Args:
            rows: Rows of the module's group.
            run: Place in :attr:`run_indices`.
            sink: Takes the gradients of a micro-batch, by its index.
            weights: Per-sample weights of the whole batch; ``None`` = those of the batch.
            number: Place of the module in its group.
        """
        counted = [index for index, size in enumerate(self.sizes_K) if size] or [0]
        indices = counted if self.is_whole else [counted[run]]
        return [
            (
                rows.hand_out(
                    index, sink(index), weights, once=index == counted[-1], module=number
                ),
                self.sizes_K[index],
            )
            for index in indices
        ]

    def forget(self) -> None:
        """Lets go of what has a graph: graphs hold sinks of gradients, which hold the flight."""
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
        """Takes the gradients of the rows that a micro-batch uses, in its backward.

        The model may run a module without gradients, or let none through: then nobody calls.

        Args:
            name: Name of the module.
            gradients: Gradients of its group.
            number: Place of the module in its group.
            index: Index of the micro-batch.
            grads_M: ``(n, D_m)`` by matrix.
        """
        self.trained.add(name)
        gradients.add(index, grads_M, number)

    def weights_of(self, name: str, module: Any, rows: BatchRows, number: int) -> Tensor | None:
        """Per-sample weights of the whole batch that an interleaved module makes itself.

        Micro-batches run backward into them; what made them runs backward once, with the sums.

        Args:
            name: Of the module.
            module: Which.
            rows: Of its group.
            number: Of the module in its group.

        Returns:
            ``None`` = it takes those of the batch.
        """
        if not isinstance(module, ProcessedModule):
            return None
        if name not in self.wholes:
            self.wholes[name] = self._whole(module.weights(rows, number), name)
        weights: Tensor = self.wholes[name].part([self.num_samples], 0)
        return weights

    def _whole(self, output: Any, name: str) -> WholeOutput | UncutOutput:
        return (UncutOutput if len(self.run_sizes) == 1 else WholeOutput)(output, name)

    def whole_outputs(
        self, groups: Sequence[ModuleGroup], plain: Mapping[str, Any]
    ) -> dict[str, WholeOutput]:
        """The output of every pipelined module for the whole batch, without its graph. Collective.

        Args:
            groups: Modules whose exchange a schedule drives.
            plain: Modules computed once per batch, by name.
        """
        self.compute_wholes(plain)
        outputs = {name: self.wholes[name].detached() for name in plain}
        counted = [index for index, size in enumerate(self.sizes_K) if size] or [0]
        for group, rows in zip(groups, self.rows):
            for number, (name, module) in enumerate(group.modules.items()):
                weights = self.weights_of(name, module, rows, number)
                with torch.no_grad():
                    parts = [
                        (
                            rows.hand_out(index, lambda _: None, weights, module=number),
                            self.sizes_K[index],
                        )
                        for index in counted
                    ]
                    whole = group.joined_output(name, parts).wait()
                outputs[name] = WholeOutput(whole, name, always_leaves=True)
        return outputs

    def compute_wholes(self, plain: Mapping[str, Any]) -> None:
        """Computes the modules that are not interleaved, if that is not done yet. Collective.

        Args:
            plain: They, by name.
        """
        for name, module in plain.items():
            if name not in self.wholes:
                module.forward.set_context(self.context)
                self.wholes[name] = self._whole(module.forward.of_whole_batch(), name)
