"""The sharders, which a user passes to TorchRec instead of TorchRec's own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.types import ParameterSharding, ShardingEnv, ShardingType
from torchrec.modules.embedding_configs import BaseEmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

from torchrec_picasso.errors import CompatError
from torchrec_picasso.placement import HotColdParams
from torchrec_picasso.sharding.sharded_ebc import ShardedHotColdEmbeddingBagCollection
from torchrec_picasso.sharding.sharded_ec import ShardedHotColdEmbeddingCollection
from torchrec_picasso.storage.exactness import why_not_its_rows

__all__ = ["HotColdEmbeddingBagCollectionSharder", "HotColdEmbeddingCollectionSharder"]


class HotColdEmbeddingBagCollectionSharder(EmbeddingBagCollectionSharder):
    """Shards EmbeddingBagCollections; drop-in for TorchRec's ``EmbeddingBagCollectionSharder``.

    The parent class shards tables without :class:`HotColdParams` in the plan.

    Args:
        fused_params: Passed on to the parent class.
        qcomm_codecs_registry: Passed on to the parent class.
        sharded_module_order_overwrite: Passed on to the parent class.
    """

    supports_hot_cold = True
    """For the planner: tables of this sharder's modules may be hot/cold."""

    def shard(
        self,
        module: EmbeddingBagCollection,
        params: dict[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> ShardedHotColdEmbeddingBagCollection:
        """Shards one module by the plan. Collective.

        Raises:
            CompatError: If tables are hot/cold and another module shares them, the module is inside
                one that changes ids or rows, or a table's configuration does not allow it.
        """
        _refuse_parts(params, module_fqn)
        _refuse_flags(module.embedding_bag_configs(), params)
        _refuse_shared(module, params, module_fqn)
        return self.sharded_module_type(
            module=module,
            table_name_to_parameter_sharding=params,
            env=env,
            fused_params=self.fused_params,
            device=device,
            qcomm_codecs_registry=self.qcomm_codecs_registry,
            module_fqn=module_fqn,
            sharded_module_order_overwrite=self._sharded_module_order_overwrite,
        )

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """The parent's sharding types and row-wise, which the parent leaves out on CPU."""
        types = super().sharding_types(compute_device_type)
        row_wise = ShardingType.ROW_WISE.value
        return types if row_wise in types else [*types, row_wise]

    @property
    def sharded_module_type(self) -> type[ShardedHotColdEmbeddingBagCollection]:
        """The class of the sharded module."""
        return ShardedHotColdEmbeddingBagCollection


class HotColdEmbeddingCollectionSharder(EmbeddingCollectionSharder):
    """Shards EmbeddingCollections; drop-in for TorchRec's ``EmbeddingCollectionSharder``.

    The parent class shards tables without :class:`HotColdParams` in the plan. Hot/cold tables send
    each row once, on CPU too, for any value of ``use_index_dedup``.

    Args:
        fused_params: Passed on to the parent class.
        qcomm_codecs_registry: Passed on to the parent class.
        use_index_dedup: Passed on to the parent class, for stock tables; it has no CPU kernel.
    """

    supports_hot_cold = True
    """For the planner: tables of this sharder's modules may be hot/cold."""

    def shard(
        self,
        module: EmbeddingCollection,
        params: dict[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> ShardedHotColdEmbeddingCollection:
        """Shards one module by the plan. Collective.

        Raises:
            CompatError: If tables are hot/cold and another module shares them, the module is inside
                one that changes ids or rows, or a table's configuration does not allow it.
        """
        _refuse_parts(params, module_fqn)
        _refuse_flags(module.embedding_configs(), params)
        _refuse_shared(module, params, module_fqn)
        return self.sharded_module_type(
            module,
            params,
            env,
            self.fused_params,
            device,
            qcomm_codecs_registry=self.qcomm_codecs_registry,
            use_index_dedup=self._use_index_dedup,
            module_fqn=module_fqn,
        )

    @property
    def sharded_module_type(self) -> type[ShardedHotColdEmbeddingCollection]:
        """The class of the sharded module."""
        return ShardedHotColdEmbeddingCollection


def _refuse_parts(params: Mapping[str, ParameterSharding], module_fqn: str | None) -> None:
    """Refuses collections inside other sharded modules, which pass no module path."""
    hot_cold = [n for n, p in params.items() if isinstance(p.cache_params, HotColdParams)]
    if hot_cold and module_fqn is None:
        raise CompatError(
            f"hot/cold table {hot_cold[0]!r} is to be sharded without the name of its module, as "
            "inside TorchRec's managed collision, embedding pruning (ITEP) and PEC modules, which "
            "change ids or rows behind its replicas, and by torchrec.distributed.shard; use "
            "DistributedModelParallel or shard_modules on a collection of its own, or place the "
            "table without HotColdParams"
        )


def _refuse_flags(
    configs: Sequence[BaseEmbeddingConfig], params: Mapping[str, ParameterSharding]
) -> None:
    """Refuses tables whose configuration lets other code change their rows."""
    for config in configs:
        refusal = why_not_its_rows(config)
        if refusal is not None and isinstance(params[config.name].cache_params, HotColdParams):
            raise CompatError(
                f"hot/cold table {config.name!r}: {refusal.what}; {refusal.instead}, or place the "
                "table without HotColdParams"
            )


def _refuse_shared(
    module: nn.Module, params: Mapping[str, ParameterSharding], module_fqn: str | None
) -> None:
    """Refuses tables that two modules share: once sharded, each module would train its own copy."""
    for path, parameter in module.named_parameters():
        name = path.split(".")[-2]
        if name not in params:
            continue
        is_hot_cold = isinstance(params[name].cache_params, HotColdParams)
        # the first module that shards a parameter leaves its path on it
        other, was_hot_cold = vars(parameter).get("sharded_in", (module_fqn, False))
        if other != module_fqn and (is_hot_cold or was_hot_cold):
            raise CompatError(
                f"table {name!r} is in the modules {other} and {module_fqn}; a hot/cold table "
                "belongs to one module, else each would train a copy. Look up all its features in "
                "one module, or make it two tables"
            )
        vars(parameter)["sharded_in"] = (module_fqn, is_hot_cold)
