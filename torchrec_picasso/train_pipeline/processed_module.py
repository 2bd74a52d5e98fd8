"""A FeatureProcessedEmbeddingBagCollection over hot/cold tables, driven by a schedule.

Feature processors make the per-sample weights of the ids and never change the ids, so rows are
fetched by schedule as for any other module. The processors run once per batch, on the whole of it:
what they make is theirs whatever a batch is cut into. Micro-batches take their parts of the weights
and give gradients to them; the processors' own backward runs once, with the sums, before the
gradients of their parameters are reduced.

TorchRec's own path writes positions into the batch's features, where the next module that shares
them would take them for weights. Here they are written into a copy.

Shape letter: N lookups.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torchrec.distributed.embedding_types import KJTList
from torchrec.distributed.fp_embeddingbag import ShardedFeatureProcessedEmbeddingBagCollection
from torchrec.distributed.types import LazyAwaitable, ShardedModule
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_picasso.rows.batch_rows import BatchRows, PartRows
from torchrec_picasso.rows.group import RowGroup
from torchrec_picasso.sharding.features import with_own_weights
from torchrec_picasso.sharding.sharded_module import HotColdModule

__all__ = ["ProcessedModule", "module_of"]


class ProcessedModule:
    """What a schedule needs of such a module.

    Args:
        module: TorchRec's sharded module.
        tables: Its hot/cold tables, all that it has.
    """

    def __init__(
        self, module: ShardedFeatureProcessedEmbeddingBagCollection, tables: HotColdModule
    ) -> None:
        self._module = module
        self._tables = tables

    @property
    def forward(self) -> Any:
        """What stands in for the module's forward."""
        return self._module.forward

    @property
    def group(self) -> RowGroup:
        """The tables."""
        return self._tables.group

    def preprocess_input(
        self, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[Sequence[Any], Mapping[str, Any]]:
        """The input as it is: what TorchRec writes into it belongs to this module alone."""
        return args, kwargs

    def features_of(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """What the module looks up, in the order of its tables, ready for its processors.

        Args:
            features: As the batch has them, with lengths that fit.
        """
        (own, *_), _ = self._module.preprocess_input([with_own_weights(features)], {})
        return self._tables.features_of(own)

    def output(self, rows: PartRows) -> LazyAwaitable[Any]:
        """The module's output for one part of a batch."""
        return self._tables.output(rows)

    def weights(self, rows: BatchRows, number: int) -> Tensor:
        """Runs the processors on a whole batch.

        Args:
            rows: Of the batch.
            number: Which module of its group this one is.

        Returns:
            The weights of all lookups of the group ``(N,)``, with the graph of this module's; those
            of other modules are as the batch has them.
        """
        features_of = rows.layout.features_of
        features, apply = features_of[number], self._module.apply_feature_processors_to_kjt_list
        # KeyedJaggedTensor.to_dict raises for a batch of no samples, which has no weights to make
        (made,) = apply(KJTList([features])) if features.lengths().numel() else (features,)
        weights_N = made.weights()
        # as in TorchRec, every parameter has a gradient, whatever ids the batch has
        parameters = [p.flatten() for p in self._module._feature_processors.parameters()]
        if parameters:
            weights_N = weights_N + 0.0 * torch.cat(parameters).sum()
        given_N = rows.layout.weights_N
        if len(features_of) == 1 or given_N is None:
            return weights_N
        start = sum(features.values().numel() for features in features_of[:number])
        end = start + weights_N.numel()
        return torch.cat([given_N[:start], weights_N, given_N[end:]])


def module_of(module: ShardedModule | ProcessedModule) -> ShardedModule:
    """The module of TorchRec's that a schedule drives."""
    return module._module if isinstance(module, ProcessedModule) else module
