"""A sharded EmbeddingBagCollection in which marked tables are hot/cold and the others stock."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.distributed.types import LazyAwaitable, ShardingEnv, ShardingType
from torchrec.modules.embedding_configs import PoolingType
from torchrec.modules.embedding_modules import (
    EmbeddingBagCollectionInterface,
    get_embedding_names_by_table,
)
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from torchrec_picasso._torchrec import EmbeddingShardingInfo, QuantizedCommCodecs
from torchrec_picasso.errors import CompatError
from torchrec_picasso.placement import HotColdParams
from torchrec_picasso.sharding.output_dist import LaterByKey
from torchrec_picasso.sharding.sharded_module import GROUP, HotColdModule, is_hot_cold
from torchrec_picasso.sharding.table_sharding import HotColdEmbeddingSharding

_POOLED_BY_PARTS = (ShardingType.ROW_WISE.value, ShardingType.TABLE_ROW_WISE.value)
"""Placements for which TorchRec divides mean-pooled outputs after the exchange."""


class ShardedHotColdEmbeddingBagCollection(HotColdModule, ShardedEmbeddingBagCollection):
    """TorchRec's sharded module with one more way to shard a table, see :class:`.HotColdModule`."""

    def __init__(self, module: EmbeddingBagCollectionInterface, *args: Any, **kwargs: Any) -> None:
        super().__init__(module, *args, **kwargs)
        # TorchRec divides the outputs of mean-pooled row-wise tables after the exchange, and with
        # them every output that it does not know as summed, by feature and not by table.
        self._pooling_type_to_rs_features.clear()
        self._divided_later: set[str] = set()
        configs = module.embedding_bag_configs()
        for config, names in zip(configs, get_embedding_names_by_table(configs)):
            sharding = self.module_sharding_plan[config.name]
            if (
                config.pooling == PoolingType.MEAN
                and sharding.sharding_type in _POOLED_BY_PARTS
                and not isinstance(sharding.cache_params, HotColdParams)
            ):
                self._divided_later.update(names)
        self._has_mean_pooling_callback = bool(self._divided_later)

    def input_dist(self, ctx: Any, features: Any) -> Any:
        """Starts TorchRec's input dist; outputs that are pooled already are divided by 1."""
        started = super().input_dist(ctx, features)
        if self._has_mean_pooling_callback:
            divisors = ctx.divisor.split(self._embedding_dims, dim=1)
            for name, divisor in zip(self._embedding_names, divisors):
                if name not in self._divided_later:
                    divisor.fill_(1.0)
        return started

    def features_of(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """Selects features; TorchRec's own forward later finds the samples' rows as if it had."""
        inverse = features.inverse_indices_or_none()
        if self._has_uninitialized_input_dist and inverse and features.variable_stride_per_key():
            self._create_inverse_indices_permute_indices(inverse)
        return super().features_of(features)

    @classmethod
    def create_embedding_bag_sharding(
        cls,
        sharding_infos: list[EmbeddingShardingInfo],
        env: ShardingEnv,
        device: torch.device | None = None,
        permute_embeddings: bool = False,
        qcomm_codecs_registry: dict[str, QuantizedCommCodecs] | None = None,
    ) -> Any:
        """Makes the sharding of one group; the group of hot/cold tables gets this package's."""
        if not is_hot_cold(sharding_infos[0]):
            given = sharding_infos, env, device, permute_embeddings, qcomm_codecs_registry
            return super().create_embedding_bag_sharding(*given)
        return HotColdEmbeddingSharding(sharding_infos, env, device, qcomm_codecs_registry)

    def table_shardings(self) -> Sequence[Any]:
        """Returns TorchRec's shardings, one per sharding type."""
        return self._embedding_shardings

    def with_shardings(self, positions: Sequence[int]) -> ShardedHotColdEmbeddingBagCollection:
        """Copies the module with a subset of its shardings; both modules share the rows."""
        subset: ShardedHotColdEmbeddingBagCollection = self._copy_with(positions)
        subset._embedding_shardings = [self._embedding_shardings[p] for p in positions]
        subset._has_features_permute = True
        subset._embedding_names, subset._uncombined_embedding_names = [], []
        subset._embedding_dims, subset._uncombined_embedding_dims = [], []
        subset._create_output_dist()
        subset._kjt_key_indices = {}
        subset._has_mean_pooling_callback = not self._divided_later.isdisjoint(
            subset._embedding_names
        )
        return subset

    def join(self, outputs: Sequence[LazyAwaitable[KeyedTensor]]) -> LazyAwaitable[KeyedTensor]:
        """Joins the outputs of the modules that :meth:`split_by_kind` returns, in its order."""

        def joined() -> KeyedTensor:
            tensors, names = dict[str, Tensor](), list(self._embedding_names)
            for output in outputs:
                tensors |= output.wait().to_dict()
            return KeyedTensor.from_tensor_list(names, [tensors[name] for name in names])

        return LaterByKey(joined)

    def update_shards(self, *args: Any, **kwargs: Any) -> None:
        """Refuses TorchRec's dynamic resharding if a table is hot/cold."""
        if GROUP in self.sharding_type_to_sharding_infos:
            raise CompatError(
                "DistributedModelParallel.reshard does not support hot/cold tables; save a "
                "checkpoint and load it under the new plan"
            )
        super().update_shards(*args, **kwargs)
