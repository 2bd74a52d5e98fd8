"""Which parts of a model are sharded and which are dense, and what cannot be micro-batched."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import ShardedModule
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_picasso.errors import CompatError

__all__ = [
    "dense_parameters",
    "inner_model",
    "process_group_of",
    "refuse_variable_batch",
    "unpipelined_modules",
    "why_whole_batches",
]


def inner_model(model: nn.Module) -> nn.Module:
    """The model inside TorchRec's wrapper."""
    return model.module if isinstance(model, DistributedModelParallel) else model


def process_group_of(model: nn.Module) -> dist.ProcessGroup:
    """The group that a model is sharded over."""
    pg = dist.group.WORLD
    if isinstance(model, DistributedModelParallel):
        pg = model._env.process_group
    assert pg is not None, "init_process_group comes first"
    return pg


def dense_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Parameters outside sharded modules, which update theirs themselves."""
    found: dict[int, nn.Parameter] = {}
    for _, module in _outside_of_sharded(model):
        if not isinstance(module, ShardedModule):
            for parameter in module.parameters(recurse=False):
                if parameter.requires_grad:
                    found.setdefault(id(parameter), parameter)
    return list(found.values())


def unpipelined_modules(model: nn.Module, pipelined: Collection[nn.Module]) -> list[str]:
    """Names of sharded modules that TorchRec's tracer found no plain input for."""
    known = {id(module) for module in pipelined}
    return [
        name
        for name, module in _outside_of_sharded(model)
        if isinstance(module, ShardedModule) and id(module) not in known
    ]


def why_whole_batches(model: nn.Module, unpipelined: Collection[str]) -> str | None:
    """Why a model's batches cannot be cut into micro-batches, with advice.

    Args:
        model: The model inside its wrapper.
        unpipelined: Result of :func:`unpipelined_modules`, which would update their rows once per
            micro-batch.

    Returns:
        ``None`` = they can.
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            return (
                f"{name} is a {type(module).__name__}, whose statistics would be those of a "
                "micro-batch; use num_micro_batches=1, or a norm over features such as LayerNorm"
            )
    if unpipelined:
        return (
            f"{', '.join(unpipelined)}: the module's input is changed inside the model, so it "
            "cannot be pipelined and would update its rows once per micro-batch; use "
            "num_micro_batches=1, or change the input before the batch comes to the pipeline"
        )
    return None


def refuse_variable_batch(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Refuses a batch size per feature.

    Args:
        name: Of the module.
        args: Its input for a batch.
        kwargs: The same.

    Raises:
        CompatError: Names the module.
    """
    for features in (*args, *kwargs.values()):
        if isinstance(features, KeyedJaggedTensor) and features.variable_stride_per_key():
            raise CompatError(
                f"{name}: its KeyedJaggedTensor has a batch size per feature (variable batch), "
                "whose samples cannot be cut into micro-batches; use TorchRec's "
                "TrainPipelineSparseDist, or the same batch size for all features"
            )


def _outside_of_sharded(module: nn.Module, name: str = "") -> Iterator[tuple[str, nn.Module]]:
    """A module and what is inside it, but nothing that is inside a sharded module."""
    yield name, module
    if not isinstance(module, ShardedModule):
        for child_name, child in module.named_children():
            yield from _outside_of_sharded(child, f"{name}.{child_name}" if name else child_name)
