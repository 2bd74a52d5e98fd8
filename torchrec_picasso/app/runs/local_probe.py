"""Measures the local work of a step with the real sharded modules.

On the CPU the timer is the CPU time of the training thread, which excludes waiting for the network,
scaled by the slowdown of a busy loop on all ranks that share the cores. An accelerator has no such
timer: there each rank probes in a group of its own. The shapes vary tables, batch size, columns and
repetition, so that each coefficient of :class:`LocalWork` can be fitted.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch
import torch.distributed as dist

from torchrec_picasso.app.runs.exchange_step import ExchangeStep, bag_collection, one_hot_batch
from torchrec_picasso.app.runs.placements import make_placement
from torchrec_picasso.cost.local import PHASES, LocalCosts, LocalWork, PhaseCost, SideCosts

_WARMUP_STEPS, _TIMED_STEPS = 2, 5
_WARMUP_STEPS_SLOW, _TIMED_STEPS_SLOW = 1, 2
_SLOW_STEP_S = 1.0
"""Fewer steps are taken of probes that the network makes slower than this."""
_BUSY_S = 0.3
_TABLES_BYTES = 1 << 29  # far larger than caches and TLB
_ELEMENT_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class _Probe:
    tables: int
    batch_size: int
    dim: int
    rows_per_sample: float
    """Rows in use of each table, relative to the batch size; a small ratio repeats ids."""


PROBES = (
    _Probe(tables=4, batch_size=256, dim=16, rows_per_sample=1),
    _Probe(tables=100, batch_size=256, dim=16, rows_per_sample=1),
    _Probe(tables=26, batch_size=4096, dim=16, rows_per_sample=4),
    _Probe(tables=26, batch_size=4096, dim=16, rows_per_sample=1 / 8),
    _Probe(tables=26, batch_size=512, dim=128, rows_per_sample=4),
    _Probe(tables=26, batch_size=4096, dim=64, rows_per_sample=1),
    _Probe(tables=26, batch_size=2048, dim=128, rows_per_sample=1 / 8),
    _Probe(tables=26, batch_size=4096, dim=128, rows_per_sample=4),
    _Probe(tables=26, batch_size=4096, dim=128, rows_per_sample=1 / 2),
    _Probe(tables=26, batch_size=4096, dim=128, rows_per_sample=1 / 8),
    _Probe(tables=8, batch_size=8192, dim=64, rows_per_sample=1 / 4),
    _Probe(tables=8, batch_size=2048, dim=128, rows_per_sample=1),
    _Probe(tables=60, batch_size=1024, dim=32, rows_per_sample=2),
)


def measure_local_costs(
    device: torch.device | None = None, advance: Callable[[], None] = lambda: None
) -> LocalCosts:
    """Fits the local costs of hot/cold and stock sharding; all ranks return those of the slowest.

    Collective: every rank of the default process group calls this, in the same order.

    Args:
        device: Device of the tables; CPU if ``None``.
        advance: Called after each probe.
    """
    device = device or torch.device("cpu")
    if device.type == "cpu":
        pg, clock, slowdown = dist.group.WORLD, time.thread_time, _slowdown_by_sharing()
        assert pg is not None, "init_process_group comes first"
    else:
        groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
        pg, clock, slowdown = groups[dist.get_rank()], time.perf_counter, 1.0
    measured: dict[str, list[tuple[LocalWork, list[float]]]] = {"hot_cold": [], "table_wise": []}
    for probe in PROBES:
        for placement, results in measured.items():
            results.append(_probe(placement, probe, pg, device, clock))
        advance()
    costs = {}
    for placement, results in measured.items():
        works, times = zip(*results)
        phases_ms = [[ms * slowdown for ms in phase_ms] for phase_ms in zip(*times)]
        input_dist, forward, backward = (PhaseCost.fit(works, ms) for ms in phases_ms)
        costs[placement] = SideCosts(input_dist=input_dist, forward=forward, backward=backward)
    return LocalCosts(hot_cold=costs["hot_cold"], stock=costs["table_wise"], measured=True)


def _slowdown_by_sharing() -> float:
    """Wall time over CPU time of a busy loop on all ranks at once. Collective."""
    numbers = torch.rand(1 << 18)
    numbers.sort()
    dist.barrier()
    wall_s, cpu_s = time.perf_counter(), time.thread_time()
    while time.thread_time() - cpu_s < _BUSY_S:
        numbers.sort()
    ratio = torch.tensor((time.perf_counter() - wall_s) / (time.thread_time() - cpu_s))
    dist.all_reduce(ratio, dist.ReduceOp.SUM)
    return max(1.0, float(ratio) / dist.get_world_size())


def _probe(
    placement_name: str,
    probe: _Probe,
    pg: dist.ProcessGroup,
    device: torch.device,
    clock: Callable[[], float],
) -> tuple[LocalWork, list[float]]:
    """Work of a shape, and ms by phase: the median over steps of the slowest rank."""
    used = max(1, round(probe.batch_size * probe.rows_per_sample))
    rows = max(used, _TABLES_BYTES // (probe.tables * probe.dim * _ELEMENT_BYTES))
    collection = bag_collection([rows] * probe.tables, [probe.dim] * probe.tables)
    placement = make_placement(
        placement_name, collection, pg, device_type=device.type, batch_size=probe.batch_size
    )
    step = ExchangeStep(collection, placement, pg, device, clock)
    generator = torch.Generator().manual_seed(dist.get_rank())
    times: list[list[float]] = []
    unique = 0.0
    num_warmup, num_timed = _WARMUP_STEPS, _TIMED_STEPS
    index = 0
    while index < num_warmup + num_timed:
        ids_TB = torch.randint(used, (probe.tables, probe.batch_size), generator=generator)
        ids_TB *= rows // used  # scatter the rows in use over the table
        dist.barrier()
        start_s = time.perf_counter()
        taken = step.run(one_hot_batch(ids_TB).to(device))
        if index == 0:
            slowest_s = torch.tensor(time.perf_counter() - start_s)
            dist.all_reduce(slowest_s, dist.ReduceOp.MAX)
            if slowest_s > _SLOW_STEP_S:
                num_warmup, num_timed = _WARMUP_STEPS_SLOW, _TIMED_STEPS_SLOW
        if index >= num_warmup:
            times.append([getattr(taken, f"{phase}_ms") for phase in PHASES])
            unique += sum(ids_B.unique().numel() for ids_B in ids_TB) / num_timed
        index += 1
    del step
    gc.collect()
    lookups = float(probe.tables * probe.batch_size)
    # expected number of distinct rows in the batches of all ranks
    updated_per_table = used * (1 - (1 - 1 / used) ** (probe.batch_size * pg.size()))
    buffered = lookups + 2 * unique if placement_name == "hot_cold" else 2 * lookups
    work = LocalWork(
        features=probe.tables,
        lookups=lookups,
        rows=unique,
        lookup_elements=lookups * probe.dim,
        row_elements=unique * probe.dim,
        buffer_elements=buffered * probe.dim,
        updated=probe.tables * updated_per_table / pg.size(),
    )
    slowest = torch.tensor(times, dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return work, [median(times_ms) for times_ms in slowest.T.tolist()]
