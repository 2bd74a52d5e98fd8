"""A batch between its request and its update, with everything that belongs to it alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from torchrec_picasso._torchrec import TrainPipelineContext
from torchrec_picasso.feed.batch_feed import Fetched
from torchrec_picasso.feed.end_of_data import AnyData
from torchrec_picasso.rows.batch_gradients import BatchGradients
from torchrec_picasso.rows.batch_rows import BatchRows
from torchrec_picasso.rows.request import RowRequest
from torchrec_picasso.schedule.schedule import Setting
from torchrec_picasso.train_pipeline.dense_reduction import DenseReduction
from torchrec_picasso.train_pipeline.processed_module import ProcessedModule
from torchrec_picasso.train_pipeline.whole_output import UncutOutput, WholeOutput

__all__ = ["Flight", "share_of"]


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
    losses_K: dict[int, Tensor] = field(default_factory=dict)
    outputs_K: dict[int, Any] = field(default_factory=dict)
    trained: set[str] = field(default_factory=set)
    """Interleaved modules that a gradient has come to, by name."""
    dense: DenseReduction | None = None
    late: DenseReduction | None = None
    """Of parameters inside modules that are computed once."""
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

    def take_gradients(
        self,
        name: str,
        gradients: BatchGradients,
        index: int,
        number: int,
        grads_M: Sequence[Tensor],
    ) -> None:
        """Takes the gradients of the rows that a micro-batch uses, in its backward.

        The model may run a module without gradients, or let none through: then nobody calls.

        Args:
            name: Of the module.
            gradients: Of its group.
            index: Of the micro-batch.
            number: Of the module in its group.
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
        return (UncutOutput if len(self.sizes_K) == 1 else WholeOutput)(output, name)

    def share(self, index: int, losses_are_means: bool) -> float:
        """What a micro-batch's loss counts in the batch's; nothing without samples."""
        return share_of(index, self.sizes_K, losses_are_means)

    def compute_wholes(self, plain: Mapping[str, Any]) -> None:
        """Computes the modules that are not interleaved, if that is not done yet. Collective.

        Args:
            plain: They, by name.
        """
        for name, module in plain.items():
            if name not in self.wholes:
                module.forward.set_context(self.context)
                self.wholes[name] = self._whole(module.forward.of_whole_batch(), name)


def share_of(index: int, sizes_K: Sequence[int], losses_are_means: bool) -> float:
    """What a micro-batch's loss counts in that of a batch cut to these sizes."""
    if not sizes_K[index]:
        return 0.0
    return sizes_K[index] / sum(sizes_K) if losses_are_means else 1.0
