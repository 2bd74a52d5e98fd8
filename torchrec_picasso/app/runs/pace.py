"""Wall time of a busy loop over its CPU time: the cost of shared cores, signs of other programs.

Ranks that share cores slow each other down by the same factor in every window; other programs do so
in some windows.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from statistics import fmean

import torch
import torch.distributed as dist

_BUSY_S = 0.05  # CPU time of a window
_UNEVEN = 1.1
"""Largest mean ratio of an idle machine, over the slowdown by its ranks alone. Two ranks on two
idle cores had 1.018 (windows 1.003 to 1.13), eight 4.06 (docs/dev/log.md, 2026-11-27)."""


class Pace:
    """Wall time over CPU time of a busy loop on all ranks at once, in short windows.

    Args:
        wall: Timer in seconds.
        cpu: Timer of this thread's CPU time, seconds.
    """

    def __init__(
        self,
        wall: Callable[[], float] = time.perf_counter,
        cpu: Callable[[], float] = time.thread_time,
    ) -> None:
        self._wall, self._cpu = wall, cpu
        self._numbers = torch.rand(1 << 16)
        self.ratios: list[float] = []
        """Of the slowest rank, by window."""

    def sample(self) -> None:
        """Measures a window. Collective."""
        dist.barrier()
        self.ratios.append(_most(self.own_ratio()))

    def own_ratio(self) -> float:
        """The ratio of this rank in one window."""
        wall_s, cpu_s = self._wall(), self._cpu()
        while self._cpu() - cpu_s < _BUSY_S:
            self._numbers.sort()
        return (self._wall() - wall_s) / (self._cpu() - cpu_s)

    def slowdown(self) -> float:
        """Slowdown of ranks by sharing cores: the smallest ratio, at most the ranks per core of the
        host that has most. Collective."""
        return max(1.0, min([_most(ranks_of_host() / num_cores()), *self.ratios]))

    def warning(self) -> str | None:
        """A sign that other programs ran, and what to do; ``None`` without one. Collective, after a
        window at least."""
        if fmean(self.ratios) <= _UNEVEN * self.slowdown():
            return None
        return (
            f"other programs used the cores: a busy loop took {min(self.ratios):.1f} to "
            f"{max(self.ratios):.1f} times its CPU time; the curves may be too slow: stop them and "
            "calibrate again"
        )


def times_fitting(left_s: float, once_s: float) -> float:
    """How often something fits into the time left, on the rank where it fits least. Collective."""
    return -_most(-max(0.0, left_s) / once_s)


def _most(number: float) -> float:
    """The largest number of a rank. Collective."""
    most = torch.tensor(number, dtype=torch.float64)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return float(most)


def ranks_of_host() -> int:
    """Ranks that share the cores of this host, by ``LOCAL_WORLD_SIZE``; all, if it is not set."""
    return int(os.environ.get("LOCAL_WORLD_SIZE") or dist.get_world_size())


def num_cores() -> int:
    """Cores that this process may use; quotas of control groups are not read."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
