"""Measures the collectives of a process group, smallest sizes first, until the time for it is up.

All ranks do the same: repetitions and sizes are agreed by the slowest rank's times, because a step
waits for it. A size is begun for all collectives or for none, and not if it would outlast the
budget; what lies beyond the last one is a straight line, see :class:`Curve`. Ranks take turns in
coming a little late, as in a step one always does; gloo's all-to-all takes up to twice as long so.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from torchrec_picasso.cost.collective_calls import BYTES_PER_FLOAT, CALLS, COLLECTIVES
from torchrec_picasso.cost.curve import Curve
from torchrec_picasso.cost.hardware import describe_hardware
from torchrec_picasso.errors import PicassoError

__all__ = ["measure_curves", "num_points"]

_MIN_BYTES, _GROWTH = 4 << 10, 4
_MIN_SIZES = 2  # a slope needs two
_WARMUPS, _MIN_REPEATS, _MAX_REPEATS = 2, 5, 40
_LATE_MS = 1.0


def measure_curves(
    pg: dist.ProcessGroup,
    device: torch.device | None,
    max_bytes: int,
    seconds_per_point: float,
    ranks_per_host: int | None,
    budget_s: float,
    advance: Callable[[str], None],
) -> dict[str, Any]:
    """Does the work of ``CommCurves.measure``; its arguments. Collective."""
    if not budget_s > 0:
        raise PicassoError(f"budget_s is {budget_s}, expected more than 0 seconds")
    device = device or torch.device("cpu")
    per_host = ranks_per_host or int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    clock = _AgreedClock(pg)
    measuring = _Measuring(pg, clock, device, seconds_per_point, budget_s, advance)
    curves = measuring.curves(_sizes(max_bytes))
    core_ns = measuring.core_ns_per_byte(curves["row_exchange"])
    return {
        "world_size": pg.size(),
        "ranks_per_host": per_host,
        "backend": dist.get_backend(pg),
        "device": device.type,
        "collectives": curves,
        "wire_core_ns": core_ns,
        "measured_on": _told_by_first_rank(describe_hardware(device), pg),
    }


def num_points(world_size: int, max_bytes: int) -> int:
    """How often a measurement calls its ``advance``."""
    return 0 if world_size == 1 else len(COLLECTIVES) * len(_sizes(max_bytes))


def _sizes(max_bytes: int) -> list[int]:
    sizes = [_MIN_BYTES]
    while sizes[-1] * _GROWTH <= max_bytes:
        sizes.append(sizes[-1] * _GROWTH)
    return sizes


class _AgreedClock:
    """Times that all ranks of a group agree on: the slowest one's. Collective, all of it."""

    def __init__(self, pg: dist.ProcessGroup) -> None:
        self._pg = pg
        dist.barrier(group=pg)
        self._start_s = _now_s()

    def elapsed_s(self) -> float:
        """Seconds since the start."""
        return self.slowest([_now_s() - self._start_s])[0]

    def slowest(self, times: list[float]) -> list[float]:
        """The largest of all ranks, one by one."""
        gathered: list[list[float]] = [[] for _ in range(self._pg.size())]
        dist.all_gather_object(gathered, times, group=self._pg)
        return [max(of_rank) for of_rank in zip(*gathered)]


class _Measuring:
    """The curves of a group.

    Args:
        group: Its ranks.
        clock: Agreed on by all of them.
        device: Where the tensors are.
        seconds_per_point: About how long a size is repeated, if the time allows.
        until_s: When the clock stops the measurement.
        advance: Called with a word on each point, measured or left out.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        clock: _AgreedClock,
        device: torch.device,
        seconds_per_point: float,
        until_s: float,
        advance: Callable[[str], None],
    ) -> None:
        self._group, self._clock, self._device = group, clock, device
        self._seconds_per_point, self._until_s = seconds_per_point, until_s
        self._advance = advance

    def curves(self, sizes: list[int]) -> dict[str, Curve]:
        """Measures every collective. Collective."""
        if self._group.size() == 1:
            return {name: Curve.line(0.0, float("inf")) for name in COLLECTIVES}
        points: dict[str, list[tuple[int, float]]] = {name: [] for name in COLLECTIVES}
        points_left, is_over = len(sizes) * len(COLLECTIVES), False
        for index, size in enumerate(sizes):
            is_over = is_over or (index >= _MIN_SIZES and not self._has_time_for(points))
            for name in COLLECTIVES:
                left_s = 0.0 if is_over else self._until_s - self._clock.elapsed_s()
                is_over = is_over or (index >= _MIN_SIZES and left_s <= 0)
                if not is_over:
                    seconds = min(self._seconds_per_point, max(0.0, left_s) / points_left)
                    points[name].append(self._point(name, size, seconds))
                points_left -= 1
                self._advance(f"{name}, {size >> 10} KiB")
        return {name: Curve.fit(*zip(*found)) for name, found in points.items()}

    def core_ns_per_byte(self, row_exchange: Curve) -> float | None:
        """What a byte of a row exchange takes of this process's cores; the most of all. Collective.

        Args:
            row_exchange: Measured; the largest size that there is time for is taken again.

        Returns:
            ``None`` where nothing is sent, where devices send by themselves, and without time left.
        """
        if self._device.type != "cpu" or self._group.size() == 1:
            return None
        left_ms = (self._until_s - self._clock.elapsed_s()) * 1e3
        points = zip(row_exchange.sent_bytes, row_exchange.ms)
        fitting = [sent for sent, ms in points if ms * (1 + _MIN_REPEATS) <= left_ms]
        if not fitting:
            return None
        numel = fitting[-1] // BYTES_PER_FLOAT
        sent, call = CALLS["row_exchange"](self._group, numel, self._device)
        call()
        dist.barrier(group=self._group)
        start_s = time.process_time()
        for _ in range(_MIN_REPEATS):
            call()
        taken_ns = (time.process_time() - start_s) * 1e9 / _MIN_REPEATS
        (most_ns,) = self._clock.slowest([taken_ns])
        return most_ns / max(1, sent)

    def _has_time_for(self, points: dict[str, list[tuple[int, float]]]) -> bool:
        """Whether the next size can be measured for all, should it take as much longer as it is."""
        last_ms = sum(found[-1][1] for found in points.values())
        expected_s = last_ms * _GROWTH * (_WARMUPS + _MIN_REPEATS) / 1e3
        return self._clock.elapsed_s() + expected_s <= self._until_s

    def _point(self, name: str, size: int, seconds: float) -> tuple[int, float]:
        """Bytes of the busiest rank, and the median time in milliseconds."""
        num_bytes, call = CALLS[name](self._group, size // BYTES_PER_FLOAT, self._device)
        # warm-up twice: the first connects, the second tells how often the size can be repeated
        self._time_ms(call)
        (first_ms,) = self._clock.slowest([self._time_ms(call)])
        repeats = int(max(_MIN_REPEATS, min(_MAX_REPEATS, seconds * 1e3 / max(first_ms, 1e-3))))
        times = []
        for turn in range(repeats):
            dist.barrier(group=self._group)
            if turn % self._group.size() == self._group.rank():
                time.sleep(_LATE_MS / 1e3)
                times.append(self._time_ms(call))
            else:  # from the late rank's coming on
                times.append(max(0.0, self._time_ms(call) - _LATE_MS))
        return num_bytes, median(self._clock.slowest(times))

    def _time_ms(self, call: Callable[[], object]) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        start_s = _now_s()
        call()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return (_now_s() - start_s) * 1e3


def _now_s() -> float:
    return time.perf_counter()


def _told_by_first_rank(facts: dict[str, str | int], pg: dist.ProcessGroup) -> dict[str, str | int]:
    told: list[dict[str, str | int]] = [facts]
    dist.broadcast_object_list(told, group_src=0, group=pg)
    return told[0]
