"""Options of the pipeline beside those of TorchRec's pipelines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torchrec_picasso.batches.end_of_data import SplitBatch
from torchrec_picasso.errors import ConfigError
from torchrec_picasso.refresh.policy import Refresh
from torchrec_picasso.train_pipeline.losses import Losses
from torchrec_picasso.train_pipeline.step_report import OnStep

__all__ = ["PipelineOptions"]


@dataclass(frozen=True, kw_only=True)
class PipelineOptions:
    """How :class:`.InterleavedTrainPipeline` interleaves, checks and reports.

    Raises:
        ConfigError: If ``num_micro_batches`` or ``verify_every`` is less than 1, or the reduction
            is not known.
    """

    num_micro_batches: int | None = None
    """Micro-batches K that a batch is cut into; 1 still overlaps with the next batch. ``None`` =
    chosen by trying some on the first steps; 1 where a cut is not proved to train the same."""
    lookahead: bool | None = None
    """Whether rows of the next batch that this batch does not update are fetched early. ``None`` =
    chosen by trying both."""
    split_batch: SplitBatch | None = None
    """Cuts a batch into parts of given sizes, ``(batch, sizes) -> parts``; sizes may be 0. ``None``
    cuts tensors, KeyedJaggedTensors, dataclasses and containers of them. On an accelerator it runs
    on the stream of input dists."""
    join_outputs: Callable[[Sequence[Any], Sequence[int]], Any] | None = None
    """Joins the outputs of the parts, ``(outputs, sizes) -> output``; ``None`` joins the types that
    ``split_batch=None`` cuts."""
    loss_reduction: str = "mean"
    """Whether the model's losses are a ``"mean"`` over samples, a ``"sum"``, or a ``"ratio"`` of
    two sums, such as weighted losses over weights: then the model returns ``((numerators,
    denominators), output)``. A sum or ratio within the model's output needs ``join_outputs``."""
    refresh: Refresh | None = field(default_factory=Refresh)
    """How the hot rows of interleaved tables follow what is looked up; ``None`` = the hot rows stay
    the plan's. Results are the same either way."""
    verify_every: int | None = None
    """Training steps between two bitwise comparisons of all replicas with their homes; ``None`` =
    no comparison. A comparison sends all hot rows to all ranks."""
    on_step: OnStep | None = None
    """Called on every rank with a report after each training step; or several such in turn. If one
    raises, the step's output is lost and the next call goes on."""

    def __post_init__(self) -> None:
        Losses(self.loss_reduction)
        for name in ("num_micro_batches", "verify_every"):
            number = getattr(self, name)
            if number is not None and number < 1:
                raise ConfigError(f"{name} is {number}, expected at least 1")

    @property
    def own_functions(self) -> list[str]:
        """The options that are functions of the user's, run beside the model's forward."""
        names = ("split_batch", "join_outputs")
        return [name for name in names if getattr(self, name) is not None]
