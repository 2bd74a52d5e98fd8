"""Turns TorchRec's sharding options of a table into hot/cold ones, and counts their memory.

A hot/cold option is a stock row-wise one, or where bags travel a table-wise one, whose
``cache_params`` names the hot rows: the plan keeps TorchRec's own words, and its validation,
statistics and broadcast work on it unchanged. The replicas are charged to every shard, since every
rank holds them beside its home block; on a GPU always to its own memory, where they are also when
the homes are in the host's.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from torch import Tensor
from torchrec.distributed.planner.types import ShardingOption, Storage
from torchrec.distributed.types import CacheParams

from torchrec_picasso._torchrec import optimizer_multiplier
from torchrec_picasso.decision.home_blocks import filled_blocks
from torchrec_picasso.errors import PlanError
from torchrec_picasso.placement import SHARDING_TYPE_OF, Form, HotColdParams
from torchrec_picasso.storage.exactness import HOT_COLD_KERNELS

__all__ = [
    "add_replica_storage",
    "copy_options",
    "cut_home_blocks",
    "hot_cold_options",
    "replica_bytes",
]


def hot_cold_options(
    options: list[ShardingOption],
    hot_rows_H: Tensor,
    wave: int = 0,
    *,
    form: Form = "rows",
    num_micro_batches: int | None = None,
) -> list[ShardingOption]:
    """Keeps the options of one table that can be hot/cold, and marks them in place.

    Args:
        options: All options of one table.
        hot_rows_H: Its hot rows, int64, shape ``(H,)``; empty means no replicas.
        wave: Which wave it travels in; one named by constraints is not kept.
        form: Whether its rows travel, or its bags.
        num_micro_batches: What the plan was priced for, if it was.

    Returns:
        The row-wise options, or for bags the table-wise ones, with a kernel of
        ``HOT_COLD_KERNELS``; other cache settings that came from constraints are kept.

    Raises:
        PlanError: If there is no such option, or the table has no such rows.
    """
    sharding_type = SHARDING_TYPE_OF[form]
    kept = [
        option
        for option in options
        if option.sharding_type == sharding_type and option.compute_kernel in HOT_COLD_KERNELS
    ]
    if not kept:
        offered = sorted({(option.sharding_type, option.compute_kernel) for option in options})
        raise PlanError(
            f"table {options[0].name!r} was chosen to be hot/cold, which needs {sharding_type} "
            f"sharding with kernel {' or '.join(HOT_COLD_KERNELS)}, but its options are {offered}; "
            f"either its constraints exclude it (allow {sharding_type} and fused), or its sharder "
            "does not offer "
            "it (TorchRec's own has no row_wise on CPU: pass HotColdEmbeddingBagCollectionSharder)"
        )
    for option in kept:
        option.cache_params = HotColdParams(
            hot_rows=hot_rows_H,
            wave=wave,
            form=form,
            num_micro_batches=num_micro_batches,
            **_kept(option.cache_params),
        )
        option.cache_params.check(option.name, option.tensor.shape[0])
    return kept


def cut_home_blocks(
    options: list[ShardingOption], block_rows_W: Sequence[int] | None = None
) -> None:
    """Moves the cuts between the row-wise shards of one table's options.

    Args:
        options: Hot/cold options of one table; a shard per rank, or one for a whole table.
        block_rows_W: Rows at home on each rank, summing to the table's; ``None`` keeps TorchRec's
            cuts unless they leave a rank without a row to have.
    """
    for option in options:
        num_rows = option.tensor.shape[0]
        if block_rows_W is None:
            if all(shard.size[0] for shard in option.shards) or num_rows < len(option.shards):
                continue
            block_rows_W = filled_blocks(num_rows, len(option.shards))
        start = 0
        for shard, rows in zip(option.shards, block_rows_W, strict=True):
            shard.size, shard.offset = [rows, shard.size[1]], [start, 0]
            start += rows


def copy_options(options: Sequence[ShardingOption]) -> list[ShardingOption]:
    """Copies options so that ranks set in the ones do not show in the others.

    What a planner only replaces, such as times and hot rows, is shared.
    """
    copies = []
    for option in options:
        twin = copy.copy(option)
        twin.shards = [copy.copy(shard) for shard in option.shards]
        copies.append(twin)
    return copies


def replica_bytes(option: ShardingOption) -> int:
    """Bytes of one rank's replicas: rows and optimizer state, as TorchRec counts the home's.

    Args:
        option: A sharding option; without hot rows the answer is 0.

    Returns:
        Bytes per rank.

    Source:
        TorchRec ``planner/shard_estimators.py``, ``_calculate_optimizer_sizes``.
    """
    if not isinstance(option.cache_params, HotColdParams):
        return 0
    shape = option.tensor.shape
    row_bytes = option.tensor.element_size() * shape[1]
    optimizer_class = getattr(option.tensor, "_optimizer_classes", [None])[0]
    weight_bytes = option.cache_params.num_hot_rows * row_bytes
    return weight_bytes + math.ceil(weight_bytes * optimizer_multiplier(optimizer_class, shape))


def add_replica_storage(options: list[ShardingOption], compute_device: str) -> None:
    """Adds the replicas' memory to every shard of the hot/cold options.

    Args:
        options: Options whose storage was just estimated without replicas.
        compute_device: ``"cpu"`` charges DDR; any other device charges its HBM, for every compute
            kernel: replicas of ``fused_uvm`` homes are in HBM too.
    """
    for option in options:
        num_bytes = replica_bytes(option)
        if not num_bytes:
            continue
        on_cpu = compute_device == "cpu"
        extra = Storage(hbm=0 if on_cpu else num_bytes, ddr=num_bytes if on_cpu else 0)
        for shard in option.shards:
            shard.storage = shard.storage + extra


def _kept(constrained: CacheParams | None) -> dict[str, Any]:
    """TorchRec's own cache settings, from constraints."""
    if constrained is None:
        return {}
    return {field.name: getattr(constrained, field.name) for field in fields(CacheParams)}
