"""From TorchRec's options to the plain facts that a decision is made from."""

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
from torchrec_picasso.decision.decision import TableFacts
from torchrec_picasso.errors import PlanError
from torchrec_picasso.frequency import FrequencyStats
from torchrec_picasso.placement import HotColdParams
from torchrec_picasso.planner.refusals import TableRefusals, asked_form, why_no_bags

__all__ = [
    "assumed_curves",
    "config_of",
    "dense_bytes_of",
    "facts_of_options",
    "stock_types_of",
]

_BYTES_PER_MS_TO_GB_PER_S = 1e-6
_NOT_UNASKED = ShardingType.DATA_PARALLEL.value  # it takes its optimizer from the dense side


def facts_of_options(
    options: Sequence[ShardingOption],
    stats: FrequencyStats | None,
    *,
    batch_size: int,
    refusals: TableRefusals,
    asked_types: Collection[str] | None,
) -> TableFacts:
    """Facts of one table in the planner, whose sharder can place hot rows.

    Args:
        options: All of TorchRec's options of the table.
        stats: Lookup counts, or ``None``.
        batch_size: Samples per rank and step.
        refusals: What the sharder would refuse.
        asked_types: Sharding types that the user's constraints name, or ``None``.
    """
    first = options[0]
    config = config_of(first)
    # without statistics: the pooling factors of the constraints, 1 by default, for each feature
    per_feature = sum(first.input_lengths) / max(1, len(first.input_lengths))
    is_fixed = isinstance(first.cache_params, HotColdParams)
    return TableFacts(
        load=_load(
            config,
            stats,
            batch_size,
            lookups_per_sample=per_feature * len(config.feature_names),
            element_bytes=first.tensor.element_size(),
            optimizer_share=optimizer_multiplier(_optimizer_class(first), first.tensor.shape),
        ),
        not_hot_cold=refusals.hot_cold.what if refusals.hot_cold else None,
        no_hot_rows=refusals.hot_rows.what if refusals.hot_rows else None,
        no_bags=why_no_bags(options),
        asked_form=asked_form(options),
        stock_types=()
        if is_fixed or refusals.is_only_hot_cold
        else stock_types_of(options, asked_types),
        module=first.path,
    )


def stock_types_of(
    options: Sequence[ShardingOption], asked_types: Collection[str] | None
) -> tuple[str, ...]:
    """Stock types that the planner may take unasked, and those that the user's constraints name.

    Column-wise sharding keeps a row-wise optimizer's state per column shard, which trains another
    model; data-parallel tables need an optimizer of their own. Both are taken when asked for. A
    table that leaves a rank without rows is not cut by rows where it can be whole: FBGEMM takes
    tables without rows for tables in a GPU's memory.
    """
    found = [t for t in STOCK_TYPES if any(o.sharding_type == t for o in options)]
    if len(found) > 1 and _leaves_a_rank_without_rows(options):
        found.remove(ShardingType.ROW_WISE.value)
    if asked_types:
        return tuple(found)
    optimizer = _optimizer_class(options[0])
    row_wise_state = optimizer is not None and "rowwise" in optimizer.__name__.lower()
    return tuple(
        t
        for t in found
        if t != _NOT_UNASKED and not (row_wise_state and t == ShardingType.COLUMN_WISE.value)
    )


def _leaves_a_rank_without_rows(options: Sequence[ShardingOption]) -> bool:
    return any(
        option.sharding_type == ShardingType.ROW_WISE.value
        and any(shard.size[0] == 0 for shard in option.shards)
        for option in options
    )


def dense_bytes_of(model: nn.Module) -> int:
    """Bytes of the parameters outside embedding modules: their gradients are summed over ranks."""
    tables = {
        id(parameter)
        for module in model.modules()
        if isinstance(module, (EmbeddingBagCollection, EmbeddingCollection))
        for parameter in module.parameters()
    }
    dense = [p for p in model.parameters() if p.requires_grad and id(p) not in tables]
    return sum(parameter.numel() * parameter.element_size() for parameter in dense)


def assumed_curves(topology: Topology) -> CommCurves:
    """Curves from the bandwidths of a topology, for when nothing was measured."""
    on_one_host = topology.world_size <= topology.local_world_size
    bytes_per_ms = topology.intra_host_bw if on_one_host else topology.inter_host_bw
    return CommCurves.assumed(
        topology.world_size,
        gbytes_per_s=bytes_per_ms * _BYTES_PER_MS_TO_GB_PER_S,
        device=topology.compute_device,
        ranks_per_host=topology.local_world_size,
    )


def _load(
    config: BaseEmbeddingConfig,
    stats: FrequencyStats | None,
    batch_size: int,
    *,
    lookups_per_sample: float,
    element_bytes: int,
    optimizer_share: float,
) -> TableLoad:
    spectrum = None
    if stats is not None:
        if config.name not in stats.tables:
            raise PlanError(
                f"the statistics have no table {config.name!r}; they know {list(stats.tables)}. "
                "Collect statistics for this model"
            )
        counts = stats.tables[config.name]
        spectrum = counts.spectrum()
        if stats.num_samples:
            lookups_per_sample = spectrum.num_lookups / stats.num_samples
    # of sequences every lookup is sent back, as a bag of its own
    outputs_per_sample = lookups_per_sample
    if isinstance(config, EmbeddingBagConfig):
        outputs_per_sample = float(len(config.feature_names))
    return TableLoad(
        name=config.name,
        num_embeddings=config.num_embeddings,
        dim=config.embedding_dim,
        lookups=batch_size * lookups_per_sample,
        bags=batch_size * outputs_per_sample,
        num_features=len(config.feature_names),
        spectrum=spectrum,
        element_bytes=element_bytes,
        optimizer_share=optimizer_share,
    )


def config_of(option: ShardingOption) -> BaseEmbeddingConfig:
    """Configuration of an option's table."""
    (config,) = (c for c in _configs(option.module[1]) if c.name == option.name)
    return config


def _configs(module: nn.Module) -> Sequence[BaseEmbeddingConfig]:
    """Table configurations of an unsharded embedding module, wrappers included."""
    for inner in module.modules():
        if isinstance(inner, EmbeddingBagCollection):
            return inner.embedding_bag_configs()
        if isinstance(inner, EmbeddingCollection):
            return inner.embedding_configs()
    return ()


def _optimizer_class(option: ShardingOption) -> type | None:
    found: type | None = getattr(option.tensor, "_optimizer_classes", [None])[0]
    return found
