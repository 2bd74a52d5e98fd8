"""What the sharder would refuse, known while planning.

The reasons are the sharder's own (:mod:`torchrec_picasso.storage.exactness`), asked with the
settings that TorchRec will hand it: the sharder's ``fused_params``, over them those of an optimizer
fused into the table, over them the user's constraints.
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
from torchrec_picasso.storage.exactness import (
    HOT_COLD_KERNELS,
    Refusal,
    is_updated_only_here,
    why_no_hot_rows,
    why_no_memory,
    why_not_exact,
    why_not_its_rows,
)

__all__ = ["TableRefusals", "asked_form", "refusals_of", "why_no_bags"]


@dataclass(frozen=True, kw_only=True)
class TableRefusals:
    """What one table cannot be.

    Args:
        hot_cold: Why it cannot be hot/cold at all, or ``None``.
        hot_rows: Why none of its rows can be hot, or ``None``.
        is_offered: Whether its options have one for its form with a kernel for it, whatever else.
        is_only_hot_cold: Whether TorchRec has no kernel for its optimizer here, and ours has.
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
    """What the sharder would refuse of a table.

    Args:
        options: All of TorchRec's options of the table.
        config: TorchRec's configuration of the table.
        sharder_fused_params: What the sharder was made with.
        device_type: ``"cpu"`` or ``"cuda"``.
    """
    refusal = why_not_its_rows(config)
    if refusal is not None:
        return TableRefusals(hot_cold=refusal)
    data_type = config.data_type
    first, as_bags = options[0], asked_form(options) == "bags"
    sharding_type = SHARDING_TYPE_OF[asked_form(options) or "rows"]
    kernels = [o.compute_kernel for o in options if o.sharding_type == sharding_type]
    able = [kernel for kernel in kernels if kernel in HOT_COLD_KERNELS]
    params = _fused_params(first, sharder_fused_params)
    if isinstance(params, Refusal):
        return TableRefusals(hot_cold=params, is_offered=bool(able))
    refusal = why_not_exact(params, data_type=data_type, device_type=device_type)
    no_bags = why_no_bags(options) if as_bags else None
    if refusal is None and no_bags is not None:
        refusal = Refusal(
            what=f"its bags were asked for, but {no_bags}", instead="ask for form='rows'"
        )
    if refusal is None and not kernels:
        refusal = _NO_ROW_WISE
    if refusal is None:
        in_memory = why_no_memory((able or kernels)[0], first.tensor.shape[1])
        if in_memory is not None:
            refusal = Refusal(what=f"it {in_memory.what}", instead=in_memory.instead)
    return TableRefusals(
        hot_cold=refusal,
        hot_rows=_BAGS_HAVE_ONE_HOME if as_bags else why_no_hot_rows(params, data_type=data_type),
        is_offered=bool(able),
        is_only_hot_cold=refusal is None and is_updated_only_here(params, device_type=device_type),
    )


_BAGS_HAVE_ONE_HOME = Refusal(
    what="its bags were asked for, which are pooled at one home",
    instead="ask for form='rows'",
)
_NO_ROW_WISE = Refusal(
    what="its sharder or its constraints do not allow hot/cold",
    instead="allow row_wise with kernel fused",
)


def _fused_params(
    option: ShardingOption, sharder_fused_params: dict[str, Any] | None
) -> dict[str, Any] | Refusal:
    """TBE arguments as TorchRec will make them, FBGEMM types.

    Source:
        TorchRec ``distributed/embeddingbag.py`` ``create_sharding_infos_by_sharding``.
    """
    of_optimizer = dict(getattr(option.tensor, "_optimizer_kwargs", [{}])[0])
    optimizer = getattr(option.tensor, "_optimizer_classes", [None])[0]
    if optimizer is not None and "optimizer" not in of_optimizer:
        try:
            of_optimizer["optimizer"] = optimizer_type_to_emb_opt_type(optimizer)
        except ValueError:
            return Refusal(
                what=f"TorchRec cannot fuse the optimizer {optimizer.__name__}",
                instead="use one of torchrec.optim",
            )
    asked = ParameterSharding(
        sharding_type=ShardingType.ROW_WISE.value,
        compute_kernel=option.compute_kernel,
        stochastic_rounding=option.stochastic_rounding,
        output_dtype=option.output_dtype,
    )
    merged = merge_fused_params(sharder_fused_params, of_optimizer)
    return convert_to_fbgemm_types(add_params_from_parameter_sharding(merged, asked))


def asked_form(options: Sequence[ShardingOption]) -> Form | None:
    """What of a table shall travel, where the user's constraints say so.

    Args:
        options: All of TorchRec's options of the table.
    """
    params = options[0].cache_params
    return params.form if isinstance(params, HotColdParams) else None


def why_no_bags(options: Sequence[ShardingOption]) -> str | None:
    """Why the bags of a table cannot travel, or ``None``.

    Args:
        options: All of TorchRec's options of the table.
    """
    module = options[0].module[1]
    if isinstance(module, EmbeddingCollection):
        return "it gives sequences, not bags"
    if not isinstance(module, EmbeddingBagCollection):
        return "feature processors weigh its lookups where the batch is"
    kernels = {
        option.compute_kernel
        for option in options
        if option.sharding_type == SHARDING_TYPE_OF["bags"]
    }
    if kernels.isdisjoint(HOT_COLD_KERNELS):
        return "its sharder or its constraints do not allow table_wise with kernel fused"
    return None
