"""Bags behind feature processors, with hot/cold tables: the sharder and what it makes."""

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
from torchrec_picasso.rows.sound_features import sound_features
from torchrec_picasso.sharding.features import with_own_weights
from torchrec_picasso.sharding.sharder import HotColdEmbeddingBagCollectionSharder

__all__ = ["HotColdFeatureProcessedEmbeddingBagCollectionSharder"]


class _Processed(ShardedFeatureProcessedEmbeddingBagCollection):
    """TorchRec's module, which writes positions into a copy of the batch's features."""

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
        if not isinstance(value, KeyedJaggedTensor):
            return value
        # where no table is hot/cold, nobody would tell the other ranks
        is_told = getattr(self._embedding_bag_collection, "has_hot_cold", False)
        return with_own_weights(sound_features(value) if is_told else value)


class HotColdFeatureProcessedEmbeddingBagCollectionSharder(
    FeatureProcessedEmbeddingBagCollectionSharder
):
    """Drop-in for TorchRec's ``FeatureProcessedEmbeddingBagCollectionSharder``.

    TorchRec's takes hot/cold tables as well, with an ``ebc_sharder`` of ours. But beside any table
    that is placed ``row_wise``, as these are, it writes positions into the batch's own features,
    and a module without weights that is given the same features takes them for weights. With this
    sharder each has features of its own.

    Args:
        ebc_sharder: Of the tables; ``None`` = :class:`HotColdEmbeddingBagCollectionSharder`.
        qcomm_codecs_registry: As the parent's.
    """

    supports_hot_cold = True
    """Tells the planner that tables of this sharder's modules may be hot/cold: as rows, and where
    constraints name ``row_wise``, which TorchRec does not offer there unasked."""

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
        """Shards one module by the plan. Collective."""
        return _Processed(
            module,
            params,
            ebc_sharder=self._ebc_sharder,
            env=env,
            device=device or torch.device("cuda"),
            module_fqn=module_fqn,
        )
