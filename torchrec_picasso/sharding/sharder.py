"""The sharders, which a user passes to TorchRec instead of TorchRec's own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embedding_types import BaseEmbeddingSharder, KJTList
from torchrec.distributed.embeddingbag import (
    EmbeddingBagCollectionContext,
    EmbeddingBagCollectionSharder,
)
from torchrec.distributed.fp_embeddingbag import (
    FeatureProcessedEmbeddingBagCollectionSharder,
    ShardedFeatureProcessedEmbeddingBagCollection,
)
from torchrec.distributed.types import Awaitable, ParameterSharding, ShardingEnv, ShardingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_picasso._torchrec import QuantizedCommCodecs
from torchrec_picasso.errors import CompatError
from torchrec_picasso.placement import HotColdParams
from torchrec_picasso.rows.valid_features import valid_features, with_own_weights
from torchrec_picasso.sharding.sharded_ebc import ShardedHotColdEmbeddingBagCollection
from torchrec_picasso.sharding.sharded_ec import ShardedHotColdEmbeddingCollection
from torchrec_picasso.storage.exactness import why_not_its_rows


class _HotColdSharder(BaseEmbeddingSharder):
    """Shards a collection of tables into this package's module; beside TorchRec's sharder."""

    supports_hot_cold = True
    """For the planner: tables of this sharder's modules may be hot/cold."""
    sharded_module_type: Any
    """The class of the sharded module."""

    def shard(
        self,
        module: EmbeddingBagCollection | EmbeddingCollection,
        params: dict[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> Any:
        """Shards one module by the plan. Collective.

        Raises CompatError if tables are hot/cold and another module shares them, the module is
        inside one that changes ids or rows, or a table's configuration does not allow it.
        """
        _refuse(module, params, module_fqn)
        codecs, own = self.qcomm_codecs_registry, self._own_arguments()
        given = module, params, env, self.fused_params, device
        return self.sharded_module_type(
            *given, qcomm_codecs_registry=codecs, module_fqn=module_fqn, **own
        )

    def _own_arguments(self) -> dict[str, Any]:
        """Arguments that only one kind of module takes."""
        raise NotImplementedError


class HotColdEmbeddingBagCollectionSharder(_HotColdSharder, EmbeddingBagCollectionSharder):
    """Shards EmbeddingBagCollections; drop-in for TorchRec's ``EmbeddingBagCollectionSharder``.

    The parent class, whose arguments it has, shards tables without :class:`HotColdParams` in the
    plan.
    """

    sharded_module_type = ShardedHotColdEmbeddingBagCollection

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """The parent's sharding types and row-wise, which the parent leaves out on CPU."""
        types = super().sharding_types(compute_device_type)
        row_wise = ShardingType.ROW_WISE.value
        return types if row_wise in types else [*types, row_wise]

    def _own_arguments(self) -> dict[str, Any]:
        return {"sharded_module_order_overwrite": self._sharded_module_order_overwrite}


class HotColdEmbeddingCollectionSharder(_HotColdSharder, EmbeddingCollectionSharder):
    """Shards EmbeddingCollections; drop-in for TorchRec's ``EmbeddingCollectionSharder``.

    The parent class, whose arguments it has, shards tables without :class:`HotColdParams` in the
    plan. Hot/cold tables send each row once, on CPU too, for any value of ``use_index_dedup``: that
    is for stock tables, and has no CPU kernel.
    """

    sharded_module_type = ShardedHotColdEmbeddingCollection

    def _own_arguments(self) -> dict[str, Any]:
        return {"use_index_dedup": self._use_index_dedup}


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
        qcomm_codecs_registry: Wire precisions, as for the parent class.
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
        """Shards one module by the plan; ``device`` is CUDA by default. Collective."""
        place = {"device": device or torch.device("cuda"), "module_fqn": module_fqn}
        return _Processed(module, params, ebc_sharder=self._ebc_sharder, env=env, **place)


def _refuse(
    module: EmbeddingBagCollection | EmbeddingCollection,
    params: Mapping[str, ParameterSharding],
    module_fqn: str | None,
) -> None:
    """Raises CompatError for hot/cold tables that other code or another module may change."""
    hot_cold = [n for n, p in params.items() if isinstance(p.cache_params, HotColdParams)]
    # collections inside other sharded modules get no module path
    if hot_cold and module_fqn is None:
        raise CompatError(
            f"hot/cold table {hot_cold[0]!r} is to be sharded without the name of its module, as "
            "inside TorchRec's managed collision, embedding pruning (ITEP) and PEC modules, which "
            "change ids or rows behind its replicas, and by torchrec.distributed.shard; use "
            "DistributedModelParallel or shard_modules on a collection of its own, or place the "
            "table without HotColdParams"
        )
    is_pooled = isinstance(module, EmbeddingBagCollection)
    for config in module.embedding_bag_configs() if is_pooled else module.embedding_configs():
        refusal = why_not_its_rows(config)
        if refusal is not None and config.name in hot_cold:
            raise CompatError(
                f"hot/cold table {config.name!r}: {refusal.what}; {refusal.instead}, or place the "
                "table without HotColdParams"
            )
    # once sharded, each of two modules with the same table would train its own copy
    for path, parameter in module.named_parameters():
        name = path.split(".")[-2]
        if name not in params:
            continue
        # the first module that shards a parameter leaves its path on it
        other, was_hot_cold = vars(parameter).get("sharded_in", (module_fqn, False))
        if other != module_fqn and (name in hot_cold or was_hot_cold):
            raise CompatError(
                f"table {name!r} is in the modules {other} and {module_fqn}; a hot/cold table "
                "belongs to one module, else each would train a copy. Look up all its features in "
                "one module, or make it two tables"
            )
        vars(parameter)["sharded_in"] = (module_fqn, name in hot_cold)
