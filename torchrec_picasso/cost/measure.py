"""Measures the collectives of a process group, in ascending size, within a time budget.

All ranks measure the same sizes equally often: both follow from times of the slowest rank, because
a training step waits for that rank. A size is measured for all collectives or for none, and only if
it is expected to fit into the budget; :class:`Curve` extrapolates beyond the last size. In each
repetition one rank starts late, as in a training step: gloo's all-to-all then takes up to twice as
long.
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
_MIN_SIZES = 2  # a slope needs two points
_WARMUPS, _MIN_REPEATS, _MAX_REPEATS = 2, 5, 40
_LATE_MS = 1.0  # delay of the late rank


def measure_curves(
    pg: dist.ProcessGroup,
    device: torch.device | None,
    max_bytes: int,
    seconds_per_point: float,
    ranks_per_host: int | None,
    budget_s: float,
    advance: Callable[[str], None],
) -> dict[str, Any]:
    """Returns the arguments of :class:`.CommCurves`; arguments as for ``CommCurves.measure``.

    Collective.
    """
    if not budget_s > 0:
        raise PicassoError(f"budget_s is {budget_s}, expected more than 0 seconds")
    device = device or torch.device("cpu")
    per_host = ranks_per_host or int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    measurement = _Measurement(pg, device, seconds_per_point, budget_s, advance)
    curves = measurement.curves(_sizes(max_bytes))
    core_ns = measurement.core_ns_per_byte(curves["row_exchange"])
    return {
        "world_size": pg.size(),
        "ranks_per_host": per_host,
        "backend": dist.get_backend(pg),
        "device": device.type,
        "collectives": curves,
        "wire_core_ns": core_ns,
        "measured_on": _from_first_rank(describe_hardware(device), pg),
    }


def num_points(world_size: int, max_bytes: int) -> int:
    """Returns the number of calls of ``advance`` in ``CommCurves.measure``."""
    return 0 if world_size == 1 else len(COLLECTIVES) * len(_sizes(max_bytes))


def _sizes(max_bytes: int) -> list[int]:
    sizes = [_MIN_BYTES]
    while sizes[-1] * _GROWTH <= max_bytes:
        sizes.append(sizes[-1] * _GROWTH)
    return sizes


class _Timer:
    """Measures times of the slowest rank, equal on all ranks. All methods are collective."""

    def __init__(self, pg: dist.ProcessGroup) -> None:
        self._pg = pg
        dist.barrier(group=pg)
        self._start_s = _now_s()

    def elapsed_s(self) -> float:
        """Returns the seconds since the start."""
        return self.slowest([_now_s() - self._start_s])[0]

    def slowest(self, times: list[float]) -> list[float]:
        """Returns the maximum of each time over ranks."""
        times_by_rank: list[list[float]] = [[] for _ in range(self._pg.size())]
        dist.all_gather_object(times_by_rank, times, group=self._pg)
        return [max(times) for times in zip(*times_by_rank)]


class _Measurement:
    """One measurement of the curves of a process group.

    Args:
        group: Process group.
        device: Device of the tensors.
        seconds_per_point: Approximate maximum duration of the repetitions of one size.
        budget_s: Maximum duration, seconds.
        advance: Called with a label after each point, measured or left out.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        seconds_per_point: float,
        budget_s: float,
        advance: Callable[[str], None],
    ) -> None:
        self._group, self._device, self._timer = group, device, _Timer(group)
        self._seconds_per_point, self._budget_s = seconds_per_point, budget_s
        self._advance = advance

    def curves(self, sizes: list[int]) -> dict[str, Curve]:
        """Measures every collective. Collective."""
        if self._group.size() == 1:
            return {name: Curve.line(0.0, float("inf")) for name in COLLECTIVES}
        points: dict[str, list[tuple[int, float]]] = {name: [] for name in COLLECTIVES}
        points_left, is_over = len(sizes) * len(COLLECTIVES), False
        for index, size in enumerate(sizes):
            is_over = is_over or (index >= _MIN_SIZES and not self._has_time_for_next(points))
            for name in COLLECTIVES:
                left_s = 0.0 if is_over else self._budget_s - self._timer.elapsed_s()
                is_over = is_over or (index >= _MIN_SIZES and left_s <= 0)
                if not is_over:
                    # an equal share of the remaining time for each remaining point
                    seconds = min(self._seconds_per_point, max(0.0, left_s) / points_left)
                    points[name].append(self._point(name, size, seconds))
                points_left -= 1
                self._advance(f"{name}, {size >> 10} KiB")
        return {name: Curve.fit(*zip(*found)) for name, found in points.items()}

    def core_ns_per_byte(self, row_exchange: Curve) -> float | None:
        """Measures the CPU time per byte of a row exchange, nanoseconds, on the busiest rank.

        Collective.

        Args:
            row_exchange: Measured curve; the largest size that fits into the budget is repeated.

        Returns:
            ``None`` for one rank, for other devices than the CPU, and if no time is left.
        """
        if self._device.type != "cpu" or self._group.size() == 1:
            return None
        left_ms = (self._budget_s - self._timer.elapsed_s()) * 1e3
        points = zip(row_exchange.sent_bytes, row_exchange.ms)
        fitting = [sent for sent, ms in points if ms * (1 + _MIN_REPEATS) <= left_ms]
        if not fitting:
            return None
        numel = fitting[-1] // BYTES_PER_FLOAT
        sent, call = CALLS["row_exchange"](self._group, numel, self._device)
        call()
        dist.barrier(group=self._group)
        # process_time includes gloo's threads, which do most of the sending
        start_s = time.process_time()
        for _ in range(_MIN_REPEATS):
            call()
        core_ns = (time.process_time() - start_s) * 1e9 / _MIN_REPEATS
        (most_ns,) = self._timer.slowest([core_ns])
        return most_ns / max(1, sent)

    def _has_time_for_next(self, points: dict[str, list[tuple[int, float]]]) -> bool:
        """Whether the next size fits into the budget, if time grows like size. Collective."""
        last_ms = sum(found[-1][1] for found in points.values())
        expected_s = last_ms * _GROWTH * (_WARMUPS + _MIN_REPEATS) / 1e3
        return self._timer.elapsed_s() + expected_s <= self._budget_s

    def _point(self, name: str, size: int, seconds: float) -> tuple[int, float]:
        """Measures one size: bytes of the busiest rank, and the median time in milliseconds."""
        num_bytes, call = CALLS[name](self._group, size // BYTES_PER_FLOAT, self._device)
        # Two warm-up calls: the first connects, the second determines the number of repetitions.
        self._time_ms(call)
        (first_ms,) = self._timer.slowest([self._time_ms(call)])
        repeats = int(max(_MIN_REPEATS, min(_MAX_REPEATS, seconds * 1e3 / max(first_ms, 1e-3))))
        times = []
        for repeat in range(repeats):
            dist.barrier(group=self._group)
            if repeat % self._group.size() == self._group.rank():
                time.sleep(_LATE_MS / 1e3)
                times.append(self._time_ms(call))
            else:  # the other ranks' time counts from the start of the late rank
                times.append(max(0.0, self._time_ms(call) - _LATE_MS))
        return num_bytes, median(self._timer.slowest(times))

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


def _from_first_rank(value: dict[str, str | int], pg: dist.ProcessGroup) -> dict[str, str | int]:
    values = [value]
    dist.broadcast_object_list(values, group_src=0, group=pg)
    return values[0]
