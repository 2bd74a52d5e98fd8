"""Finds, while planning, the tables that the sharder would refuse.

The reasons come from the functions that the sharder calls
(:mod:`torchrec_picasso.storage.exactness`), with the settings that TorchRec will pass: the
sharder's ``fused_params``, overridden by the optimizer fused into the table, overridden by the
user's constraints.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

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

from torchrec_picasso.placement import SHARDING_TYPE_OF, Form, HotColdParams
from torchrec_picasso.planner.hot_options import optimizer_class
from torchrec_picasso.storage.exactness import (
    HOT_COLD_KERNELS,
    Refusal,
    is_updated_only_here,
    why_no_hot_rows,
    why_no_memory,
    why_not_exact,
    why_not_its_rows,
)

__all__ = ["TableRefusals", "required_form", "refusals_of", "why_no_bags"]


@dataclass(frozen=True, kw_only=True)
class TableRefusals:
    """The refused placements of one table.

    Args:
        hot_cold: Reason why the table cannot be hot/cold; ``None`` = it can.
        hot_rows: Reason why it cannot have hot rows; ``None`` = it can.
        is_offered: Whether its options include a hot/cold sharding type and kernel.
        is_only_hot_cold: Whether only this package has a kernel for its optimizer on this device.
    """

    hot_cold: Refusal | None = None
    hot_rows: Refusal | None = None
    is_offered: bool = True
    is_only_hot_cold: bool = False


def refusals_of(
    options: Sequence[ShardingOption],
    config: BaseEmbeddingConfig,
    sharder_fused_params: dict[str, Any] | None,
    device_type: str,
) -> TableRefusals:
    """Collects the refusals of one table.

    Args:
        options: All of TorchRec's options of the table.
        config: TorchRec's configuration of the table.
        sharder_fused_params: ``fused_params`` of the sharder.
        device_type: ``"cpu"`` or ``"cuda"``.
    """
    refusal = why_not_its_rows(config)
    if refusal is not None:
        return TableRefusals(hot_cold=refusal)
    data_type = config.data_type
    first, is_owner_pooled = options[0], required_form(options) == "bags"
    sharding_type = SHARDING_TYPE_OF[required_form(options) or "rows"]
    kernels = [o.compute_kernel for o in options if o.sharding_type == sharding_type]
    able = [kernel for kernel in kernels if kernel in HOT_COLD_KERNELS]
    params = _fused_params(first, sharder_fused_params)
    if isinstance(params, Refusal):
        return TableRefusals(hot_cold=params, is_offered=bool(able))
    refusal = why_not_exact(params, data_type=data_type, device_type=device_type)
    no_bags = why_no_bags(options) if is_owner_pooled else None
    # the first reason counts: settings, form, options, memory
    if refusal is None and no_bags is not None:
        refusal = Refusal(what=f"form='bags' was requested, but {no_bags}", instead=_USE_ROWS)
    if refusal is None and not kernels:
        refusal = _NO_ROW_WISE
    if refusal is None:
        in_memory = why_no_memory((able or kernels)[0], first.tensor.shape[1])
        if in_memory is not None:
            refusal = Refusal(what=f"it {in_memory.what}", instead=in_memory.instead)
    return TableRefusals(
        hot_cold=refusal,
        hot_rows=_NO_REPLICAS if is_owner_pooled else why_no_hot_rows(params, data_type=data_type),
        is_offered=bool(able),
        is_only_hot_cold=refusal is None and is_updated_only_here(params, device_type=device_type),
    )


_USE_ROWS = "request form='rows'"
_NO_REPLICAS = Refusal(
    what="form='bags' was requested, and owner-pooled tables have no replicas", instead=_USE_ROWS
)
_NO_ROW_WISE = Refusal(
    what="its sharder or its constraints do not allow hot/cold",
    instead="allow row_wise with kernel fused",
)


def _fused_params(
    option: ShardingOption, sharder_fused_params: dict[str, Any] | None
) -> dict[str, Any] | Refusal:
    """Computes the TBE arguments that TorchRec will pass, FBGEMM types.

    Source:
        TorchRec ``distributed/embeddingbag.py`` ``create_sharding_infos_by_sharding``.
    """
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
    """Returns the exchange that the user's constraints require; ``None`` = no requirement.

    Args:
        options: All of TorchRec's options of the table.
    """
    params = options[0].cache_params
    return params.form if isinstance(params, HotColdParams) else None


def why_no_bags(options: Sequence[ShardingOption]) -> str | None:
    """Returns the reason why a table cannot be owner-pooled; ``None`` = it can.

    Args:
        options: All of TorchRec's options of the table.
    """
    module = options[0].module[1]
    if isinstance(module, EmbeddingCollection):
        return "its output is sequences, not bags"
    if not isinstance(module, EmbeddingBagCollection):
        return "feature processors weight its lookups on the rank of the batch"
    kernels = {
        option.compute_kernel
        for option in options
        if option.sharding_type == SHARDING_TYPE_OF["bags"]
    }
    if kernels.isdisjoint(HOT_COLD_KERNELS):
        return "its sharder or its constraints do not allow table_wise with kernel fused"
    return None
