"""What TorchRec's planner makes of a proposal: its rating, from plain numbers.

TorchRec rates a proposal by placing it, in tens of milliseconds for hundreds of tables, most of
them spent on small objects. On plain numbers the same placement takes one or two. Sums are taken in
TorchRec's order, so that a rating is the same float and a tie stays a tie.

Source: TorchRec ``planner/partitioners.py`` ``GreedyPerfPartitioner``, ``planner/perf_models.py``
``NoopPerfModel``: tables spread over all ranks are placed first, then the others, largest first,
each shard on the rank with the least time that has room; the rating is the busiest rank's time.

Letters: W ranks; a proposal has one option per table.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.planner.types import (
    PartitionByType,
    Perf,
    ShardingOption,
    Storage,
    Topology,
)

__all__ = ["Devices", "OptionFacts", "rate"]

Times = tuple[float, float, float, float, float]
"""The parts of ``Perf`` that count, in the order in which ``Perf.total`` adds them."""
Bytes = tuple[int, int, int]
"""Memory by kind: HBM, DDR, SSD."""


@dataclass(frozen=True, slots=True)
class OptionFacts:
    """One way to shard one table.

    Args:
        is_uniform: Whether each rank gets the shard of its number.
        times: Of each shard.
        total_ms: Sum of each shard's times.
        storages: Of each shard.
        storage: Of all shards, by which tables are placed.
    """

    is_uniform: bool
    times: tuple[Times, ...]
    total_ms: tuple[float, ...]
    storages: tuple[Bytes, ...]
    storage: Bytes

    @staticmethod
    def of(option: ShardingOption, world_size: int) -> OptionFacts | None:
        """Facts of an estimated option; ``None`` where TorchRec places it in another way."""
        is_uniform = option.partition_by == PartitionByType.UNIFORM.value
        is_known = is_uniform or option.partition_by == PartitionByType.DEVICE.value
        if option.dependency or not is_known:
            return None
        if option.compute_kernel == EmbeddingComputeKernel.KEY_VALUE.value:
            return None
        if is_uniform and len(option.shards) != world_size:
            return None
        storages = tuple(_bytes(shard.storage) for shard in option.shards)
        times = tuple(_times(shard.perf) for shard in option.shards)
        return OptionFacts(
            is_uniform=is_uniform,
            times=times,
            total_ms=tuple(_total(of) for of in times),
            storages=storages,
            storage=(
                sum(of[0] for of in storages),
                sum(of[1] for of in storages),
                sum(of[2] for of in storages),
            ),
        )


@dataclass(frozen=True)
class Devices:
    """What a proposal is placed on.

    Args:
        times_W: Time that each rank has taken already.
        free_W: Memory of each rank.
        place_on_host_W: Where each rank stands on its host; ties go to the lowest.
    """

    times_W: tuple[Times, ...]
    free_W: tuple[Bytes, ...]
    place_on_host_W: tuple[int, ...]

    @staticmethod
    def of(topology: Topology) -> Devices:
        """Devices of a topology, less what its storage reservation took."""
        return Devices(
            times_W=tuple(_times(device.perf) for device in topology.devices),
            free_W=tuple(_bytes(device.storage) for device in topology.devices),
            place_on_host_W=tuple(
                device.rank % topology.local_world_size for device in topology.devices
            ),
        )


def rate(proposal: Sequence[OptionFacts], devices: Devices) -> float | None:
    """The busiest rank's time when a proposal is placed.

    Args:
        proposal: One option per table, in the planner's order.
        devices: Where to place it.

    Returns:
        Milliseconds, or ``None`` where some shard finds no room.
    """
    times_W, free_W = list(devices.times_W), list(devices.free_W)
    world_size = len(times_W)
    for option in proposal:
        if option.is_uniform:
            for rank in range(world_size):
                free = _less(free_W[rank], option.storages[rank])
                if free is None:
                    return None
                free_W[rank] = free
                times_W[rank] = _plus(times_W[rank], option.times[rank])
    ranks_of = _place_on_least_busy(proposal, devices, times_W, free_W)
    if ranks_of is None:
        return None
    # not the sums above: TorchRec adds up once more, table by table
    rating_W = [0.0] * world_size
    for position, option in enumerate(proposal):
        ranks = range(world_size) if option.is_uniform else ranks_of[position]
        for rank, total in zip(ranks, option.total_ms):
            rating_W[rank] += total
    return max(rating_W)


def _place_on_least_busy(
    proposal: Sequence[OptionFacts],
    devices: Devices,
    times_W: list[Times],
    free_W: list[Bytes],
) -> dict[int, list[int]] | None:
    """Ranks of the shards of tables that are not spread; ``None`` where one finds no room."""
    order = [position for position, option in enumerate(proposal) if not option.is_uniform]
    order.sort(key=lambda position: proposal[position].storage, reverse=True)
    least_busy = [
        (_total(times), devices.place_on_host_W[rank], rank) for rank, times in enumerate(times_W)
    ]
    heapq.heapify(least_busy)
    ranks_of: dict[int, list[int]] = {}
    for position in order:
        option = proposal[position]
        ranks = ranks_of[position] = []
        for times, storage in zip(option.times, option.storages):
            full = []
            while True:
                _, place, rank = least_busy[0]
                free = _less(free_W[rank], storage)
                if free is not None:
                    break
                full.append(heapq.heappop(least_busy))
                if not least_busy:
                    return None
            free_W[rank] = free
            times_W[rank] = _plus(times_W[rank], times)
            heapq.heapreplace(least_busy, (_total(times_W[rank]), place, rank))
            for entry in full:
                heapq.heappush(least_busy, entry)
            ranks.append(rank)
    return ranks_of


def _plus(a: Times, b: Times) -> Times:
    return (a[0] + b[0], a[1] + b[1], a[2] + b[2], a[3] + b[3], a[4] + b[4])


def _total(times: Times) -> float:
    return times[0] + times[1] + times[2] + times[3] + times[4]


def _less(free: Bytes, taken: Bytes) -> Bytes | None:
    """What is left, or ``None`` if it does not fit."""
    if taken[0] > free[0] or taken[1] > free[1] or taken[2] > free[2]:
        return None
    return (free[0] - taken[0], free[1] - taken[1], free[2] - taken[2])


def _times(perf: Perf | None) -> Times:
    assert perf is not None, "the enumerator estimates every option"
    return (
        perf.fwd_compute,
        perf.bwd_compute,
        perf.fwd_comms,
        perf.bwd_comms,
        perf.prefetch_compute,
    )


def _bytes(storage: Storage | None) -> Bytes:
    assert storage is not None, "the enumerator estimates every option"
    return (storage.hbm, storage.ddr, storage.ssd)
