"""Refuses the options of TorchRec's ``TrainPipelineSparseDist`` that this pipeline does not have.

Every argument of TorchRec's constructor is either accepted or listed here. The listed options
change no result: they save memory or reorder copies in an exchange that hot/cold tables do not use.
Leaving them out loses nothing, and no option is ignored silently.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torchrec.distributed.model_parallel import DistributedModelParallel, DMPCollection

from torchrec_picasso.errors import CompatError
from torchrec_picasso.sharding.sharded_module import HotColdModule

__all__ = ["REFUSED_OPTIONS", "refuse_backward_hook", "refuse_model", "refuse_options"]

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


def refuse_options(options: Mapping[str, bool]) -> None:
    """Refuses arguments of TorchRec's constructor that have no meaning here.

    Args:
        options: Value of each argument in :data:`REFUSED_OPTIONS` that the user passed.

    Raises:
        CompatError: If any is true; lists each with reason and remedy.
    """
    refused = [f"{name}: {REFUSED_OPTIONS[name]}" for name, given in options.items() if given]
    if refused:
        raise CompatError(
            f"InterleavedTrainPipeline does not take {'; '.join(refused)}. "
            "TrainPipelineSparseDist does"
        )


def refuse_model(model: nn.Module) -> None:
    """Refuses models whose dense part or tables are not the same on all ranks of one group.

    Raises:
        CompatError: If the model has such a wrapper; names it.
    """
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
    """Refuses user work in the backward of a module whose backward this package schedules.

    Args:
        model: The model that was passed to the pipeline.
        path: Path of the module in the model.

    Raises:
        CompatError: If the module has hot/cold tables.
    """
    target = dict(model.named_modules()).get(path)
    for module in [] if target is None else target.modules():
        if isinstance(module, HotColdModule) and module.has_hot_cold:
            raise CompatError(
                f"register_backward_hook: {path!r} has hot/cold tables, whose gradients are "
                "exchanged by the pipeline's schedule; inject the work into a dense module, or use "
                "TrainPipelineSparseDist with stock tables"
            )
