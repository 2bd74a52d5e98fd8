"""Cost of TorchRec's own sharding types on the same curves. Pure arithmetic.

Bytes follow TorchRec's exchanges: lengths and values of the KeyedJaggedTensor in, pooled rows out
and their gradients back. Pooled table- and column-wise rows go through an all-to-all, row-wise
partial sums through a reduce-scatter and an all-gather, data-parallel gradients through an
all-reduce of whole tables.

Source: TorchRec ``distributed/sharding/{tw,rw,cw,dp}_sharding.py``, ``distributed/dist_data.py``.
"""

from __future__ import annotations

from collections.abc import Sequence

from torchrec_picasso.cost.curves import CommCurves
from torchrec_picasso.cost.local import LocalWork
from torchrec_picasso.cost.step_cost import StepCost
from torchrec_picasso.cost.table_work import TableLoad, TableWork

__all__ = ["STOCK_TYPES", "stock_cost", "stock_memory_bytes"]

STOCK_TYPES = ("table_wise", "row_wise", "column_wise", "data_parallel")
"""TorchRec sharding types with a cost; the first three place every table on its own ranks."""

_ID_BYTES = 8
_LENGTH_BYTES = 4
_WIRE_BYTES = 4
_MIN_COLUMNS = 4  # FBGEMM's narrowest shard
_DENSE_UPDATE_PASSES = 3  # gradient zeroed, written and applied over the whole table


def stock_cost(sharding_type: str, works: Sequence[TableWork], curves: CommCurves) -> StepCost:
    """Expected cost of one step of tables that all take one stock sharding type.

    Args:
        sharding_type: One of :data:`STOCK_TYPES`.
        works: The tables, all of one world size.
        curves: Measured communication and local work.

    Returns:
        Zero for no tables.
    """
    if not works:
        return StepCost()
    if sharding_type == "data_parallel":
        return _data_parallel(works, curves)
    world_size = works[0].world_size
    loads = [work.load for work in works]
    to_others = (world_size - 1) / world_size
    lookups = sum(load.lookups for load in loads)
    bags = sum(load.bags for load in loads)
    pooled_bytes = sum(load.bags * load.dim for load in loads) * _WIRE_BYTES
    shards = {load.name: _column_shards(load, world_size) for load in loads}
    if sharding_type == "table_wise":
        copies, uneven = 1.0, _max_over_mean([load.bags * load.dim for load in loads], world_size)
    elif sharding_type == "column_wise":
        columns = [
            load.bags * load.dim / shards[load.name]
            for load in loads
            for _ in range(shards[load.name])
        ]
        copies = sum(load.lookups * shards[load.name] for load in loads) / max(lookups, 1e-9)
        uneven = _max_over_mean(columns, world_size)
    else:
        copies, uneven = 1.0, 1.0
    length_copies = float(world_size) if sharding_type == "row_wise" else copies
    ids = (lookups * copies * _ID_BYTES + bags * length_copies * _LENGTH_BYTES) * to_others
    rows = pooled_bytes * (world_size - 1 if sharding_type == "row_wise" else to_others)
    forward, backward = (
        ("reduce_scatter", "all_gather")
        if sharding_type == "row_wise"
        else ("all_to_all", "all_to_all")
    )
    # lengths and values travel in an all-to-all each; so do their splits, before them
    ids_ms = 2 * curves.ms("all_to_all", ids * uneven / 2, world_size) + curves.ms(
        "all_to_all", 0, world_size
    )
    work = _local_work(sharding_type, works, copies, uneven)
    costs = curves.local.stock
    return StepCost(
        input_dist_ms=costs.input_dist.ms(work) + ids_ms,
        forward_compute_ms=costs.forward.ms(work),
        forward_comms_ms=curves.ms(forward, rows * uneven, world_size),
        backward_compute_ms=costs.backward.ms(work),
        backward_comms_ms=curves.ms(backward, rows * uneven, world_size),
        input_dist_wire_ms=ids_ms,
        sent_bytes={"ids": ids, "rows": rows, "gradients": rows},
    )


def stock_memory_bytes(sharding_type: str, loads: Sequence[TableLoad], world_size: int) -> float:
    """Expected bytes per rank: weights and optimizer state, a whole copy if data-parallel."""
    total = sum(load.num_embeddings * load.row_bytes for load in loads)
    return total if sharding_type == "data_parallel" else total / world_size


def _local_work(
    sharding_type: str, works: Sequence[TableWork], copies: float, uneven: float
) -> LocalWork:
    """Work of the busiest rank: its share of all ranks' lookups."""
    world_size = works[0].world_size
    pooled = sum(work.load.bags * work.load.dim for work in works)
    gathered = sum(work.load.lookups * work.load.dim for work in works) * uneven
    if sharding_type == "row_wise":
        gathered += pooled * (world_size - 1)  # partial sums of every rank's bags, mostly empty
    rows = sum(work.unique_anywhere for work in works) / world_size
    row_elements = sum(work.unique_anywhere * work.load.dim for work in works) / world_size
    return LocalWork(
        features=sum(work.load.num_features for work in works),
        lookups=sum(work.load.lookups for work in works) * copies * uneven,
        rows=rows * uneven,
        lookup_elements=gathered,
        row_elements=row_elements * uneven,
        buffer_elements=2 * gathered,
    )


def _data_parallel(works: Sequence[TableWork], curves: CommCurves) -> StepCost:
    world_size = works[0].world_size
    costs = curves.local.stock
    elements = sum(work.load.num_embeddings * work.load.dim for work in works)
    gathered = sum(work.load.lookups * work.load.dim for work in works)
    local = LocalWork(
        features=sum(work.load.num_features for work in works),
        lookups=sum(work.load.lookups for work in works),
        rows=sum(work.unique for work in works),
        lookup_elements=gathered,
        row_elements=sum(work.unique * work.load.dim for work in works),
        buffer_elements=2 * gathered,
    )
    sent = 2 * (world_size - 1) / world_size * elements * _WIRE_BYTES
    dense = LocalWork(lookup_elements=elements * _DENSE_UPDATE_PASSES, buffer_elements=elements)
    return StepCost(
        forward_compute_ms=costs.forward.ms(local),
        backward_compute_ms=costs.backward.ms(local) + costs.forward.ms(dense),
        backward_comms_ms=curves.ms("all_reduce", sent, world_size),
        sent_bytes={"gradients": sent},
    )


def _column_shards(load: TableLoad, world_size: int) -> int:
    """Column shards of a table cut over all ranks, each at least FBGEMM's narrowest."""
    widest = load.dim // world_size // _MIN_COLUMNS * _MIN_COLUMNS
    return world_size if widest and load.dim % widest == 0 else 1


def _max_over_mean(weights: Sequence[float], world_size: int) -> float:
    """Load of the busiest rank over the mean when the largest shards are placed first."""
    total = sum(weights)
    if not total:
        return 1.0
    loads = [0.0] * world_size
    for weight in sorted(weights, reverse=True):
        loads[loads.index(min(loads))] += weight
    return max(loads) * world_size / total
