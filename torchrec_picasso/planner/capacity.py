"""Memory of a plan: the budget of replicas, and the error if tables do not fit."""

from __future__ import annotations

from collections.abc import Sequence

from torchrec.distributed.planner.types import ShardingOption, Storage, Topology

from torchrec_picasso.errors import PlanError
from torchrec_picasso.placement import HotColdParams
from torchrec_picasso.planner.hot_options import replica_bytes

__all__ = ["RESERVED_SHARE", "explain_shortage", "replica_budget_bytes"]

RESERVED_SHARE = 0.15
"""Share of a rank's memory that TorchRec's planner reserves by default."""


def replica_budget_bytes(
    options_by_table: Sequence[Sequence[ShardingOption]], topology: Topology
) -> float:
    """Computes the bytes per rank that are free for replicas if tables are spread evenly."""
    # each table in its smallest option
    used = sum(
        min(_bytes(option.total_storage, topology) for option in options) / topology.world_size
        for options in options_by_table
    )
    return max(0.0, _capacity_bytes(topology) * (1 - RESERVED_SHARE) - used)


def explain_shortage(options: Sequence[ShardingOption], topology: Topology) -> PlanError | None:
    """Returns the error for a plan that does not fit; ``None`` if memory is sufficient."""
    # smallest option of each table
    least: dict[tuple[str, str], ShardingOption] = {}
    for option in options:
        key = (option.path, option.name)
        if key not in least or _per_rank(option, topology) < _per_rank(least[key], topology):
            least[key] = option
    if not least:
        return None
    needed = {key: _per_rank(option, topology) for key, option in least.items()}
    capacity = _capacity_bytes(topology)
    available = capacity * (1 - RESERVED_SHARE)
    total = sum(needed.values())
    if total <= available:
        return None
    largest = max(needed, key=lambda key: (needed[key], key))
    replicas = {key: replica_bytes(option) for key, option in least.items()}
    replica_total = sum(replicas.values())
    memory = "ddr" if topology.compute_device == "cpu" else "hbm"
    smallest = int(total / (1 - RESERVED_SHARE)) + 1
    message = (
        f"the tables need {total:,.0f} bytes of {memory} per rank, but a rank has {available:,.0f} "
        f"({capacity:,.0f} less {RESERVED_SHARE:.0%} that TorchRec reserves); the largest is "
        f"table {largest[1]!r} with {needed[largest]:,.0f}, {replicas[largest]:,} of them "
        f"replicas. Set {memory}_cap of the topology to at least {smallest:,}"
    )
    without = total - replica_total
    if replica_total and without <= available:
        hot = sum(
            option.cache_params.num_hot_rows
            for option in least.values()
            if isinstance(option.cache_params, HotColdParams)
        )
        # replicas that fit, if all rows had the mean size
        most = int(hot * (available - without) / replica_total)
        message += f", or request at most {most:,} hot rows instead of {hot:,}"
    return PlanError(message)


def _per_rank(option: ShardingOption, topology: Topology) -> float:
    """Returns the bytes of an option per rank if its shards are spread evenly."""
    return _bytes(option.total_storage, topology) / topology.world_size


def _bytes(storage: Storage, topology: Topology) -> float:
    return float(storage.ddr if topology.compute_device == "cpu" else storage.hbm)


def _capacity_bytes(topology: Topology) -> float:
    return min(_bytes(device.storage, topology) for device in topology.devices)
