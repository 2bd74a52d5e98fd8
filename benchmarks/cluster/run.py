"""Ranks on emulated hosts where the machine can, on loopback where it cannot, and which it was."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from benchmarks.cluster.awake import cores_awake
from benchmarks.cluster.emulated import EmulatedCluster, why_unavailable
from torchrec_picasso.app.launch.run_ranks import run_ranks


def usable_rate(rate_mbit: float | None) -> float | None:
    """The rate that links can have here: the one asked for, or none, said on standard error."""
    if rate_mbit is None or (reason := why_unavailable()) is None:
        return rate_mbit
    print(f"on loopback, not on links of {rate_mbit:g} Mbit/s: {reason}", file=sys.stderr)
    return None


def run_on_hosts(
    fn: Callable[..., Any],
    num_hosts: int,
    rate_mbit: float | None,
    *args: Any,
    timeout_s: float,
    ranks_per_host: int = 1,
) -> list[Any]:
    """:func:`run_ranks` with the ranks on hosts of their own, if the machine emulates any.

    A rate of ``None`` is loopback.

    Returns:
        The return value of each rank, by rank.
    """
    world_size = num_hosts * ranks_per_host
    if rate_mbit is None or why_unavailable() is not None:
        return run_ranks(fn, world_size, *args, timeout_s=timeout_s)
    with cores_awake(), EmulatedCluster(num_hosts, rate_mbit, ranks_per_host) as cluster:
        return run_ranks(fn, world_size, *args, timeout_s=timeout_s, on_start=cluster.on_start)
