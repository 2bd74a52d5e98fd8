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

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed.embedding_types import KJTList
from torchrec.distributed.fp_embeddingbag import ShardedFeatureProcessedEmbeddingBagCollection
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import LazyAwaitable, ShardedModule
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_picasso.placement import HotColdParams
from torchrec_picasso.proof.dense_part import outside_of_sharded
from torchrec_picasso.rows.batch_rows import BatchRows, MicroBatchRows
from torchrec_picasso.rows.group import RowGroup
from torchrec_picasso.rows.valid_features import with_own_weights, with_weights
from torchrec_picasso.sharding.sharded_module import HotColdModule

_MADE_INSIDE = "its input is not read off the batch but made inside the model"
_NOT_SEEN = (
    "the tracer sees no call of it in the model's forward",
    "call the module in a forward, and in no function that torch.fx.wrap hides",
)


class ProcessedModule:
    """A FeatureProcessedEmbeddingBagCollection of hot/cold ``tables`` alone, driven by a schedule.

    Feature processors compute the per-sample weights of the ids and never change the ids, so a
    schedule fetches rows as for any other module. The processors run once, on the whole batch.
    Micro-batches use their parts of the weights and add to the weights' gradient; the processors'
    own backward runs once, with the sums, before the gradients of their parameters are reduced.

    TorchRec's own path writes positions into the batch's features, where the next module with the
    same features would take them for weights. Here they are written into a copy.
    """

    def __init__(
        self, module: ShardedFeatureProcessedEmbeddingBagCollection, tables: HotColdModule
    ) -> None:
        self._module = module
        self._tables = tables

    @property
    def forward(self) -> Any:
        """The replacement of the module's forward."""
        return self._module.forward

    @property
    def group(self) -> RowGroup:
        """The tables' rows."""
        return self._tables.group

    def features_of(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """Copies the features that the module looks up, in the order of its tables. The copy has
        weights, which the processors may overwrite. Lengths must be valid."""
        (own, *_), _ = self._module.preprocess_input([with_own_weights(features)], {})
        return self._tables.features_of(own)

    def output(self, rows: MicroBatchRows) -> LazyAwaitable[Any]:
        """Computes the module's output for one micro-batch."""
        return self._tables.output(rows)

    def weights(self, rows: BatchRows, number: int) -> Tensor:
        """Runs the processors on a whole batch: weights of all lookups of the group ``(N,)``.

        Those of this module, which has position ``number`` in the group, have their graph; those of
        other modules are as the batch has them.
        """
        by_module = rows.layout.features_by_module
        features, apply = by_module[number], self._module.apply_feature_processors_to_kjt_list
        # KeyedJaggedTensor.to_dict raises for a batch without samples, which needs no weights
        (made,) = apply(KJTList([features])) if features.lengths().numel() else (features,)
        weights_N = made.weights()
        # as in TorchRec, every parameter gets a gradient, for any ids
        parameters = [p.flatten() for p in self._module._feature_processors.parameters()]
        if parameters:
            weights_N = weights_N + 0.0 * torch.cat(parameters).sum()
        weighted = list(by_module)
        weighted[number] = with_weights(features, weights_N)
        return rows.group.in_one(weighted).weights()


ScheduledModule = HotColdModule | ProcessedModule
"""Modules whose exchange a schedule can drive."""


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
    model: nn.Module, pipelined: Collection[nn.Module], called: Mapping[str, str]
) -> dict[str, tuple[str, str]]:
    """Finds sharded modules that TorchRec does not pipeline: a reason and a remedy by module name.

    The input of ``pipelined`` modules is known ahead; ``called`` says why that of other modules is
    not, by name. TorchRec's tracer saw no call of the rest. The model is inside its wrapper.
    """
    known = {id(module) for module in pipelined}
    sharded = [(n, m) for n, m in outside_of_sharded(model) if isinstance(m, ShardedModule)]
    names = [name for name, module in sharded if id(module) not in known]
    cure = "give the module features as they are in the batch"
    return {
        name: (f"{_MADE_INSIDE}: {called[name]}", cure) if name in called else _NOT_SEEN
        for name in names
    }


def has_stock_means(modules: Iterable[nn.Module]) -> bool:
    """Whether TorchRec divides any outputs after the exchange, which fails without samples."""
    inside = [inner for module in modules for inner in module.modules()]
    return any(getattr(inner, "_has_mean_pooling_callback", False) for inner in inside)


def as_scheduled(module: ShardedModule) -> ScheduledModule | None:
    """Returns a module in the form that schedules drive; ``None`` = some table is not hot/cold."""
    tables = _tables_of(module)
    if not isinstance(tables, HotColdModule) or not tables.is_all_hot_cold:
        return None
    return tables if tables is module else ProcessedModule(module, tables)


def module_of(module: ScheduledModule) -> ShardedModule:
    """Returns TorchRec's sharded module behind a module that a schedule drives."""
    return module._module if isinstance(module, ProcessedModule) else module


def _tables_of(module: ShardedModule) -> ShardedModule:
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


def why_whole_batches(model: nn.Module, unpipelined: Mapping[str, tuple[str, str]]) -> str | None:
    """Reason why batches of the model inside its wrapper cannot be cut, with advice, or ``None``.
    ``unpipelined`` is the result of :func:`unpipelined_modules`."""
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
        reasons = "; ".join(f"{name}: {reason}" for name, (reason, _) in unpipelined.items())
        cures = dict.fromkeys(cure for _, cure in unpipelined.values())
        return (
            f"{reasons}. So it cannot be pipelined and would update its rows once per micro-batch; "
            f"use num_micro_batches=1, or {' and '.join(cures)}"
        )
    return None
