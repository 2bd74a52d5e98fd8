"""Measures the collectives of a process group, in ascending size, within a time budget.

All ranks measure the same sizes equally often: both follow from times of the slowest rank, because
a training step waits for that rank. A size begins only if all collectives are expected to fit into
the budget; if it takes longer, the collectives that are left go without it, and it is the last.
:class:`Curve` extrapolates beyond the last size. In each repetition one rank starts late, as in a
training step: gloo's all-to-all then takes up to twice as long. Where messages of all pairs lose
packets, TCP waits 200 ms before it sends them again; the median of a few repetitions may be such a
time, which steps seldom have, so a size that took clearly longer than the others let expect is
measured again.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch
import torch.distributed as dist

from torchrec_picasso.cost.curves import COLLECTIVES, LEVELS, CommCurves, Curve
from torchrec_picasso.errors import CompatError, PicassoError
from torchrec_picasso.exchange.all_to_all import Ranks
from torchrec_picasso.exchange.by_host import HostExchanges, connect_hosts

_BYTES_PER_FLOAT = 4
_MIN_BYTES, _GROWTH = 4 << 10, 4
_MIN_SIZES = 2  # a slope needs two points
_WARMUPS, _MIN_REPEATS, _MAX_REPEATS = 2, 3, 40
_MORE_TIMES = 4  # that a disturbed size is measured
_SHARE = 1 / 3
_LEAST_SHARE = 1 / 20
"""Of the budget, for the CPU time per byte and for each disturbed size, if no more is left."""
_LATE_S, _LATE_SHARE = 1e-3, 0.1
"""Delay of the late rank: least seconds, and share of a call's time. In a step ranks are some ms
apart and gloo's all-to-all carries one direction at a time; 1 ms apart, 8 MB took 72 or 140 ms."""
_CALLS = {**dict.fromkeys(COLLECTIVES, 1), "row_exchange": 2, **dict.fromkeys(LEVELS, 4)}
"""Calls in a row that a time is the mean of. A rank that leaves the barrier late times the rest of
its first exchange only: eight ranks on two cores leave it up to 50 ms apart, and the slowest time
of an exchange of 90 ms was down to 65. The groups of a level share links, and none waits for the
others: a group that begins ahead has a link for itself, so the slowest group's time of one exchange
is down to half of what all groups take together."""


def num_points(world_size: int, max_bytes: int) -> int:
    """Returns the number of calls of ``advance`` in ``CommCurves.measure``."""
    return 0 if world_size == 1 else len(COLLECTIVES) * len(_sizes(max_bytes))


def _sizes(max_bytes: int) -> list[int]:
    sizes = [_MIN_BYTES]
    while sizes[-1] * _GROWTH <= max_bytes:
        sizes.append(sizes[-1] * _GROWTH)
    return sizes


@dataclass
class Measurement:
    """One measurement within a budget, of ``CommCurves.measure``. Methods are collective; all ranks
    get equal results."""

    group: dist.ProcessGroup
    device: torch.device
    seconds_per_point: float
    budget_s: float
    advance: Callable[[str], None]

    def __post_init__(self) -> None:
        if not self.budget_s > 0:
            raise PicassoError(f"budget_s is {self.budget_s}, expected more than 0 seconds")
        self._ranks_of = dict.fromkeys(COLLECTIVES, Ranks(self.group))
        dist.barrier(group=self.group)
        self.start_s = _now_s()

    def _connect_levels(self) -> None:
        """Adds the exchanges inside and across hosts, where rows may travel by host."""
        with contextlib.suppress(CompatError):  # it is raised on all ranks
            connect_hosts(self.group, self.device)
            exchanges = HostExchanges(self._ranks_of["row_exchange"])
            self._ranks_of |= zip(LEVELS, (exchanges.inside, exchanges.across))

    def _slowest(self, times: list[float]) -> list[float]:
        times_by_rank: list[list[float]] = [[] for _ in range(self.group.size())]
        dist.all_gather_object(times_by_rank, times, group=self.group)
        return list(map(max, zip(*times_by_rank)))

    def _left_s(self) -> float:
        return self.budget_s - self._slowest([_now_s() - self.start_s])[0]

    def curves(self, max_bytes: int, ranks_per_host: int | None) -> CommCurves:
        """Measures everything."""
        if ranks_per_host is None:
            self._connect_levels()
            (most,) = self._slowest([float(os.environ.get("LOCAL_WORLD_SIZE", "1"))])
            ranks_per_host = int(most)  # curves are equal on all ranks, hosts need not be
        collectives = self._collectives(_sizes(max_bytes))
        return CommCurves(
            world_size=self.group.size(),
            ranks_per_host=ranks_per_host,
            backend=dist.get_backend(self.group),
            device=self.device.type,
            collectives=collectives,
            wire_core_ns=self._core_ns_per_byte(collectives["row_exchange"]),
        )

    def _collectives(self, sizes: list[int]) -> dict[str, Curve]:
        if self.group.size() == 1:
            return {name: Curve.line(0.0, float("inf")) for name in COLLECTIVES}
        points: dict[str, list[tuple[int, float]]] = {name: [] for name in self._ranks_of}
        points_left, is_over = len(sizes) * len(points), False
        for index, size in enumerate(sizes):
            is_over = is_over or (index >= _MIN_SIZES and not self._has_time_for_next(points))
            for name in points:
                left_s = 0.0 if is_over else self._left_s()
                is_over = is_over or (index >= _MIN_SIZES and left_s <= 0)
                if not is_over:
                    # a part of an equal share of the remaining time: large sizes take longer
                    share_s = _SHARE * max(0.0, left_s) / points_left
                    seconds = min(self.seconds_per_point, share_s)
                    points[name].append(self._point(name, size, seconds))
                points_left -= 1
                if name in COLLECTIVES:  # a caller counts on as many calls without levels
                    self.advance(f"{name}, {size >> 10} KiB")
        curves = {name: Curve.fit(*zip(*found)) for name, found in points.items()}
        return {name: self._again(name, curve, sizes) for name, curve in curves.items()}

    def _again(self, name: str, curve: Curve, sizes: list[int]) -> Curve:
        """Measures disturbed sizes again, the largest first, in a part of the remaining time, or
        each in a small part of the budget, and takes the median: steps may have the longer time
        often, or seldom. It is cut to a larger size's time: each step would pay for a small one's
        delay."""
        least_s = _LEAST_SHARE * self.budget_s / _MORE_TIMES
        for index in reversed(range(len(curve.ms))):
            if not curve.is_disturbed(index):
                continue
            ms = list(curve.ms)
            times = [ms[index]]
            for _ in range(_MORE_TIMES):
                share_s = max(_SHARE * self._left_s(), least_s)
                if ms[index] * _least_calls(name) / 1e3 <= share_s:
                    seconds = min(self.seconds_per_point, share_s)
                    times.append(self._point(name, sizes[index], seconds)[1])
            ms[index] = min([median(times), *ms[index + 1 :]])
            curve = Curve.fit(curve.sent_bytes, ms)
        return curve

    def _core_ns_per_byte(self, row_exchange: Curve) -> float | None:
        """Measures the CPU time per byte of a row exchange, nanoseconds, on the busiest rank, with
        the largest size that fits into what is left of the budget, or into a small part of it;
        ``None`` for one rank, for other devices than the CPU, and if none fits."""
        if self.device.type != "cpu" or self.group.size() == 1:
            return None
        left_ms = max(self._left_s(), _LEAST_SHARE * self.budget_s) * 1e3
        points = zip(row_exchange.sent_bytes, row_exchange.ms)
        fitting = [sent for sent, ms in points if ms * (1 + _MIN_REPEATS) <= left_ms]
        if not fitting:
            return None
        numel = fitting[-1] // _BYTES_PER_FLOAT
        sent, call = _prepare("row_exchange", self._ranks_of["row_exchange"], numel, self.device)
        call()
        dist.barrier(group=self.group)
        # process_time includes gloo's threads, which do most of the sending
        start_s = time.process_time()
        for _ in range(_MIN_REPEATS):
            call()
        core_ns = (time.process_time() - start_s) * 1e9 / _MIN_REPEATS
        return self._slowest([core_ns])[0] / sent

    def _has_time_for_next(self, points: dict[str, list[tuple[int, float]]]) -> bool:
        """Whether the next size fits into the budget, if only what is not latency grows."""
        next_ms = 0.0
        for name, (*_, (_, before_ms), (_, last_ms)) in points.items():
            grown_ms = last_ms + _GROWTH * max(0.0, last_ms - before_ms)
            next_ms += _least_calls(name) * min(grown_ms, _GROWTH * last_ms)
        return next_ms / 1e3 <= self._left_s()

    def _point(self, name: str, size: int, seconds: float) -> tuple[int, float]:
        """Measures one size: bytes of the busiest rank, and the median time in milliseconds."""
        numel = size // _BYTES_PER_FLOAT
        num_bytes, call = _prepare(name, self._ranks_of[name], numel, self.device)
        # Two warm-up calls: the first connects, the second determines the number of repetitions,
        # with the barrier that each of them has.
        self._time_ms(call, 1)
        start_s = _now_s()
        dist.barrier(group=self.group)
        self._time_ms(call, 1)
        (first_s,) = self._slowest([_now_s() - start_s])
        num_calls = _CALLS[name]
        repeats = int(max(_MIN_REPEATS, min(_MAX_REPEATS, seconds / (num_calls * first_s))))
        late_s = max(_LATE_S, _LATE_SHARE * first_s)
        times, late_ms = [], [0.0] * repeats
        for repeat in range(repeats):
            dist.barrier(group=self.group)
            if repeat % self.group.size() == self.group.rank():
                start_s = _now_s()
                time.sleep(late_s)
                late_ms[repeat] = (_now_s() - start_s) * 1e3
            times.append(self._time_ms(call, num_calls))
        # the other ranks' time counts from the start of the late rank, which sleeps 0.1 ms longer
        # than asked, and more where cores are shared: as long as a small call
        waited_ms = [late - own for late, own in zip(self._slowest(late_ms), late_ms)]
        times = [max(0.0, ms - waited) for ms, waited in zip(times, waited_ms)]
        return num_bytes, median(self._slowest(times)) / num_calls

    def _time_ms(self, call: Callable[[], object], num_calls: int) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        start_s = _now_s()
        for _ in range(num_calls):
            call()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return (_now_s() - start_s) * 1e3


def _least_calls(name: str) -> int:
    """Returns how often measuring one size calls a collective, at least."""
    return _WARMUPS + _MIN_REPEATS * _CALLS[name]


def _prepare(
    name: str, ranks: Ranks, numel: int, device: torch.device
) -> tuple[int, Callable[[], object]]:
    """Prepares a collective on a float32 buffer with about ``numel`` elements per rank.

    Returns the bytes that the busiest rank sends or receives with a bandwidth-optimal algorithm, so
    that curves of different world sizes can be compared; and the function to time.
    """
    pg, world_size = ranks.pg, ranks.size
    share = max(1, numel // world_size)  # one of W equal shares stays on the rank
    whole, other = (torch.zeros(share * world_size, device=device) for _ in range(2))
    part, block_W = torch.zeros(share, device=device), [share] * world_size
    # a step knows a bound of what ranks send, about four times as much
    row_exchange = other, whole, block_W, block_W, 4 * whole.numel()

    def exchange_rows() -> None:
        ranks.start_all_to_all(*row_exchange).wait()

    calls: dict[str, Callable[[], object]] = {
        "all_to_all": lambda: dist.all_to_all_single(other, whole, group=pg),
        **dict.fromkeys(("row_exchange", *LEVELS), exchange_rows),
        "all_reduce": lambda: dist.all_reduce(whole, group=pg),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, whole, group=pg),
        "all_gather": lambda: dist.all_gather_into_tensor(whole, part, group=pg),
    }
    sent = (world_size - 1) * share * _BYTES_PER_FLOAT
    # an all-reduce is a reduce-scatter and an all-gather
    return 2 * sent if name == "all_reduce" else sent, calls[name]


def _now_s() -> float:
    return time.perf_counter()
