"""Converts TorchRec's options of a table to the input of the decision.

The reasons why a table cannot be hot/cold come from the functions that the sharder calls
(:mod:`torchrec_picasso.storage.exactness`), with the settings that TorchRec will pass: the
sharder's ``fused_params``, overridden by the optimizer fused into the table, overridden by the
user's constraints.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from statistics import fmean
from typing import Any

from torch import nn
from torchrec.distributed.planner.types import ParameterConstraints, ShardingOption, Topology
from torchrec.distributed.types import ModuleSharder, ParameterSharding, ShardingType
from torchrec.distributed.utils import (
    add_params_from_parameter_sharding,
    convert_to_fbgemm_types,
    merge_fused_params,
    optimizer_type_to_emb_opt_type,
)
from torchrec.modules.embedding_configs import BaseEmbeddingConfig, DataType, EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

from torchrec_picasso._torchrec import optimizer_multiplier
from torchrec_picasso.cost.curves import CommCurves
from torchrec_picasso.cost.stock import STOCK_TYPES
from torchrec_picasso.cost.table_work import TableLoad
from torchrec_picasso.frequency import FrequencyStats
from torchrec_picasso.frequency.collect import table_configs
from torchrec_picasso.placement import FORMS, Form, HotColdParams
from torchrec_picasso.planner import by_host
from torchrec_picasso.planner.choice import TableInfo
from torchrec_picasso.planner.hot_options import offered_options, optimizer_class
from torchrec_picasso.storage.exactness import (
    Refusal,
    is_updated_only_here,
    why_no_hot_rows,
    why_no_memory,
    why_not_exact,
    why_not_its_rows,
)

NOT_OFFERED = Refusal(
    what="its sharder or its constraints do not allow hot/cold",
    instead="allow row_wise with kernel fused",
)
"""Refusal of a table without a hot/cold option."""
_USE_ROWS = "request form='rows'"
_NO_REPLICAS = Refusal(
    what="form='bags' was requested, and owner-pooled tables have no replicas", instead=_USE_ROWS
)
_BYTES_PER_MS_TO_GB_PER_S = 1e-6


def table_info(
    options: Sequence[ShardingOption],
    stats: FrequencyStats | None,
    *,
    batch_size: int,
    sharder: ModuleSharder[nn.Module],
    curves: CommCurves,
    topology: Topology,
    constraint: ParameterConstraints | None,
    no_launched_hosts: str | None,
) -> TableInfo:
    """Builds the information about one table whose sharder supports hot/cold tables."""
    first, device_type = options[0], topology.compute_device
    # the module may wrap a collection
    configs = (config for _, config in table_configs(first.module[1]))
    config = next(config for config in configs if config.name == first.name)
    params = _fused_params(first, getattr(sharder, "fused_params", None))
    required = first.cache_params if isinstance(first.cache_params, HotColdParams) else None
    form: Form = required.form if required is not None else "rows"
    # reasons why a form cannot be had; then why it is not chosen
    reasons: dict[Form, str | None] = {
        "bags": _why_no_bags(options),
        "node_rows": by_host.why_not(sharder, curves, topology),
    }
    not_hot_cold = _why_not_hot_cold(options, config, params, form, reasons.get(form), device_type)
    reasons["node_rows"] = reasons["node_rows"] or by_host.why_not_unasked(
        curves, topology, no_launched_hosts
    )
    if required is not None:
        reasons = dict.fromkeys(reasons, f"{form=} was requested")
    no_hot_rows, is_only_hot_cold = None, required is not None
    if not isinstance(params, Refusal):
        no_hot_rows = why_no_hot_rows(params, data_type=config.data_type)
        if not_hot_cold is None and is_updated_only_here(params, device_type=device_type):
            is_only_hot_cold = True
    constrained_types = constraint.sharding_types if constraint else None
    return TableInfo(
        load=_load(options, config, stats, batch_size, constraint),
        not_hot_cold=not_hot_cold,
        no_hot_rows=_NO_REPLICAS if FORMS[form].sends_bags else no_hot_rows,
        no_form={name: reason for name, reason in reasons.items() if reason},
        required=required,
        stock_types=() if is_only_hot_cold else _stock_types(options, constrained_types),
    )


def _load(
    options: Sequence[ShardingOption],
    config: BaseEmbeddingConfig,
    stats: FrequencyStats | None,
    batch_size: int,
    constraint: ParameterConstraints | None,
) -> TableLoad:
    """Returns a table's load of a rank's batch, by the constraints as in TorchRec's estimators;
    lookups by statistics per sample where there are any."""
    first, num_features = options[0], len(config.feature_names)
    sizes_F, poolings_F, lengths_F = (
        _by_feature(given, num_features)
        for given in (
            (constraint and constraint.batch_sizes) or [batch_size],
            (constraint and constraint.num_poolings) or [1.0],
            first.input_lengths,
        )
    )
    bags_F = [size * poolings for size, poolings in zip(sizes_F, poolings_F)]
    lookups = sum(bags * length for bags, length in zip(bags_F, lengths_F))
    spectrum = None
    if stats is not None:
        spectrum = stats.table(config.name).spectrum
        if stats.num_samples:
            lookups = batch_size * spectrum.num_lookups / stats.num_samples
    return TableLoad(
        module=options[0].path,
        name=config.name,
        num_embeddings=config.num_embeddings,
        dim=config.embedding_dim,
        lookups=lookups,
        bags=sum(bags_F),
        is_sequence=not isinstance(config, EmbeddingBagConfig),
        is_weighted=bool(first.is_weighted),
        num_features=num_features,
        spectrum=spectrum,
        element_bytes=first.tensor.element_size(),
        optimizer_share=optimizer_multiplier(optimizer_class(first), first.tensor.shape),
    )


def _by_feature(given: Sequence[float], num_features: int) -> Sequence[float]:
    """Returns a number for each feature; their mean, where the numbers given are not one for
    each."""
    return given if len(given) == num_features else [fmean(given or [0.0])] * num_features


def _why_not_hot_cold(
    options: Sequence[ShardingOption],
    config: BaseEmbeddingConfig,
    params: dict[str, Any] | Refusal,
    form: Form,
    no_form: str | None,
    device_type: str,
) -> Refusal | None:
    """Returns the first reason why a table cannot be hot/cold: its kind of rows, its options, its
    settings, the exchange that the user requires (``no_form``), its memory."""
    if (refusal := why_not_its_rows(config)) is not None:
        return refusal
    offered = offered_options(options, form)
    if not offered:
        return NOT_OFFERED
    if isinstance(params, Refusal):
        return params
    refusal = why_not_exact(params, data_type=config.data_type, device_type=device_type)
    if refusal is not None:
        return refusal
    if no_form is not None:
        return Refusal(what=f"{form=} was requested, but {no_form}", instead=_USE_ROWS)
    refusal = why_no_memory(offered[0].compute_kernel, options[0].tensor.shape[1])
    if refusal is not None:
        return Refusal(what=f"it {refusal.what}", instead=refusal.instead)
    return None


def _fused_params(
    option: ShardingOption, sharder_fused_params: dict[str, Any] | None
) -> dict[str, Any] | Refusal:
    """Computes the TBE arguments that TorchRec will pass, FBGEMM types, as in its
    ``distributed/embeddingbag.py`` ``create_sharding_infos_by_sharding``."""
    # copied, because the fused optimizer must not change
    optimizer_kwargs = dict(getattr(option.tensor, "_optimizer_kwargs", [{}])[0])
    optimizer = optimizer_class(option)
    if optimizer is not None and "optimizer" not in optimizer_kwargs:
        try:
            optimizer_kwargs["optimizer"] = optimizer_type_to_emb_opt_type(optimizer)
        except ValueError:
            return Refusal(
                f"TorchRec cannot fuse the optimizer {optimizer.__name__}",
                "use one of torchrec.optim",
            )
    constrained = ParameterSharding(
        sharding_type=ShardingType.ROW_WISE.value,
        compute_kernel=option.compute_kernel,
        stochastic_rounding=option.stochastic_rounding,
        output_dtype=option.output_dtype,
    )
    merged = merge_fused_params(sharder_fused_params, optimizer_kwargs)
    return convert_to_fbgemm_types(add_params_from_parameter_sharding(merged, constrained))


def _why_no_bags(options: Sequence[ShardingOption]) -> str | None:
    """Returns the reason why a table cannot be owner-pooled; ``None`` = it can."""
    module = options[0].module[1]
    if isinstance(module, EmbeddingCollection):
        return "its output is sequences, not bags"
    if not isinstance(module, EmbeddingBagCollection):
        return "feature processors weight its lookups on the rank of the batch"
    if not offered_options(options, "bags"):
        return "its sharder or its constraints do not allow table_wise with kernel fused"
    return None


def _stock_types(
    options: Sequence[ShardingOption], constrained_types: Collection[str] | None
) -> tuple[str, ...]:
    """Returns the stock sharding types that the planner may choose.

    Only if the user's constraints name types, or leave no other one: column-wise sharding of a
    row-wise optimizer, which has a state per column shard and so trains another model, and
    data-parallel sharding, which needs an optimizer in the dense part. Only without other types:
    row-wise sharding that leaves a rank without rows, because FBGEMM assumes that tables without
    rows are in GPU memory; and whole tables of an output type of their own, of which TorchRec sends
    FP32 from ranks without them.
    """
    offered = {option.sharding_type for option in options}
    found = [kind for kind in STOCK_TYPES if kind in offered]
    row_wise = (o for o in options if o.sharding_type == ShardingType.ROW_WISE.value)
    if len(found) > 1 and any(shard.size[0] == 0 for o in row_wise for shard in o.shards):
        found.remove(ShardingType.ROW_WISE.value)
    has_own_type = options[0].output_dtype not in (None, DataType.FP32)
    if has_own_type and ShardingType.ROW_WISE.value in found:
        found = [ShardingType.ROW_WISE.value]
    if constrained_types:
        return tuple(found)
    optimizer = optimizer_class(options[0])
    excluded = {ShardingType.DATA_PARALLEL.value}
    if optimizer is not None and "rowwise" in optimizer.__name__.lower():
        excluded.add(ShardingType.COLUMN_WISE.value)
    return tuple(kind for kind in found if kind not in excluded or offered <= excluded)


def dense_bytes_of(model: nn.Module) -> int:
    """Computes the bytes of the trained parameters outside embedding modules."""
    # compared by identity, because two modules may share a parameter
    kinds = (EmbeddingBagCollection, EmbeddingCollection)
    modules = [module for module in model.modules() if isinstance(module, kinds)]
    tables = {id(parameter) for module in modules for parameter in module.parameters()}
    dense = [p for p in model.parameters() if p.requires_grad and id(p) not in tables]
    return sum(parameter.numel() * parameter.element_size() for parameter in dense)


def assumed_curves(topology: Topology) -> CommCurves:
    """Returns curves with the bandwidth of a topology, as a replacement for measured curves."""
    on_one_host = topology.world_size <= topology.local_world_size
    bytes_per_ms = topology.intra_host_bw if on_one_host else topology.inter_host_bw
    rate, device = bytes_per_ms * _BYTES_PER_MS_TO_GB_PER_S, topology.compute_device
    own = {"device": device, "ranks_per_host": topology.local_world_size}
    return CommCurves.assumed(topology.world_size, gbytes_per_s=rate, **own)
