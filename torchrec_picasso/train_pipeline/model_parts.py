"""Finds a model's sharded and dense parts, and what prevents micro-batches.

The pipeline trains every model that TorchRec's pipeline trains. A sharded module is of one of three
kinds, or has tables of the first two kinds:

- *interleaved*: its tables are hot/cold, and a schedule drives its exchange;
- *computed once* per batch: its ids are exchanged early, as in TorchRec's pipeline, and
  micro-batches use parts of its full-batch output;
- *not pipelined*: TorchRec cannot find its input without running the model. It runs inside the
  model, and updates its rows in every backward, so batches must be whole.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed.fp_embeddingbag import ShardedFeatureProcessedEmbeddingBagCollection
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import ShardedModule

from torchrec_picasso.placement import HotColdParams
from torchrec_picasso.proof.dense_part import outside_of_sharded
from torchrec_picasso.sharding.sharded_module import HotColdModule
from torchrec_picasso.train_pipeline.module_group import ScheduledModule
from torchrec_picasso.train_pipeline.processed_module import ProcessedModule

__all__ = [
    "as_scheduled",
    "inner_model",
    "process_group_of",
    "unpipelined_modules",
    "why_computed_once",
    "why_whole_batches",
]


_MADE_INSIDE = "its input is not read off the batch but made inside the model"
_NOT_SEEN = "the tracer sees no call of it in the model's forward"
_CURES = {
    _MADE_INSIDE: "give the module features as they are in the batch",
    _NOT_SEEN: "call the module in a forward, and in no function that torch.fx.wrap hides",
}


def inner_model(model: nn.Module) -> nn.Module:
    """Returns the model inside TorchRec's wrapper."""
    return model.module if isinstance(model, DistributedModelParallel) else model


def process_group_of(model: nn.Module) -> dist.ProcessGroup:
    """Returns the process group that a model is sharded over."""
    pg = dist.group.WORLD
    if isinstance(model, DistributedModelParallel):
        pg = model._env.process_group
    assert pg is not None, "init_process_group comes first"
    return pg


def unpipelined_modules(
    model: nn.Module, pipelined: Collection[nn.Module], called: Collection[str]
) -> dict[str, str]:
    """Finds sharded modules that TorchRec does not pipeline: a reason by module name.

    TorchRec's tracer found the input of ``pipelined`` modules in the batch, and saw a call of
    modules with the names ``called``. The model is the one inside its wrapper.
    """
    known = {id(module) for module in pipelined}
    return {
        name: (_MADE_INSIDE if name in called else _NOT_SEEN)
        for name, module in outside_of_sharded(model)
        if isinstance(module, ShardedModule) and id(module) not in known
    }


def as_scheduled(module: ShardedModule) -> ScheduledModule | None:
    """Returns a module in the form that schedules drive; ``None`` = some table is not hot/cold."""
    tables = _tables_of(module)
    if not isinstance(tables, HotColdModule) or not tables.is_all_hot_cold:
        return None
    return tables if tables is module else ProcessedModule(module, tables)


def _tables_of(module: ShardedModule) -> ShardedModule:
    """Returns a module without its feature processors."""
    is_processed = isinstance(module, ShardedFeatureProcessedEmbeddingBagCollection)
    return module._embedding_bag_collection if is_processed else module


def why_computed_once(module: ShardedModule) -> str:
    """Reason why a pipelined module is not interleaved."""
    kind, module = type(module).__name__, _tables_of(module)
    if not isinstance(module, HotColdModule):
        return f"it is a {kind}, with TorchRec's exchange"
    sharding = module.module_sharding_plan.values()
    num_stock = sum(not isinstance(s.cache_params, HotColdParams) for s in sharding)
    if num_stock == len(sharding):
        return "none of its tables is hot/cold"
    return f"{num_stock} of its {len(sharding)} tables are not hot/cold"


def why_whole_batches(model: nn.Module, unpipelined: Mapping[str, str]) -> str | None:
    """Reason why batches of the model inside its wrapper cannot be split, with advice, or ``None``.

    ``unpipelined`` is the result of :func:`unpipelined_modules`.
    """
    for name, module in outside_of_sharded(model):
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            return (
                f"{name} is a {type(module).__name__}, whose statistics would be those of a "
                "micro-batch; use num_micro_batches=1, or a norm over features such as LayerNorm"
            )
        if isinstance(module, DistributedDataParallel):
            return (
                f"{name or 'the model'} is wrapped in DistributedDataParallel, which reduces "
                "gradients in every backward; use num_micro_batches=1, or let "
                "DistributedModelParallel wrap the model"
            )
    if unpipelined:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in unpipelined.items())
        cures = dict.fromkeys(_CURES[reason] for reason in unpipelined.values())
        return (
            f"{reasons}. So it cannot be pipelined and would update its rows once per micro-batch; "
            f"use num_micro_batches=1, or {' and '.join(cures)}"
        )
    return None
