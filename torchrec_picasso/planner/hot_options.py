"""Hot/cold sharding options: their memory and times, and the error if tables do not fit.

A hot/cold option is a row-wise option (row-exchanged) or a table-wise option (owner-pooled) with
``HotColdParams`` as ``cache_params``, so TorchRec's validation, statistics and broadcast work on
the plan. The memory of replicas is added to every shard, because every rank stores all
replicas; on a GPU to its HBM, even if home rows are in host memory.

Shape letters: T tables, W ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, replace
from itertools import accumulate

from torchrec.distributed.planner.types import Perf, ShardingOption, Storage, Topology
from torchrec.distributed.types import CacheParams

from torchrec_picasso._torchrec import optimizer_multiplier
from torchrec_picasso.cost.forms import beside_home_row_bytes
from torchrec_picasso.cost.stock import StockCost
from torchrec_picasso.cost.table_work import HOT_ROW_BYTES
from torchrec_picasso.errors import PlanError
from torchrec_picasso.placement import FORMS, Form, HotColdParams
from torchrec_picasso.planner.home_blocks import filled_blocks
from torchrec_picasso.storage.exactness import HOT_COLD_KERNELS

TablePath = tuple[str, str]
"""Path of the module, name of the table."""

_RESERVED_SHARE = 0.15
"""Share of a rank's memory that TorchRec's planner reserves by default."""


def offered_options(options: Sequence[ShardingOption], form: Form) -> list[ShardingOption]:
    """Selects the options of a table that can hold its rows with a hot/cold exchange."""
    placed = [option for option in options if option.sharding_type == FORMS[form].sharding_type]
    return [option for option in placed if option.compute_kernel in HOT_COLD_KERNELS]


def hot_cold_options(
    options: Sequence[ShardingOption], placement: HotColdParams, block_rows_W: Sequence[int] | None
) -> list[ShardingOption]:
    """Converts the :func:`offered_options` of one table to hot/cold options, in place.
    ``placement`` replaces that of the constraints; TorchRec's own cache settings stay. Home blocks
    have ``block_rows_W`` rows; ``None`` = as :func:`.filled_blocks`."""
    kept = offered_options(options, placement.form)
    for option in kept:
        names = [field.name for field in fields(CacheParams)] if option.cache_params else []
        settings = {name: getattr(option.cache_params, name) for name in names}
        option.cache_params = replace(placement, **settings)
        rows_W = block_rows_W or filled_blocks(option.tensor.shape[0], len(option.shards))
        for shard, rows, end in zip(option.shards, rows_W, accumulate(rows_W), strict=True):
            shard.size, shard.offset = [rows, shard.size[1]], [end - rows, 0]
    return kept


def by_table(options: Sequence[ShardingOption]) -> dict[TablePath, list[ShardingOption]]:
    """Groups options by path of the module and name of the table, in order of appearance."""
    found: dict[TablePath, list[ShardingOption]] = {}
    for option in options:
        found.setdefault((option.path, option.name), []).append(option)
    return found


def optimizer_class(option: ShardingOption) -> type | None:
    """Returns the class of the optimizer fused into an option's table, or ``None``."""
    return getattr(option.tensor, "_optimizer_classes", [None])[0]


def replica_bytes(option: ShardingOption) -> int:
    """Computes the bytes of one rank's replicas, and of what says where they are; optimizer state
    as TorchRec estimates it in ``planner/shard_estimators.py``, ``_calculate_optimizer_sizes``."""
    if not isinstance(option.cache_params, HotColdParams):
        return 0
    shape = option.tensor.shape
    row_bytes = option.tensor.element_size() * shape[1]
    # rounded up after the sum over rows, like TorchRec's estimate
    num_hot = option.cache_params.num_hot_rows
    weight_bytes = num_hot * row_bytes
    state_share = optimizer_multiplier(optimizer_class(option), shape)
    return weight_bytes + math.ceil(weight_bytes * state_share) + num_hot * HOT_ROW_BYTES


def add_replica_storage(options: list[ShardingOption], compute_device: str) -> None:
    """Adds the memory of replicas, and of what is kept of each home row beside the row, to every
    shard of hot/cold options, in place: DDR on the CPU, else HBM, also for ``fused_uvm``, whose
    home rows are in host memory."""
    on_cpu = compute_device == "cpu"
    for option in options:
        params, replicas = option.cache_params, replica_bytes(option)
        if isinstance(params, HotColdParams):
            row_bytes = beside_home_row_bytes(params.num_hot_rows, params.form)
            for shard in option.shards:
                extra = replicas + row_bytes * shard.size[0]
                shard.storage += Storage(hbm=0 if on_cpu else extra, ddr=extra if on_cpu else 0)


def replica_budget_bytes(
    options_by_table: Sequence[Sequence[ShardingOption]], topology: Topology
) -> float:
    """Computes the bytes per rank that are free for replicas if tables are spread evenly."""
    used = sum(_per_rank(option, topology) for option in _smallest(options_by_table, topology))
    return max(0.0, _capacity_bytes(topology) * (1 - _RESERVED_SHARE) - used)


def explain_shortage(
    options: Sequence[ShardingOption], topology: Topology, reserved: Topology
) -> PlanError | None:
    """Returns the error for a plan that does not fit into ``reserved``, what TorchRec leaves of the
    topology; ``None`` if there is room for the smallest options with whole tables dealt out."""
    if not options:
        return None
    capacity, available = _capacity_bytes(topology), _capacity_bytes(reserved)
    memory = "ddr" if topology.compute_device == "cpu" else "hbm"
    # TorchRec reserves bytes for the dense part and the input, and this share of hbm
    share = 0.0 if memory == "ddr" else _RESERVED_SHARE
    fixed = max(0.0, capacity * (1 - share) - available)
    least = _smallest(by_table(options).values(), topology)
    bytes_TW = _deal_out(least, topology)
    needs_W = [sum(each) for each in zip(*bytes_TW)]
    need = max(needs_W)
    if need <= available:
        return None
    rank = needs_W.index(need)
    largest, its_bytes = max(
        zip(least, (bytes_W[rank] for bytes_W in bytes_TW)),
        key=lambda each: (each[1], each[0].path, each[0].name),
    )
    replicas = sum(map(replica_bytes, least))
    sufficient = int((need + fixed) / (1 - share)) + 1
    message = (
        f"the tables need {need:,.0f} bytes of {memory} on rank {rank}, but a rank has "
        f"{max(0.0, available):,.0f} ({capacity:,.0f} less what TorchRec reserves); the largest is "
        f"table {largest.name!r} with {its_bytes:,.0f}, {replica_bytes(largest):,} of them "
        f"replicas. Set {memory}_cap of the topology to at least {sufficient:,}"
    )
    if replicas and need - replicas <= available:
        params = [option.cache_params for option in least]
        hot = sum(each.num_hot_rows for each in params if isinstance(each, HotColdParams))
        # replicas that fit, if all rows had the mean size
        most = int(hot * (available - (need - replicas)) / replicas)
        message += f", or request at most {most:,} hot rows instead of {hot:,}"
    return PlanError(message)


def _deal_out(options: Sequence[ShardingOption], topology: Topology) -> list[list[float]]:
    """Returns the bytes of each option on each rank; single shards go to the emptiest rank, the
    largest ones first."""
    ranks = range(topology.world_size)
    found = [[0.0] * topology.world_size for _ in options]
    filled = [0.0] * topology.world_size
    shards = [[_bytes(shard.storage, topology) for shard in option.shards] for option in options]
    for t in sorted(range(len(options)), key=lambda t: (-len(shards[t]), -sum(shards[t]))):
        for index, shard_bytes in enumerate(shards[t]):
            emptiest = min(ranks, key=filled.__getitem__)
            rank = index if len(shards[t]) == topology.world_size else emptiest
            filled[rank] += shard_bytes
            found[t][rank] += shard_bytes
    return found


def _smallest(
    options_by_table: Iterable[Sequence[ShardingOption]], topology: Topology
) -> list[ShardingOption]:
    return [min(found, key=lambda o: _per_rank(o, topology)) for found in options_by_table]


def _per_rank(option: ShardingOption, topology: Topology) -> float:
    """Returns the bytes of an option per rank if its shards are spread evenly."""
    return _bytes(option.total_storage, topology) / topology.world_size


def _bytes(storage: Storage, topology: Topology) -> float:
    return float(storage.ddr if topology.compute_device == "cpu" else storage.hbm)


def _capacity_bytes(topology: Topology) -> float:
    return min(_bytes(device.storage, topology) for device in topology.devices)


def price_options(
    options: Sequence[ShardingOption],
    added: Mapping[TablePath, Mapping[str, StockCost]],
    world_size: int,
) -> None:
    """Sets ``Perf`` of options to what the table adds to a step of tables of that sharding type:
    ``added`` by table and type.

    TorchRec's partitioner sums the ``Perf`` of the shards on a rank and compares ranks.
    ``Perf.total`` excludes the input dist, so its cost is added to the forward exchange. An
    owner-pooled table has the cost of a table-wise one, on its home rank; a row-exchanged table
    that of a row-wise one, on all ranks. Options without a predicted cost keep their ``Perf``.
    """
    for option in options:
        cost = added.get((option.path, option.name), {}).get(option.sharding_type)
        if cost is None:
            continue
        # costs are means over ranks: a single shard has the work of all W ranks
        share = world_size / len(option.shards)
        perf = Perf(
            fwd_compute=cost.forward_ms * share,
            fwd_comms=(cost.forward_wire_ms + cost.ids_ms + cost.ids_wire_ms) * share,
            bwd_compute=cost.backward_ms * share,
            bwd_comms=cost.backward_wire_ms * share,
        )
        for shard in option.shards:
            shard.perf = perf
