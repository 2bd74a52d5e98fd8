"""``torchrec-picasso order``: measures hosts, and writes the order that their ranks should have."""

from __future__ import annotations

import argparse
import dataclasses
from statistics import median
from typing import Any

import torch.distributed as dist

from torchrec_picasso.app.cli.launcher import run_on_ranks
from torchrec_picasso.app.cli.outputs import print_table, write_result
from torchrec_picasso.app.launch.host_ring import HostRing, measure_hosts
from torchrec_picasso.app.launch.rank_order import describe_rank, host_places

_TIMEOUT_S = 300.0  # of one exchange
_SUM_BYTES = 10_000_000


def run(args: argparse.Namespace) -> None:
    """Runs the subcommand; raises PicassoError for unusable input."""
    num_bytes = max(1, int(args.mib * (1 << 20)))
    found = run_on_ranks(measure_on_rank, args, num_bytes, timeout_s=_TIMEOUT_S)
    if found is None:  # another rank writes
        return
    ring, world_size = found
    print_ring(ring, world_size)
    write_result({"order": ring.order, **dataclasses.asdict(ring)}, args.out)
    print(f"wrote {args.out}: {', '.join(ring.order)}")


def measure_on_rank(rank: int, world_size: int, num_bytes: int) -> tuple[HostRing, int]:
    """Measures the hosts; also returns the number of ranks. Collective: every rank's function.

    Raises:
        ConfigError: On all ranks, if hosts have the same name, or ``LOCAL_RANK`` is not set.
    """
    infos_W: list[dict[str, Any]] = [{}] * world_size
    dist.all_gather_object(infos_W, describe_rank(None))
    host_places(infos_W)
    return measure_hosts([info["host"] for info in infos_W], num_bytes), world_size


def print_ring(ring: HostRing, world_size: int) -> None:
    """Prints the times of pairs, and of the given and the best ring."""
    if not ring.ring:
        print(f"{len(ring.hosts)} hosts: fewer than four have one ring, so their order stays")
        return
    print(
        f"ms in which two hosts exchange {ring.num_bytes / 1e6:.1f} MB each way, all hosts at once"
    )
    cells = ([f"{ms:.1f}" if ms else "-" for ms in ms_Y] for ms_Y in ring.pair_ms_YY)
    print_table(("", *ring.hosts), *((host, *row) for host, row in zip(ring.hosts, cells)))
    print(f"ring of {len(ring.hosts)} hosts, {world_size} ranks")
    lines = [
        (name, f"{median(ms):.1f}", f"{ring.sum_ms(ms, _SUM_BYTES, world_size):.0f}")
        for name, ms in (("given", ring.given_ms), ("best of pairs", ring.best_ms))
    ]
    print_table(("", "ms", f"ms to sum {_SUM_BYTES / 1e6:.0f} MB of gradients"), *lines)
    if not ring.is_faster:
        print("the given order stays: the best of pairs is not 5 % faster in every round")
