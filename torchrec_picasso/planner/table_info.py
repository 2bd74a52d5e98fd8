"""Converts TorchRec's options of a table to the input of the decision."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch import nn
from torchrec.distributed.planner.types import ShardingOption, Topology
from torchrec.distributed.types import ShardingType
from torchrec.modules.embedding_configs import BaseEmbeddingConfig, EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

from torchrec_picasso._torchrec import optimizer_multiplier
from torchrec_picasso.cost.curves import CommCurves
from torchrec_picasso.cost.stock import STOCK_TYPES
from torchrec_picasso.cost.table_work import TableLoad
from torchrec_picasso.frequency import FrequencyStats
from torchrec_picasso.frequency.collect import table_configs
from torchrec_picasso.planner.choice import TableInfo
from torchrec_picasso.planner.hot_options import optimizer_class
from torchrec_picasso.planner.refusals import TableRefusals, required_form, why_no_bags

__all__ = ["assumed_curves", "config_of", "dense_bytes_of", "table_info", "stock_types_of"]

_BYTES_PER_MS_TO_GB_PER_S = 1e-6


def table_info(
    options: Sequence[ShardingOption],
    stats: FrequencyStats | None,
    *,
    batch_size: int,
    refusals: TableRefusals,
    constrained_types: Collection[str] | None,
) -> TableInfo:
    """Builds the information about one table whose sharder supports hot/cold tables."""
    first, config = options[0], config_of(options[0])
    num_features = len(config.feature_names)
    # without statistics: pooling factors of the constraints, 1 by default, for each feature
    lookups_per_sample = sum(first.input_lengths) / max(1, len(first.input_lengths)) * num_features
    spectrum = None
    if stats is not None:
        spectrum = stats.table(config.name).spectrum
        if stats.num_samples:
            lookups_per_sample = spectrum.num_lookups / stats.num_samples
    # stock sequence sharding returns one row per lookup, like a bag of one lookup
    is_pooled = isinstance(config, EmbeddingBagConfig)
    load = TableLoad(
        name=config.name,
        num_embeddings=config.num_embeddings,
        dim=config.embedding_dim,
        lookups=batch_size * lookups_per_sample,
        bags=batch_size * (num_features if is_pooled else lookups_per_sample),
        num_features=num_features,
        spectrum=spectrum,
        element_bytes=first.tensor.element_size(),
        optimizer_share=optimizer_multiplier(optimizer_class(first), first.tensor.shape),
    )
    is_only_hot_cold = required_form(options) is not None or refusals.is_only_hot_cold
    return TableInfo(
        load=load,
        not_hot_cold=refusals.hot_cold.what if refusals.hot_cold else None,
        no_hot_rows=refusals.hot_rows.what if refusals.hot_rows else None,
        no_bags=why_no_bags(options),
        required_form=required_form(options),
        stock_types=() if is_only_hot_cold else stock_types_of(options, constrained_types),
        module=first.path,
    )


def stock_types_of(
    options: Sequence[ShardingOption], constrained_types: Collection[str] | None
) -> tuple[str, ...]:
    """Returns the stock sharding types that the planner may choose.

    Only if the user's constraints name types: column-wise sharding of a row-wise optimizer, which
    has a state per column shard and so trains another model, and data-parallel sharding, which
    needs an optimizer in the dense part. Only without other types: row-wise sharding that leaves a
    rank without rows, because FBGEMM assumes that tables without rows are in GPU memory.
    """
    offered = {option.sharding_type for option in options}
    found = [kind for kind in STOCK_TYPES if kind in offered]
    row_wise = (o for o in options if o.sharding_type == ShardingType.ROW_WISE.value)
    if len(found) > 1 and any(shard.size[0] == 0 for o in row_wise for shard in o.shards):
        found.remove(ShardingType.ROW_WISE.value)
    if constrained_types:
        return tuple(found)
    optimizer = optimizer_class(options[0])
    excluded = {ShardingType.DATA_PARALLEL.value}
    if optimizer is not None and "rowwise" in optimizer.__name__.lower():
        excluded.add(ShardingType.COLUMN_WISE.value)
    return tuple(kind for kind in found if kind not in excluded)


def dense_bytes_of(model: nn.Module) -> int:
    """Computes the bytes of the trained parameters outside embedding modules."""
    # compared by identity, because two modules may share a parameter
    tables = {
        id(parameter)
        for module in model.modules()
        if isinstance(module, (EmbeddingBagCollection, EmbeddingCollection))
        for parameter in module.parameters()
    }
    dense = [p for p in model.parameters() if p.requires_grad and id(p) not in tables]
    return sum(parameter.numel() * parameter.element_size() for parameter in dense)


def assumed_curves(topology: Topology) -> CommCurves:
    """Returns curves with the bandwidth of a topology, as a replacement for measured curves."""
    on_one_host = topology.world_size <= topology.local_world_size
    bytes_per_ms = topology.intra_host_bw if on_one_host else topology.inter_host_bw
    return CommCurves.assumed(
        topology.world_size,
        gbytes_per_s=bytes_per_ms * _BYTES_PER_MS_TO_GB_PER_S,
        device=topology.compute_device,
        ranks_per_host=topology.local_world_size,
    )


def config_of(option: ShardingOption) -> BaseEmbeddingConfig:
    """Returns the configuration of an option's table, whose module may wrap a collection."""
    configs = (config for _, config in table_configs(option.module[1]))
    return next(config for config in configs if config.name == option.name)
