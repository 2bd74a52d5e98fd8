"""Predicted against measured: the cost model over tables, dims, skews, batches, ranks and links.

    python -m benchmarks.cost_model -o cost_model.json

For each network (world size x link rate) the ranks calibrate, then take steps of the embedding part
alone, with this package's exchange and with stock table-wise sharding, and compare what the model
said with what the clock and the byte meter said. Needs root and iproute2 for shaped links; without
them only loopback is measured, and the report says so.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torchrec.distributed.planner import Topology
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from benchmarks.cluster import run_on_hosts, why_unavailable
from torchrec_picasso.app.cli.calibrate import calibrate_on_rank
from torchrec_picasso.app.launch.environment import describe_environment
from torchrec_picasso.app.launch.quiet import quiet_upstream
from torchrec_picasso.app.runs.exchange_step import ExchangeStep, bag_collection, one_hot_batch
from torchrec_picasso.app.runs.placements import hot_cold_sharders, make_placement
from torchrec_picasso.app.zoo.data.generated import zipf_cdf
from torchrec_picasso.cost import CommCurves
from torchrec_picasso.cost.stock import max_over_mean, stock_cost, stock_totals
from torchrec_picasso.exchange.meter import WireMeter
from torchrec_picasso.frequency import FrequencyStats
from torchrec_picasso.planner import hot_cold_planner

_STATS_BATCHES = 20
_WARMUP_STEPS, _TIMED_STEPS = 2, 9
_TIMEOUT_S = 1500.0


@dataclass(frozen=True, kw_only=True)
class Network:
    """World size and link rate, Mbit/s; ``None`` = loopback."""

    world_size: int
    rate_mbit: float | None


@dataclass(frozen=True, kw_only=True)
class Point:
    """One shape of the embedding part."""

    tables: int
    dim: int
    batch_size: int
    zipf: float
    rows: int = 100_000
    hot_rows: int = 0


NETWORKS = (
    Network(world_size=2, rate_mbit=1000),
    Network(world_size=2, rate_mbit=100),
    Network(world_size=3, rate_mbit=1000),
    Network(world_size=4, rate_mbit=1000),
    Network(world_size=2, rate_mbit=None),
)
POINTS = (
    Point(tables=26, dim=128, batch_size=4096, zipf=1.05),
    Point(tables=26, dim=128, batch_size=4096, zipf=1.05, hot_rows=5_000),
    Point(tables=26, dim=64, batch_size=2048, zipf=0.0),
    Point(tables=8, dim=64, batch_size=8192, zipf=1.2, hot_rows=1_000),
    Point(tables=100, dim=16, batch_size=1024, zipf=1.05),
    Point(tables=26, dim=32, batch_size=4096, zipf=0.8, hot_rows=2_000),
)


@dataclass(frozen=True, kw_only=True)
class Result:
    """One point on one network under one placement."""

    network: Network
    point: Point
    placement: str
    predicted_ms: float
    measured_ms: float
    predicted_bytes: float
    measured_bytes: float
    predicted_phases: dict[str, float]
    measured_phases: dict[str, float]

    @property
    def ms_error(self) -> float:
        """Predicted over measured, minus 1."""
        return self.predicted_ms / self.measured_ms - 1

    @property
    def bytes_error(self) -> float:
        """Predicted over measured, minus 1."""
        return self.predicted_bytes / self.measured_bytes - 1


def batches(point: Point, seed: int) -> Iterator[KeyedJaggedTensor]:
    """Endless batches of one rank; the frequent ids lie scattered over each table."""
    rng = np.random.default_rng([seed, 7])
    cdf = zipf_cdf(point.rows, point.zipf)
    table_rng = np.random.default_rng(1)
    order_TR = [table_rng.permutation(point.rows) for _ in range(point.tables)]
    while True:
        rank_TB = np.searchsorted(cdf, rng.random((point.tables, point.batch_size)), "right")
        ids = np.stack([order_R[rank_B] for order_R, rank_B in zip(order_TR, rank_TB)])
        yield one_hot_batch(torch.from_numpy(ids))


def measure_network(
    rank: int, world_size: int, network: Network, points: Sequence[Point], max_bytes: int
) -> tuple[CommCurves, list[Result]]:
    """Calibrates and measures every point. Collective: the main function of every rank."""
    quiet_upstream()
    curves = calibrate_on_rank(rank, world_size, max_bytes, 0.3, True)
    results = []
    for point in points:
        stream = batches(point, seed=1000)
        stats = FrequencyStats.collect(
            (next(stream) for _ in range(_STATS_BATCHES)),
            bag_collection([point.rows] * point.tables, [point.dim] * point.tables),
        )
        for placement in ("hot_cold", "table_wise"):
            results.append(_measure(rank, network, point, placement, stats, curves))
            if rank == 0:
                print(_line(results[-1]), flush=True)
    return curves, results


def _measure(
    rank: int,
    network: Network,
    point: Point,
    name: str,
    stats: FrequencyStats,
    curves: CommCurves,
) -> Result:
    pg = dist.group.WORLD
    assert pg is not None
    collection = bag_collection([point.rows] * point.tables, [point.dim] * point.tables)
    placement = make_placement(
        name,
        collection,
        pg,
        device_type="cpu",
        batch_size=point.batch_size,
        hot_rows=point.hot_rows,
        stats=stats,
    )
    step = ExchangeStep(collection, placement, pg)
    stream = batches(point, seed=rank)
    for _ in range(_WARMUP_STEPS):
        step.run(next(stream))
    with WireMeter() as meter:
        step.run(next(stream))
    times = []
    for _ in range(_TIMED_STEPS):
        batch = next(stream)
        dist.barrier()
        taken = step.run(batch)
        times.append([taken.input_dist_ms, taken.forward_ms, taken.backward_ms])
    slowest = torch.tensor(times, dtype=torch.float64)
    total_ms = slowest.sum(1)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    dist.all_reduce(total_ms, dist.ReduceOp.MAX)
    del step
    gc.collect()  # a sharded module is full of cycles, and its tables of memory
    sent = torch.tensor(float(meter.count.sent_bytes), dtype=torch.float64)
    dist.all_reduce(sent)
    planner = hot_cold_planner(
        Topology(world_size=pg.size(), local_world_size=1, compute_device="cpu"),
        stats,
        hot_rows=point.hot_rows,
        curves=curves,
        batch_size=point.batch_size,
        debug=False,
    )
    tables = bag_collection([point.rows] * point.tables, [point.dim] * point.tables)
    planner.plan(tables, hot_cold_sharders())
    decision = planner.decision
    cost = decision.choice.cost
    if name == "table_wise":
        cost = stock_cost(
            name,
            stock_totals(name, decision.works),
            curves,
            pg.size(),
            uneven=max_over_mean(name, [work.load for work in decision.works], pg.size()),
        )
    return Result(
        network=network,
        point=point,
        placement=name,
        predicted_ms=cost.total_ms,
        measured_ms=median(total_ms.tolist()),
        predicted_bytes=cost.total_bytes,
        measured_bytes=float(sent) / pg.size(),
        predicted_phases={
            "input_dist": cost.input_dist_ms,
            "forward": cost.forward_compute_ms + cost.forward_comms_ms,
            "backward": cost.backward_ms,
        },
        measured_phases={
            phase: median(slowest[:, index].tolist())
            for index, phase in enumerate(("input_dist", "forward", "backward"))
        },
    )


def _line(result: Result) -> str:
    network, point = result.network, result.point
    rate = f"{network.rate_mbit:g} Mbit/s" if network.rate_mbit else "loopback"
    shape = (
        f"{point.tables} x {point.dim}, B={point.batch_size}, zipf {point.zipf:g}, "
        f"{point.hot_rows} hot"
    )
    phases = " ".join(
        f"{result.predicted_phases[p]:.0f}/{result.measured_phases[p]:.0f}"
        for p in result.predicted_phases
    )
    return (
        f"{network.world_size} ranks {rate:<12} {shape:<42} {result.placement:<10} "
        f"{result.predicted_ms:7.1f} / {result.measured_ms:7.1f} ms {result.ms_error:+6.0%}  "
        f"{result.predicted_bytes / 1e6:6.2f} / {result.measured_bytes / 1e6:6.2f} MB "
        f"{result.bytes_error:+7.1%}  [{phases}]"
    )


def report(results: Sequence[Result]) -> dict[str, Any]:
    """Errors of the prediction, and where it errs most, per placement."""
    found: dict[str, Any] = {}
    for placement in ("hot_cold", "table_wise"):
        of = [result for result in results if result.placement == placement]
        errors = sorted(abs(result.ms_error) for result in of)
        found[placement] = {
            "points": len(of),
            "ms_median_error": median(errors),
            "ms_worst_error": errors[-1],
            "bytes_worst_error": max(abs(result.bytes_error) for result in of),
            "worst": [_line(r) for r in sorted(of, key=lambda r: -abs(r.ms_error))[:3]],
        }
    return found


def main() -> int:
    """Runs the grid and prints the report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("-o", "--out", default="cost_model.json", metavar="FILE")
    parser.add_argument("--networks", type=int, nargs="*", help="only these, counted from 0")
    parser.add_argument("--max-mib", type=float, default=64, help="largest calibrated buffer")
    args = parser.parse_args()
    networks = [NETWORKS[i] for i in args.networks] if args.networks else list(NETWORKS)
    reason = why_unavailable()
    if reason is not None:
        print(f"shaped links are left out: {reason}", file=sys.stderr)
        networks = [network for network in networks if network.rate_mbit is None]
    max_bytes = int(args.max_mib * (1 << 20))
    results: list[Result] = []
    curves = []
    for network in networks:
        arguments = (network, POINTS, max_bytes)
        measured = run_on_hosts(
            measure_network,
            network.world_size,
            network.rate_mbit,
            *arguments,
            timeout_s=_TIMEOUT_S,
        )[0]
        curves.append(asdict(measured[0]))
        results += measured[1]
    summary = report(results)
    document = {
        "environment": describe_environment(),
        "summary": summary,
        "results": [asdict(result) for result in results],
        "curves": curves,
    }
    Path(args.out).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    for placement, numbers in summary.items():
        print(
            f"{placement}: {numbers['points']} points; step ms off by "
            f"{numbers['ms_median_error']:.0%} (median), {numbers['ms_worst_error']:.0%} (worst); "
            f"bytes by {numbers['bytes_worst_error']:.1%} at most; errs most at:"
        )
        for line in numbers["worst"]:
            print(f"  {line}")
    print(f"wrote {args.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
