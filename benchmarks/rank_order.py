"""Training steps of hosts in two racks, with ranks in the given order and in the one chosen.

    OMP_NUM_THREADS=1 python -m benchmarks.rank_order -o rank_order.json

Hosts are plugged into the racks in turns, so each ring in the given order crosses between the racks
at every host. The link between the racks has the rate of a host's link. The order is that of
``torchrec-picasso order``, applied as by ``--rank-order``. A DLRM with MLPerf's towers trains on
real Criteo ids with default options; runs of both orders take turns. A step lasts as long as on the
slowest rank. Bytes are what one rack sent to the other in a step, headers included, over a run.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import torch.distributed as dist

from benchmarks.cluster import EmulatedCluster
from benchmarks.cluster.awake import cores_awake
from benchmarks.cluster.emulated import host_address
from benchmarks.command import at_least, can_write, command_parser
from benchmarks.turns import in_turns
from torchrec_picasso.app.cli.calibrate import calibrate_on_rank
from torchrec_picasso.app.cli.launcher import join_torchrun
from torchrec_picasso.app.cli.order import measure_on_rank, print_ring
from torchrec_picasso.app.cli.outputs import write_result
from torchrec_picasso.app.config import DataConfig, ModelConfig, ShardingConfig, TrainConfig
from torchrec_picasso.app.launch.host_ring import HostRing
from torchrec_picasso.app.launch.quiet import quiet_upstream
from torchrec_picasso.app.launch.run_ranks import run_ranks
from torchrec_picasso.app.runs.trainer import Trainer
from torchrec_picasso.app.zoo.registry import make_source
from torchrec_picasso.schedule.schedule import NUM_BATCHES
from torchrec_picasso.schedule.setting_choice import NUM_STEPS

WARMUP_STEPS = NUM_STEPS + NUM_BATCHES
"""Steps before timed ones: the pipeline tries settings."""
_TIMEOUT_S = 900.0
_BYTES = 4 << 20  # largest exchange of both measurements
_PORT = "29500"  # a host of its own has no port taken


def configuration(path: Path, batch_size: int, curves: Path) -> TrainConfig:
    """Returns the run's configuration: MLPerf's DLRM, planned with measured curves."""
    data = DataConfig(
        path=str(path), batch_size=batch_size, max_rows=100_000, cardinalities="criteo_terabyte_10m"
    )
    model = ModelConfig(
        embedding_dim=128, dense_layers=(512, 256), over_layers=(1024, 1024, 512, 256)
    )
    return TrainConfig(data=data, model=model, sharding=ShardingConfig(curves=str(curves)))


def train(
    rank: int, world_size: int, config: TrainConfig, order: str | None, num_steps: int
) -> dict[str, Any]:
    """Trains one run in the order of a file; the main function of every rank, by torchrun's number.

    Returns:
        Milliseconds of each timed step, this rank's loss of all steps, and the setting chosen.
    """
    quiet_upstream()
    dist.barrier()  # all are connected; then the ranks join as they do under torchrun
    dist.destroy_process_group()
    os.environ.update(MASTER_ADDR=host_address(0), MASTER_PORT=_PORT)
    join_torchrun(_TIMEOUT_S, order)
    source = make_source(config.data, config.seed)
    trainer = Trainer(config, source)
    steps_ms, losses = [], []
    start_s = time.perf_counter()
    batches = source.batches(dist.get_rank(), world_size)
    for loss in trainer.steps(batches, WARMUP_STEPS + num_steps + 3):  # the last prefetch nothing
        losses.append(loss)
        steps_ms.append((time.perf_counter() - start_s) * 1e3)
        start_s = time.perf_counter()
    assert trainer.interleaved is not None
    return {
        "steps_ms": steps_ms[WARMUP_STEPS:-3],
        "setting": str(trainer.interleaved.setting),
        "losses": [float(loss) for loss in losses],
    }


def prepare(
    cluster: EmulatedCluster, data: Path, batch_size: int, folder: Path
) -> tuple[TrainConfig, HostRing, str]:
    """Measures curves and order, as ``calibrate --no-local`` and ``order``; also writes a file of
    the order, which is returned last."""
    start: dict[str, Any] = {"timeout_s": _TIMEOUT_S, "on_start": cluster.on_start}
    curves, order = folder / "curves.json", folder / "order.json"
    run_ranks(calibrate_on_rank, cluster.world_size, _BYTES, 0.3, False, **start)[0].to_json(curves)
    ring, _ = run_ranks(measure_on_rank, cluster.world_size, _BYTES, **start)[0]
    print_ring(ring, cluster.world_size)
    write_result({"order": ring.order}, order)
    return configuration(data, batch_size, curves), ring, str(order)


def run_of(
    cluster: EmulatedCluster, config: TrainConfig, order: str | None, num_steps: int
) -> dict[str, Any]:
    """Trains one run on the cluster; returns milliseconds, bytes, losses and setting."""
    before = cluster.uplink_bytes()
    run = (config, order, num_steps)
    ranks = run_ranks(
        train, cluster.world_size, *run, timeout_s=_TIMEOUT_S, on_start=cluster.on_start
    )
    sent = max(a - b for a, b in zip(cluster.uplink_bytes(), before))
    losses = [sum(losses) / cluster.world_size for losses in zip(*(r["losses"] for r in ranks))]
    return {
        "step_ms": median(map(max, zip(*(r["steps_ms"] for r in ranks)))),
        "uplink_mb": sent / 1e6 / len(losses),
        "setting": ranks[0]["setting"],
        "losses": losses,
    }


def main() -> int:
    """Measures the order, trains in turns with the given and the chosen one, writes both."""
    parser = command_parser("benchmarks.rank_order", __doc__)
    parser.add_argument("--data", type=Path, default=Path("../shared/data/criteo_tb_80k.parquet"))
    parser.add_argument("--rate-mbit", type=float, default=200.0)
    parser.add_argument("-o", "--out", type=Path, default=Path("rank_order.json"))
    for name, default, least in (
        ("--hosts", 4, 4),
        ("--ranks-per-host", 1, 1),
        ("--batch-size", 1024, 1),
        ("--rounds", 4, 1),
        ("--steps", 16, 1),
    ):
        parser.add_argument(name, type=at_least(least), default=default)
    args = parser.parse_args()
    if not can_write(args, "out"):
        return 2
    racks = [host % 2 for host in range(args.hosts)]
    hosts = EmulatedCluster(args.hosts, args.rate_mbit, args.ranks_per_host, racks=racks)
    runs: dict[str, list[dict[str, Any]]] = {"given": [], "chosen": []}
    with tempfile.TemporaryDirectory() as folder, cores_awake(), hosts as cluster:
        config, ring, order = prepare(cluster, args.data, args.batch_size, Path(folder))
        for _, name in in_turns(("given", "chosen"), args.rounds):
            file = order if name == "chosen" else None
            runs[name].append(run_of(cluster, config, file, args.steps))
            print(name, {k: v for k, v in runs[name][-1].items() if k != "losses"}, flush=True)
    gains = [given["step_ms"] / chosen["step_ms"] for given, chosen in zip(*runs.values())]
    question = {name: value for name, value in vars(args).items() if name not in ("data", "out")}
    print(f"step: {median(gains):.2f} x faster ({min(gains):.2f} to {max(gains):.2f})")
    write_result(
        {"question": question, "ring": asdict(ring), "order": ring.order, "runs": runs}, args.out
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
