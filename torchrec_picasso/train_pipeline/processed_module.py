"""A FeatureProcessedEmbeddingBagCollection over hot/cold tables, driven by a schedule.

Feature processors compute the per-sample weights of the ids and never change the ids, so a schedule
fetches rows as for any other module. The processors run once per batch, on the whole batch; their
result does not depend on micro-batches. Micro-batches use their parts of the weights and add to the
weights' gradient; the processors' own backward runs once, with the sums, before the gradients of
their parameters are reduced.

TorchRec's own path writes positions into the batch's features, where the next module with the same
features would take them for weights. Here they are written into a copy.

Shape letter: N lookups.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torchrec.distributed.embedding_types import KJTList
from torchrec.distributed.fp_embeddingbag import ShardedFeatureProcessedEmbeddingBagCollection
from torchrec.distributed.types import LazyAwaitable, ShardedModule
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_picasso.rows.batch_rows import BatchRows, PartRows
from torchrec_picasso.rows.group import RowGroup
from torchrec_picasso.rows.valid_features import with_own_weights
from torchrec_picasso.sharding.sharded_module import HotColdModule

__all__ = ["ProcessedModule", "module_of"]


class ProcessedModule:
    """A module with feature processors and hot/cold ``tables`` alone, as a schedule needs it."""

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
        """Copies the features that the module looks up, in the order of its tables.

        The copy has weights, which the processors may overwrite. Lengths must be valid.
        """
        (own, *_), _ = self._module.preprocess_input([with_own_weights(features)], {})
        return self._tables.features_of(own)

    def output(self, rows: PartRows) -> LazyAwaitable[Any]:
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
        given_N = rows.layout.weights_N
        if len(by_module) == 1 or given_N is None:
            return weights_N
        # weights of the group are concatenated by module; this module's span is replaced
        start = sum(features.values().numel() for features in by_module[:number])
        end = start + weights_N.numel()
        return torch.cat([given_N[:start], weights_N, given_N[end:]])


def module_of(module: ShardedModule | ProcessedModule) -> ShardedModule:
    """Returns TorchRec's sharded module behind a module that a schedule drives."""
    return module._module if isinstance(module, ProcessedModule) else module
