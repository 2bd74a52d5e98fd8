"""The sharder for pooled tables behind feature processors, and its sharded module."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torchrec.distributed.embedding_types import KJTList
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionContext
from torchrec.distributed.fp_embeddingbag import (
    FeatureProcessedEmbeddingBagCollectionSharder,
    ShardedFeatureProcessedEmbeddingBagCollection,
)
from torchrec.distributed.types import Awaitable, ParameterSharding, ShardingEnv
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_picasso._torchrec import QuantizedCommCodecs
from torchrec_picasso.rows.valid_features import valid_features
from torchrec_picasso.sharding.features import with_own_weights
from torchrec_picasso.sharding.sharder import HotColdEmbeddingBagCollectionSharder

__all__ = ["HotColdFeatureProcessedEmbeddingBagCollectionSharder"]


class _Processed(ShardedFeatureProcessedEmbeddingBagCollection):
    """TorchRec's module, except that positions are written into a copy of the features."""

    def input_dist(
        self, ctx: EmbeddingBagCollectionContext, features: KeyedJaggedTensor
    ) -> Awaitable[Awaitable[KJTList]]:
        return super().input_dist(ctx, features if self.is_pipelined else self._own(features))

    def preprocess_input(
        self, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[Sequence[Any], Mapping[str, Any]]:
        own = {name: self._own(value) for name, value in kwargs.items()}
        return super().preprocess_input(list(map(self._own, args)), own)

    def _own(self, value: Any) -> Any:
        """Copies the weights of features, which feature processors overwrite in place."""
        if not isinstance(value, KeyedJaggedTensor):
            return value
        # without hot/cold tables no header would report malformed features to the other ranks
        has_hot_cold = getattr(self._embedding_bag_collection, "has_hot_cold", False)
        return with_own_weights(valid_features(value) if has_hot_cold else value)


class HotColdFeatureProcessedEmbeddingBagCollectionSharder(
    FeatureProcessedEmbeddingBagCollectionSharder
):
    """Drop-in for TorchRec's ``FeatureProcessedEmbeddingBagCollectionSharder``.

    TorchRec's sharder also takes hot/cold tables, with an ``ebc_sharder`` of this package. But
    beside any table that is placed ``row_wise``, as hot/cold tables are, it writes positions into
    the batch's own features, and an unweighted module with the same features takes the positions
    for weights. With this sharder each module has its own copy of the features.

    Args:
        ebc_sharder: Shards the tables; ``None`` = :class:`HotColdEmbeddingBagCollectionSharder`.
        qcomm_codecs_registry: Passed on to the parent class.
    """

    supports_hot_cold = True
    """For the planner: tables of this sharder's modules may be hot/cold. They travel as rows, and
    only if constraints name ``row_wise``, which TorchRec does not offer there by default."""

    def __init__(
        self,
        ebc_sharder: HotColdEmbeddingBagCollectionSharder | None = None,
        qcomm_codecs_registry: dict[str, QuantizedCommCodecs] | None = None,
    ) -> None:
        ebc_sharder = ebc_sharder or HotColdEmbeddingBagCollectionSharder(
            qcomm_codecs_registry=qcomm_codecs_registry
        )
        super().__init__(ebc_sharder, qcomm_codecs_registry)

    def shard(
        self,
        module: FeatureProcessedEmbeddingBagCollection,
        params: dict[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> ShardedFeatureProcessedEmbeddingBagCollection:
        """Shards one module by the plan. Collective.

        Args:
            module: The collection with its feature processors.
            params: The plan, by table.
            env: Ranks to shard over.
            device: Device of the tables; ``None`` = CUDA.
            module_fqn: Path of the module in the model.
        """
        return _Processed(
            module,
            params,
            ebc_sharder=self._ebc_sharder,
            env=env,
            device=device or torch.device("cuda"),
            module_fqn=module_fqn,
        )
