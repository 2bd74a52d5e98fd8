"""A sharded EmbeddingBagCollection in which marked tables are hot/cold and the others stock."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.distributed.types import ParameterSharding, ShardingEnv, ShardingType
from torchrec.modules.embedding_configs import PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollectionInterface
from torchrec.sparse.tensor_dict import maybe_td_to_kjt

from torchrec_picasso._torchrec import (
    EmbeddingShardingContext,
    EmbeddingShardingInfo,
    QuantizedCommCodecs,
)
from torchrec_picasso.errors import CompatError, PlanError
from torchrec_picasso.placement import HotColdParams
from torchrec_picasso.rows.batch_ids import BatchIds
from torchrec_picasso.rows.batch_rows import PartRows
from torchrec_picasso.rows.group import RowGroup
from torchrec_picasso.rows.request import RowRequest
from torchrec_picasso.sharding.pooled_sharding import HotColdPooledEmbeddingSharding

__all__ = ["ShardedHotColdEmbeddingBagCollection"]

_GROUP = "hot_cold"
_POOLED_BY_PARTS = (ShardingType.ROW_WISE.value, ShardingType.TABLE_ROW_WISE.value)
"""Placements whose means TorchRec divides after the exchange."""


class ShardedHotColdEmbeddingBagCollection(ShardedEmbeddingBagCollection):
    """TorchRec's sharded module with one more way to shard a table.

    Tables whose plan carries :class:`HotColdParams` form one group with one packed unique
    exchange; every other table takes TorchRec's own path. Names, state dict and fused optimizer
    are TorchRec's.
    """

    _has_uninitialized_input_dist: bool

    def __init__(self, module: EmbeddingBagCollectionInterface, *args: Any, **kwargs: Any) -> None:
        super().__init__(module, *args, **kwargs)
        # TorchRec divides the outputs of mean-pooled row-wise tables after the exchange, and with
        # them every output it does not know as summed. Hot/cold tables average while they pool;
        # stock tables that are pooled at home are no less done.
        self._pooling_type_to_rs_features.clear()
        for config in module.embedding_bag_configs():
            sharding = self.module_sharding_plan[config.name]
            divided_later = (
                config.pooling == PoolingType.MEAN
                and sharding.sharding_type in _POOLED_BY_PARTS
                and not isinstance(sharding.cache_params, HotColdParams)
            )
            pooling = PoolingType.MEAN if divided_later else PoolingType.SUM
            self._pooling_type_to_rs_features[pooling.value] += config.feature_names
        self._has_mean_pooling_callback = (
            PoolingType.MEAN.value in self._pooling_type_to_rs_features
        )

    @classmethod
    def create_grouped_sharding_infos(
        cls,
        module: EmbeddingBagCollectionInterface,
        table_name_to_parameter_sharding: dict[str, ParameterSharding],
        prefix: str,
        fused_params: dict[str, Any] | None,
        suffix: str | None = "weight",
    ) -> dict[str, list[EmbeddingShardingInfo]]:
        """Groups tables by sharding type, marked ones in a group of their own."""
        stock_groups = super().create_grouped_sharding_infos(
            module, table_name_to_parameter_sharding, prefix, fused_params, suffix
        )
        groups: dict[str, list[EmbeddingShardingInfo]] = {}
        for sharding_type, infos in stock_groups.items():
            for info in infos:
                name = _GROUP if _is_hot_cold(info) else sharding_type
                groups.setdefault(name, []).append(info)
        return groups

    @classmethod
    def create_embedding_bag_sharding(
        cls,
        sharding_infos: list[EmbeddingShardingInfo],
        env: ShardingEnv,
        device: torch.device | None = None,
        permute_embeddings: bool = False,
        qcomm_codecs_registry: dict[str, QuantizedCommCodecs] | None = None,
    ) -> Any:
        """Makes the sharding of one group."""
        if not _is_hot_cold(sharding_infos[0]):
            return super().create_embedding_bag_sharding(
                sharding_infos, env, device, permute_embeddings, qcomm_codecs_registry
            )
        return HotColdPooledEmbeddingSharding(sharding_infos, env, device, qcomm_codecs_registry)

    @property
    def can_interleave(self) -> bool:
        """Whether all tables are hot/cold, so that a schedule may drive the whole exchange."""
        return list(self.sharding_type_to_sharding_infos) == [_GROUP]

    @property
    def group(self) -> RowGroup:
        """The tables of a module that can be interleaved."""
        (sharding,) = self._embedding_shardings
        group: RowGroup = sharding.group
        return group

    @property
    def num_waves(self) -> int:
        """Waves that its packs travel in where a schedule staggers them."""
        return len(self.group.plan.waves)

    def request(self, sizes_K: Sequence[int], features: Any, has_data: bool = True) -> RowRequest:
        """Starts asking for the rows of a batch whose exchange a schedule drives. Collective.

        Args:
            sizes_K: Samples of each part.
            features: As for TorchRec's ``input_dist``.
            has_data: Whether the batch comes from this rank's data.
        """
        features = maybe_td_to_kjt(features, None)
        if self._has_uninitialized_input_dist:
            self._create_input_dist(features.keys())
            self._has_uninitialized_input_dist = False
        with torch.no_grad():
            if self._has_features_permute:
                order_tensor = self.get_buffer("_features_order_tensor")
                features = features.permute(self._features_order, order_tensor)
            batch = BatchIds.read(features, self.group, sizes_K, has_data)
            return RowRequest(self.group, batch)

    def pool(self, rows: PartRows) -> Any:
        """The module's output for one part of a batch whose exchange a schedule drives."""
        context = self.create_context()
        context.sharding_contexts.append(EmbeddingShardingContext())
        return self.compute_and_output_dist(context, [rows])

    def update_shards(self, *args: Any, **kwargs: Any) -> None:
        """Refuses TorchRec's dynamic resharding when a table is hot/cold."""
        if _GROUP in self.sharding_type_to_sharding_infos:
            raise CompatError(
                "DistributedModelParallel.reshard does not support hot/cold tables; save a "
                "checkpoint and load it under the new plan"
            )
        super().update_shards(*args, **kwargs)


def _is_hot_cold(info: EmbeddingShardingInfo) -> bool:
    sharding = info.param_sharding
    if not isinstance(sharding.cache_params, HotColdParams):
        return False
    if sharding.sharding_type != ShardingType.ROW_WISE.value:
        raise PlanError(
            f"table {info.embedding_config.name!r} carries HotColdParams but is placed "
            f"{sharding.sharding_type!r}; hot/cold tables are placed 'row_wise'"
        )
    return True
