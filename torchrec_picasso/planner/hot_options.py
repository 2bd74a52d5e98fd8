"""Converts TorchRec's sharding options to hot/cold options, with their memory and times.

A hot/cold option is a row-wise option (row-exchanged) or a table-wise option (owner-pooled) with
``HotColdParams`` as ``cache_params``, so TorchRec's validation, statistics and broadcast work on
the plan. The memory of replicas is added to every shard, because every rank stores all
replicas; on a GPU to its HBM, even if home rows are in host memory.

Shape letters: H hot rows, W ranks.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from torch import Tensor
from torchrec.distributed.planner.types import Perf, ShardingOption, Storage
from torchrec.distributed.types import CacheParams

from torchrec_picasso._torchrec import optimizer_multiplier
from torchrec_picasso.cost.curves import CommCurves
from torchrec_picasso.cost.stock import STOCK_TYPES, marginal_stock_costs
from torchrec_picasso.cost.table_work import TableWork
from torchrec_picasso.errors import PlanError
from torchrec_picasso.placement import SHARDING_TYPE_OF, Form, HotColdParams
from torchrec_picasso.planner.home_blocks import filled_blocks
from torchrec_picasso.storage.exactness import HOT_COLD_KERNELS

__all__ = [
    "add_replica_storage",
    "copy_options",
    "cut_home_blocks",
    "hot_cold_options",
    "optimizer_class",
    "price_options",
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
    """Converts options of one table to hot/cold options, in place.

    Args:
        options: All options of one table.
        hot_rows_H: Hot rows, int64, shape ``(H,)``; empty = no replicas.
        wave: Wave of the table; replaces a wave in the constraints.
        form: Exchange of the table.
        num_micro_batches: Number of micro-batches in the predicted step; ``None`` = not predicted.

    Returns:
        The row-wise options, or the table-wise ones if owner-pooled, with a kernel in
        ``HOT_COLD_KERNELS``; other cache settings of the constraints are kept.

    Raises:
        PlanError: If there is no such option, or a hot row is outside the table.
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
            "does not offer it (TorchRec's own has no row_wise on CPU: pass "
            "HotColdEmbeddingBagCollectionSharder)"
        )
    for option in kept:
        option.cache_params = HotColdParams(
            hot_rows=hot_rows_H,
            wave=wave,
            form=form,
            num_micro_batches=num_micro_batches,
            **_cache_settings(option.cache_params),
        )
        option.cache_params.check(option.name, option.tensor.shape[0])
    return kept


def cut_home_blocks(
    options: list[ShardingOption], block_rows_W: Sequence[int] | None = None
) -> None:
    """Sets the home blocks of one table's options, in place.

    Args:
        options: Hot/cold options of one table; a shard per rank, or one for a whole table.
        block_rows_W: Number of home rows on each rank; ``None`` = TorchRec's blocks, or equal
            blocks if those leave a rank without rows.
    """
    for option in options:
        num_rows = option.tensor.shape[0]
        if block_rows_W is None:
            # empty shards are only avoidable if there is a row for each rank
            if all(shard.size[0] for shard in option.shards) or num_rows < len(option.shards):
                continue
            block_rows_W = filled_blocks(num_rows, len(option.shards))
        start = 0
        for shard, rows in zip(option.shards, block_rows_W, strict=True):
            shard.size, shard.offset = [rows, shard.size[1]], [start, 0]
            start += rows


def copy_options(options: Sequence[ShardingOption]) -> list[ShardingOption]:
    """Copies options and shards, so that ranks assigned to the copies do not change the originals.

    Values that a planner replaces but never changes, such as times and hot rows, are shared.
    """
    copies = []
    for option in options:
        copied = copy.copy(option)
        copied.shards = [copy.copy(shard) for shard in option.shards]
        copies.append(copied)
    return copies


def optimizer_class(option: ShardingOption) -> type | None:
    """Returns the class of the optimizer fused into an option's table, or ``None``."""
    found: type | None = getattr(option.tensor, "_optimizer_classes", [None])[0]
    return found


def replica_bytes(option: ShardingOption) -> int:
    """Computes the bytes of one rank's replicas, with optimizer state as TorchRec estimates it.

    Source:
        TorchRec ``planner/shard_estimators.py``, ``_calculate_optimizer_sizes``.
    """
    if not isinstance(option.cache_params, HotColdParams):
        return 0
    shape = option.tensor.shape
    row_bytes = option.tensor.element_size() * shape[1]
    # rounded up after the sum over rows, like TorchRec's estimate
    weight_bytes = option.cache_params.num_hot_rows * row_bytes
    state_share = optimizer_multiplier(optimizer_class(option), shape)
    return weight_bytes + math.ceil(weight_bytes * state_share)


def add_replica_storage(options: list[ShardingOption], compute_device: str) -> None:
    """Adds the memory of replicas to every shard of hot/cold options, in place.

    Args:
        options: Options with storage estimated without replicas.
        compute_device: ``"cpu"`` = added to DDR; other devices = added to HBM, also for kernel
            ``fused_uvm``, whose home rows are in host memory.
    """
    for option in options:
        num_bytes = replica_bytes(option)
        if not num_bytes:
            continue
        on_cpu = compute_device == "cpu"
        extra = Storage(hbm=0 if on_cpu else num_bytes, ddr=num_bytes if on_cpu else 0)
        for shard in option.shards:
            shard.storage = shard.storage + extra


def price_options(
    options: Sequence[ShardingOption],
    works: Sequence[TableWork],
    curves: CommCurves,
    world_size: int,
) -> list[ShardingOption]:
    """Sets ``Perf`` of options to what the table adds to a step of tables of that sharding type.

    TorchRec's partitioner sums the ``Perf`` of the shards on a rank and compares ranks.
    ``Perf.total`` excludes the input dist, so its cost is added to the forward exchange. An
    owner-pooled table has the cost of a table-wise one, on its home rank; a row-exchanged table
    that of a row-wise one, on all ranks.

    Returns:
        The options without a predicted cost, which TorchRec estimates.
    """
    costs = {
        (work.load.name, kind): cost
        for kind in STOCK_TYPES
        for work, cost in zip(works, marginal_stock_costs(kind, works, curves, world_size))
    }
    unpriced = []
    for option in options:
        cost = costs.get((option.name, option.sharding_type))
        if cost is None:
            unpriced.append(option)
            continue
        # costs are means over ranks: a single shard has the work of all W ranks
        share = world_size / len(option.shards)
        perf = Perf(
            fwd_compute=cost.forward_compute_ms * share,
            fwd_comms=(cost.forward_comms_ms + cost.input_dist_ms) * share,
            bwd_compute=cost.backward_compute_ms * share,
            bwd_comms=cost.backward_comms_ms * share,
        )
        for shard in option.shards:
            shard.perf = perf
    return unpriced


def _cache_settings(constrained: CacheParams | None) -> dict[str, Any]:
    """Returns TorchRec's own cache settings in the user's constraints."""
    if constrained is None:
        return {}
    return {field.name: getattr(constrained, field.name) for field in fields(CacheParams)}
