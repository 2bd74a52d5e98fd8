"""Overhead of the unique exchange on one GPU, where there is nothing to exchange.

Stock table-wise sharding looks rows up by one fused kernel. The unique path sorts ids, gathers
unique rows and pools them, which pays only where rows have to travel; on one rank it is all
overhead. The ids are Zipf ids of 26 generated tables.
"""

from __future__ import annotations

from dataclasses import asdict

from benchmarks.gpu.clock import count_syncs, take_turns
from benchmarks.gpu.one_rank import one_rank
from benchmarks.gpu.report import PartReport, timings
from benchmarks.gpu.settings import GpuSettings
from benchmarks.gpu.variants import Variant, Workload, interleaved
from torchrec_picasso.app.launch.quiet import quiet_upstream

_STOCK = "table_wise"
_WARMUP_STEPS, _COUNTED_STEPS = 5, 4
_MOST_SITES = 8


def overhead(rank: int, world_size: int, settings: GpuSettings) -> PartReport:
    """Runs the part; the main function of its only rank."""
    quiet_upstream()
    with one_rank(settings.device) as device:
        work = Workload.make(settings.timed, settings.num_batches, device)
        hot = settings.timed.hot_rows
        trainers = {
            _STOCK: work.trainer(device, None),
            "hot_cold:0": work.trainer(device, 0),
            f"hot_cold:{hot}": work.trainer(device, hot),
        }
        for num_micro in settings.micro_batches:
            name = f"interleaved:{num_micro}:{hot}"
            trainers[name] = work.trainer(device, hot, interleaved(num_micro))
        variants = {name: Variant(t, work.batches) for name, t in trainers.items()}
        for variant in variants.values():
            variant.train(_WARMUP_STEPS)
        syncs = {
            name: count_syncs(variant, _COUNTED_STEPS, device) for name, variant in variants.items()
        }
        step_ms = take_turns(variants, settings.rounds, settings.block_steps, device)
    found = timings(step_ms, _STOCK)
    rows = [
        {
            "variant": name,
            "step ms": f"{timing.median_ms:.2f}",
            "quartiles": f"{timing.low_ms:.2f} to {timing.high_ms:.2f}",
            "x stock": f"{timing.ratio:.2f}",
            "by round": f"{timing.ratio_range[0]:.2f} to {timing.ratio_range[1]:.2f}",
            "host syncs": f"{sum(syncs[name].values()):.1f}" if device.type == "cuda" else "-",
        }
        for name, timing in found.items()
    ]
    notes = [
        f"host syncs per step of {name}: "
        + ", ".join(f"{count:g} at {site}" for site, count in list(sites.items())[:_MOST_SITES])
        for name, sites in syncs.items()
        if sites
    ]
    return PartReport(
        name="overhead: the unique exchange against stock, both with nothing to exchange",
        rows=rows,
        notes=notes,
        facts={
            "timings": {name: asdict(timing) for name, timing in found.items()},
            "step_ms": step_ms,
            "host_syncs_per_step": syncs,
        },
    )
