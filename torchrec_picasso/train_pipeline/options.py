"""Options of the pipeline: its own, and the options of TorchRec's pipeline that it refuses.

Every argument of TorchRec's constructor is either accepted or listed in :data:`REFUSED_OPTIONS`.
The listed options change no result: they save memory or reorder copies in an exchange that hot/cold
tables do not use. Leaving them out loses nothing, and no option is ignored silently.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torchrec.distributed.model_parallel import DistributedModelParallel, DMPCollection
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist

from torchrec_picasso.batches.feed import SplitBatch
from torchrec_picasso.batches.join import join_outputs
from torchrec_picasso.batches.split import split_batch
from torchrec_picasso.errors import CompatError, ConfigError
from torchrec_picasso.rows.refresh_policy import Refresh
from torchrec_picasso.sharding.sharded_module import HotColdModule
from torchrec_picasso.train_pipeline.losses import Losses
from torchrec_picasso.train_pipeline.step_report import OnStep

JoinOutputs = Callable[[Sequence[Any], Sequence[int]], Any]
"""Joins outputs of micro-batches, with the samples of each."""


@dataclass(frozen=True, kw_only=True)
class PipelineOptions:
    """How :class:`.InterleavedTrainPipeline` interleaves, checks and reports.

    Raises:
        ConfigError: If ``num_micro_batches``, ``verify_every`` or ``average_dense_every`` is less
            than 1, or the reduction is not known.
    """

    num_micro_batches: int | None = None
    """Micro-batches K that a batch is cut into; 1 still overlaps with the next batch.

    ``None`` = chosen by trying some on about the first 12 training steps, beginning with the number
    that the plan was priced for. A batch is then cut only if it is proved that its micro-batches
    train what the batch trains (:mod:`torchrec_picasso.proof`); else batches are whole, and
    ``summary()`` names the line of the model that stands in the way. A requested number without a
    proof is compared with the whole batch in steps 1, 2, 4, 8, ... and refused on all ranks where
    it differs (:mod:`.cut_check`)."""
    lookahead: bool | None = None
    """Whether rows of the next batch that this batch does not update are fetched early. ``None`` =
    chosen by trying both."""
    split_batch: SplitBatch | None = None
    """Cuts a batch into parts of given sizes, ``(batch, sizes) -> parts``; sizes may be 0. ``None``
    cuts tensors, KeyedJaggedTensors, dataclasses and containers of them. On an accelerator it runs
    on the stream of input dists."""
    join_outputs: JoinOutputs | None = None
    """Joins the outputs of the parts, ``(outputs, sizes) -> output``; ``None`` joins the types that
    ``split_batch=None`` cuts, and where a proof shows it, tensors of a row per lookup."""
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
    average_dense_every: int = 1
    """Training steps between two averages of the dense weights, which ranks step apart meanwhile:
    not exact (:mod:`.dense_average`). 1 = DDP averages the gradients of every step."""
    custom_model_fwd: Callable[[Any], tuple[Any, Any]] | None = None
    """Called instead of the model, as by TorchRec's pipelines, with every micro-batch; returns
    ``(losses, output)``."""
    on_step: OnStep | None = None
    """Called on every rank with a report after each training step; or several such in turn. If one
    raises, the step's output is lost and the next call goes on."""

    def __post_init__(self) -> None:
        Losses(self.loss_reduction)
        for name in ("num_micro_batches", "verify_every", "average_dense_every"):
            number = getattr(self, name)
            if number is not None and number < 1:
                raise ConfigError(f"{name} is {number}, expected at least 1")
        if self.average_dense_every > 1:
            warnings.warn(
                f"average_dense_every={self.average_dense_every} is not exact: each rank steps the "
                "dense weights by its own gradients, and only averages of the weights are shared",
                stacklevel=4,
            )

    @property
    def split(self) -> SplitBatch:
        """Splits a batch."""
        return self.split_batch or split_batch

    def join(
        self, outputs_K: Sequence[Any], sizes_K: Sequence[int], *, is_proved: bool = False
    ) -> Any:
        """Joins outputs. With ``join_outputs`` of the user nothing is proved."""
        if self.join_outputs is not None:
            return self.join_outputs(outputs_K, sizes_K)
        return join_outputs(outputs_K, sizes_K, is_proved=is_proved)


REFUSED_OPTIONS: Mapping[str, str] = {
    "apply_jit": (
        "TorchRec scripts a copy of the model's graph, and leaves the model inside "
        "DistributedModelParallel as it was; leave it out, and give torch.jit.script or "
        "torch.compile the dense parts before the pipeline gets the model"
    ),
    "enqueue_batch_after_forward": (
        "this pipeline asks for the rows of the batch after the next one before the forward, so "
        "that batch has to be there; leave it out"
    ),
    "free_features_storage_early": (
        "micro-batches, and the empty batches of a rank whose data has ended, are cut from the "
        "batch's features after their exchange; leave it out"
    ),
    "clear_data_dist_inputs": (
        "it frees what TorchRec's own exchange of ids has sent, which hot/cold tables do not use; "
        "leave it out"
    ),
    "async_inplace_copy": (
        "batches are copied on the copy stream already; leave it out, or use "
        "enable_inplace_copy_batch"
    ),
}
"""Reason and remedy by name of the argument."""


def refuse_options(**options: bool) -> None:
    """Refuses arguments of TorchRec's constructor that have no meaning here, all at once. The
    values are those of the arguments in :data:`REFUSED_OPTIONS`."""
    refused = [f"{name}: {REFUSED_OPTIONS[name]}" for name, given in options.items() if given]
    if refused:
        raise CompatError(
            f"InterleavedTrainPipeline does not take {'; '.join(refused)}. "
            "TrainPipelineSparseDist does"
        )


_NOT_CALLED = (
    "_init_pipelined_modules",
    "_pipeline_model",
    "_set_module_context",
    "_wait_for_batch",
    "clear_sparse_data_dist_inputs",
    "dequeue_batch",
    "enqueue_batch",
    "fill_pipeline",
    "start_sparse_data_dist",
    "sync_embeddings",
)
"""Methods of TorchRec's pipeline that the schedule of this one has no use for."""


def refuse_overrides(pipeline: type) -> None:
    """Refuses a subclass whose methods TorchRec's pipeline would call and this one would not."""
    for name in _NOT_CALLED:
        if getattr(pipeline, name) is not getattr(TrainPipelineSparseDist, name):
            raise CompatError(
                f"{pipeline.__name__} overrides {name}, which InterleavedTrainPipeline does not "
                "call; override copy_batch_to_gpu or progress, or use TrainPipelineSparseDist"
            )


def refuse_model(model: nn.Module) -> None:
    """Refuses models whose dense part or tables are not the same on all ranks of one group."""
    wrapped = model._dmp_wrapped_module if isinstance(model, DistributedModelParallel) else model
    kind = None
    if isinstance(model, DMPCollection):
        kind = "a DMPCollection, whose tables are synchronised between groups of ranks"
    elif isinstance(wrapped, FullyShardedDataParallel):
        kind = "wrapped in FullyShardedDataParallel, which cuts up dense weights"
    if kind is not None:
        raise CompatError(
            f"the model is {kind}; InterleavedTrainPipeline reduces the gradients of whole dense "
            "weights over one group. Use TrainPipelineSparseDist, or DistributedModelParallel "
            "with its default wrapper, or fully_shard (FSDP2) without it"
        )


def refuse_backward_hook(model: nn.Module, path: str) -> None:
    """Refuses user work in the backward of a module whose backward this package schedules."""
    target = dict(model.named_modules()).get(path)
    for module in [] if target is None else target.modules():
        if isinstance(module, HotColdModule) and module.has_hot_cold:
            raise CompatError(
                f"register_backward_hook: {path!r} has hot/cold tables, whose gradients are "
                "exchanged by the pipeline's schedule; inject the work into a dense module, or use "
                "TrainPipelineSparseDist with stock tables"
            )
