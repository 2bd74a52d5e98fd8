"""Finds, while planning, the tables that the sharder would refuse, and refuses such requests.

The reasons come from the functions that the sharder calls
(:mod:`torchrec_picasso.storage.exactness`), with the settings that TorchRec will pass: the
sharder's ``fused_params``, overridden by the optimizer fused into the table, overridden by the
user's constraints.

A request by table name is fulfilled or refused, never ignored; a total number of hot rows, and the
choice of the cost model, apply to the tables that can be hot/cold.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import torch
from torchrec.distributed.planner.types import ShardingOption
from torchrec.distributed.types import ParameterSharding, ShardingType
from torchrec.distributed.utils import (
    add_params_from_parameter_sharding,
    convert_to_fbgemm_types,
    merge_fused_params,
    optimizer_type_to_emb_opt_type,
)
from torchrec.modules.embedding_configs import BaseEmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

from torchrec_picasso.errors import PlanError
from torchrec_picasso.placement import SHARDING_TYPE_OF, Form, HotColdParams
from torchrec_picasso.planner.hot_options import hot_cold_options, optimizer_class
from torchrec_picasso.storage.exactness import (
    HOT_COLD_KERNELS,
    Refusal,
    is_updated_only_here,
    why_no_hot_rows,
    why_no_memory,
    why_not_exact,
    why_not_its_rows,
)

__all__ = [
    "TablePath",
    "TableRefusals",
    "hot_cold_candidates",
    "refusals_of",
    "required_form",
    "why_no_bags",
]

TablePath = tuple[str, str]
"""Path of the module, name of the table."""

_USE_ROWS = "request form='rows'"
_NO_REPLICAS = Refusal(
    what="form='bags' was requested, and owner-pooled tables have no replicas", instead=_USE_ROWS
)
_NOT_ALLOWED = Refusal(
    what="its sharder or its constraints do not allow hot/cold",
    instead="allow row_wise with kernel fused",
)


@dataclass(frozen=True, kw_only=True)
class TableRefusals:
    """The reasons why one table cannot be hot/cold, and why it cannot have hot rows."""

    hot_cold: Refusal | None = None
    hot_rows: Refusal | None = None
    is_offered: bool = True
    """Whether the table's options include a hot/cold sharding type and kernel."""
    is_only_hot_cold: bool = False
    """Whether only this package has a kernel for the table's optimizer on this device."""


def refusals_of(
    options: Sequence[ShardingOption],
    config: BaseEmbeddingConfig,
    sharder_fused_params: dict[str, Any] | None,
    device_type: str,
) -> TableRefusals:
    """Collects the refusals of one table."""
    if (refusal := why_not_its_rows(config)) is not None:
        return TableRefusals(hot_cold=refusal)
    form, data_type = required_form(options) or "rows", config.data_type
    kernels = [o.compute_kernel for o in options if o.sharding_type == SHARDING_TYPE_OF[form]]
    able = [kernel for kernel in kernels if kernel in HOT_COLD_KERNELS]
    params = _fused_params(options[0], sharder_fused_params)
    if isinstance(params, Refusal):
        return TableRefusals(hot_cold=params, is_offered=bool(able))
    # the first reason counts: settings, form, options, memory
    refusal = why_not_exact(params, data_type=data_type, device_type=device_type)
    no_bags = why_no_bags(options) if form == "bags" else None
    if refusal is None and no_bags is not None:
        refusal = Refusal(what=f"form='bags' was requested, but {no_bags}", instead=_USE_ROWS)
    elif refusal is None and not kernels:
        refusal = _NOT_ALLOWED
    elif refusal is None:
        in_memory = why_no_memory((able or kernels)[0], options[0].tensor.shape[1])
        if in_memory is not None:
            refusal = Refusal(what=f"it {in_memory.what}", instead=in_memory.instead)
    return TableRefusals(
        hot_cold=refusal,
        hot_rows=_NO_REPLICAS if form == "bags" else why_no_hot_rows(params, data_type=data_type),
        is_offered=bool(able),
        is_only_hot_cold=refusal is None and is_updated_only_here(params, device_type=device_type),
    )


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
                what=f"TorchRec cannot fuse the optimizer {optimizer.__name__}",
                instead="use one of torchrec.optim",
            )
    constrained = ParameterSharding(
        sharding_type=ShardingType.ROW_WISE.value,
        compute_kernel=option.compute_kernel,
        stochastic_rounding=option.stochastic_rounding,
        output_dtype=option.output_dtype,
    )
    merged = merge_fused_params(sharder_fused_params, optimizer_kwargs)
    return convert_to_fbgemm_types(add_params_from_parameter_sharding(merged, constrained))


def required_form(options: Sequence[ShardingOption]) -> Form | None:
    """Returns the exchange that the user's constraints require; ``None`` = no requirement."""
    params = options[0].cache_params
    return params.form if isinstance(params, HotColdParams) else None


def why_no_bags(options: Sequence[ShardingOption]) -> str | None:
    """Returns the reason why a table cannot be owner-pooled; ``None`` = it can."""
    module = options[0].module[1]
    if isinstance(module, EmbeddingCollection):
        return "its output is sequences, not bags"
    if not isinstance(module, EmbeddingBagCollection):
        return "feature processors weight its lookups on the rank of the batch"
    whole = [option for option in options if option.sharding_type == SHARDING_TYPE_OF["bags"]]
    if not any(option.compute_kernel in HOT_COLD_KERNELS for option in whole):
        return "its sharder or its constraints do not allow table_wise with kernel fused"
    return None


def hot_cold_candidates(
    options_by_path: Mapping[TablePath, list[ShardingOption]],
    refusals: Mapping[TablePath, TableRefusals],
    hot_rows: int | Mapping[str, int] | None,
    sharders: Sequence[Any],
) -> dict[str, int]:
    """Finds the tables that can be hot/cold: number of rows by table name, in model order.

    Raises:
        PlanError: If requested hot rows cannot be placed, with the reason.
    """
    named = set(hot_rows) if isinstance(hot_rows, Mapping) else None
    # hot_rows=0 selects no rows by name, so equal names are allowed
    by_name = hot_rows is None or bool(hot_rows)
    paths: dict[str, str] = {}
    for path, table in refusals:
        if table in paths and (table in named if named is not None else by_name):
            raise PlanError(
                f"table {table!r} exists in module {paths[table]!r} and in module {path!r}, "
                "but hot rows are chosen by table name; rename one of the tables"
            )
        paths[table] = path
    elsewhere = {key[1]: options[0] for key, options in options_by_path.items()}
    for table in sorted((named or set()) & elsewhere.keys() - paths.keys()):
        _refuse_elsewhere(elsewhere[table], sharders)
    if options_by_path and not paths and named != set():
        raise PlanError(
            "no table can be hot/cold: none of the sharders "
            f"{sorted({type(sharder).__name__ for sharder in sharders})} supports it for "
            "a module of this model; pass HotColdEmbeddingBagCollectionSharder() or "
            "HotColdEmbeddingCollectionSharder() in sharders"
        )
    for key, found in refusals.items():
        _check_request(options_by_path[key], found, hot_rows)
    able = {key: options_by_path[key][0].tensor.shape[0] for key in refusals}
    if isinstance(hot_rows, Integral):
        _check_total(options_by_path, refusals, able, int(hot_rows))
    return {key[1]: rows for key, rows in able.items() if refusals[key].hot_cold is None}


def _refuse_elsewhere(option: ShardingOption, sharders: Sequence[Any]) -> None:
    """Refuses hot rows of a table whose sharder does not support them."""
    path, module = option.module
    (sharder,) = (s for s in sharders if s.module_type is type(module))
    kind = "" if isinstance(module, EmbeddingCollection) else "Bag"
    able = f"HotColdEmbedding{kind}CollectionSharder"
    raise PlanError(
        f"hot_rows names table {option.name!r} of module {path!r} "
        f"({type(module).__name__}), whose sharder {type(sharder).__name__} cannot place "
        f"hot rows; leave the table out, or pass a sharder that can, such as {able}"
    )


def _check_request(
    options: list[ShardingOption], refusals: TableRefusals, hot_rows: int | Mapping[str, int] | None
) -> None:
    """Refuses a request by name for a table that cannot be hot/cold or have hot rows."""
    option = options[0]
    if isinstance(hot_rows, Mapping):
        if option.name not in hot_rows:
            return
        source, num_hot_rows = "hot_rows names", hot_rows[option.name]
    elif isinstance(option.cache_params, HotColdParams):
        # a total replaces the hot rows of constraints
        num_hot_rows = option.cache_params.num_hot_rows if hot_rows is None else 0
        source = "the constraints name"
    else:
        return
    if refusals.hot_cold is not None:
        _refuse_if_not_offered(options, refusals)
        raise PlanError(
            f"{source} table {option.name!r}, which cannot be hot/cold: {refusals.hot_cold.what}; "
            f"{refusals.hot_cold.advice('leave the table out')}"
        )
    if refusals.hot_rows is not None and num_hot_rows:
        raise PlanError(
            f"{source} table {option.name!r}, which cannot have hot rows: "
            f"{refusals.hot_rows.what}; {refusals.hot_rows.instead}, or request 0 rows of it"
        )


def _check_total(
    options_by_path: Mapping[TablePath, list[ShardingOption]],
    refusals: Mapping[TablePath, TableRefusals],
    num_rows: Mapping[TablePath, int],
    hot_rows: int,
) -> None:
    """Refuses a total larger than the rows of all tables that can have hot rows."""
    if all(found.hot_cold is not None for found in refusals.values()):
        for key, found in refusals.items():
            _refuse_if_not_offered(options_by_path[key], found)
    reasons = {key: found.hot_cold or found.hot_rows for key, found in refusals.items()}
    left_out = [(table, reason) for (_, table), reason in reasons.items() if reason is not None]
    num_able = sum(num_rows[key] for key, reason in reasons.items() if reason is None)
    # without left-out tables, select_hot_rows reports a total that is too large
    if hot_rows > num_able and left_out:
        table, refusal = left_out[0]
        raise PlanError(
            f"{hot_rows:,} hot rows were requested, but only {num_able:,} rows can be hot: "
            f"{len(left_out)} tables can have none, such as {table!r}: {refusal.what}; "
            f"{refusal.instead}, or request at most {num_able:,}"
        )


def _refuse_if_not_offered(options: list[ShardingOption], refusals: TableRefusals) -> None:
    """Raises the error of ``hot_cold_options``, which lists the options, if none is hot/cold."""
    if not refusals.is_offered:
        form = required_form(options) or "rows"
        hot_cold_options(options, torch.empty(0, dtype=torch.int64), form=form)
