"""Measures the collectives of a process group, each size until its median stands.

All ranks do the same number of repetitions, agreed by reduction; a time is the slowest rank's,
because a step waits for it. Ranks take turns in coming a little late, as in a step one always does:
gloo's all-to-all takes up to twice as long then. Sizes are reported as what the busiest rank sends
or receives, so that curves of different world sizes compare.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor

from torchrec_picasso.cost.curve import Curve
from torchrec_picasso.cost.curves import COLLECTIVES, CommCurves
from torchrec_picasso.cost.hardware import describe_hardware
from torchrec_picasso.exchange.all_to_all import start_all_to_all

__all__ = ["measure_curves"]

_MIN_BYTES = 4 << 10
_MIN_REPEATS, _MAX_REPEATS = 5, 40
_LATE_MS = 1.0
_BYTES_PER_FLOAT = 4
_SKEWED_SHARE = 0.5  # of every rank's rows, to one rank


def measure_curves(
    pg: dist.ProcessGroup,
    device: torch.device | None,
    max_bytes: int,
    seconds_per_point: float,
    ranks_per_host: int | None,
) -> CommCurves:
    """Does the work of :meth:`CommCurves.measure`. Collective."""
    device = device or torch.device("cpu")
    per_host = ranks_per_host or int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    world_size = pg.size()
    levels = {}
    if 1 < per_host < world_size and world_size % per_host == 0:
        levels = {
            name: _measure_all(group, device, max_bytes, seconds_per_point)
            for name, group in _level_groups(pg, per_host).items()
        }
    return CommCurves(
        world_size=world_size,
        ranks_per_host=per_host,
        backend=dist.get_backend(pg),
        device=device.type,
        collectives=_measure_all(pg, device, max_bytes, seconds_per_point),
        levels=levels,
        measured_on=_told_by_first_rank(describe_hardware(device), pg),
    )


def _level_groups(pg: dist.ProcessGroup, per_host: int) -> dict[str, dist.ProcessGroup]:
    """This rank's host, and the ranks of all hosts with its local rank. Collective."""
    rank, world_size = pg.rank(), pg.size()
    members = dist.get_process_group_ranks(pg)
    hosts = [members[start : start + per_host] for start in range(0, world_size, per_host)]
    across = [members[local::per_host] for local in range(per_host)]
    mine = {}
    for name, groups in (("intra_host", hosts), ("inter_host", across)):
        for ranks in groups:
            group = dist.new_group(ranks)
            if members[rank] in ranks:
                mine[name] = group
    return mine


def _measure_all(
    pg: dist.ProcessGroup, device: torch.device, max_bytes: int, seconds_per_point: float
) -> dict[str, Curve]:
    if pg.size() == 1:
        return {name: Curve.line(0.0, float("inf")) for name in COLLECTIVES}
    sizes = [_MIN_BYTES]
    while sizes[-1] * 4 <= max_bytes:
        sizes.append(sizes[-1] * 4)
    curves = {}
    for name in COLLECTIVES:
        busiest, ms = [], []
        for size in sizes:
            num_bytes, call = _CALLS[name](pg, size // _BYTES_PER_FLOAT, device)
            busiest.append(num_bytes)
            ms.append(_median_ms(pg, call, device, seconds_per_point))
        curves[name] = Curve.fit(busiest, ms)
    return curves


def _median_ms(
    pg: dist.ProcessGroup, call: Callable[[], object], device: torch.device, seconds: float
) -> float:
    # warm-up twice: the first connects, the second tells how often the size can be repeated
    _time_ms(call, device)
    first_ms = _slowest(pg, _time_ms(call, device))
    repeats = int(max(_MIN_REPEATS, min(_MAX_REPEATS, seconds * 1e3 / max(first_ms, 1e-3))))
    times = []
    for turn in range(repeats):
        dist.barrier(group=pg)
        if turn % pg.size() == pg.rank():
            time.sleep(_LATE_MS / 1e3)
            times.append(_time_ms(call, device))
        else:  # from the late rank's coming on
            times.append(max(0.0, _time_ms(call, device) - _LATE_MS))
    return median(_slowest(pg, *times, each=True))


def _time_ms(call: Callable[[], object], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start_s = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return (time.perf_counter() - start_s) * 1e3


def _slowest(pg: dist.ProcessGroup, *ms: float, each: bool = False):  # type: ignore[no-untyped-def]
    """The slowest rank's times: one number, or one per repetition."""
    times = torch.tensor(ms, dtype=torch.float64)
    gathered: list[list[float]] = [[] for _ in range(pg.size())]
    dist.all_gather_object(gathered, times.tolist(), group=pg)
    slowest = [max(of_rank) for of_rank in zip(*gathered)]
    return slowest if each else slowest[0]


_Call = tuple[int, Callable[[], object]]


def _all_to_all(pg: dist.ProcessGroup, numel: int, device: torch.device) -> _Call:
    world_size = pg.size()
    numel = numel // world_size * world_size
    source, target = _buffers(numel, numel, device)
    sent = numel * (world_size - 1) // world_size * _BYTES_PER_FLOAT
    return sent, lambda: dist.all_to_all_single(target, source, group=pg)


def _row_exchange(pg: dist.ProcessGroup, numel: int, device: torch.device) -> _Call:
    world_size = pg.size()
    block_W = [numel // world_size] * world_size
    source, target = _buffers(sum(block_W), sum(block_W), device)
    sent = sum(block_W[1:]) * _BYTES_PER_FLOAT
    return sent, lambda: start_all_to_all(pg, target, source, block_W, block_W).wait()


def _all_to_all_skewed(pg: dist.ProcessGroup, numel: int, device: torch.device) -> _Call:
    world_size, rank = pg.size(), pg.rank()
    rest = int(numel * (1 - _SKEWED_SHARE)) // (world_size - 1)
    send = [numel - rest * (world_size - 1)] + [rest] * (world_size - 1)
    receive = [send[rank]] * world_size
    source, target = _buffers(sum(send), sum(receive), device)
    busiest = max(send[0] * (world_size - 1), sum(send[:-1])) * _BYTES_PER_FLOAT
    return busiest, lambda: dist.all_to_all_single(target, source, receive, send, group=pg)


def _all_reduce(pg: dist.ProcessGroup, numel: int, device: torch.device) -> _Call:
    buffer, _ = _buffers(numel, 0, device)
    sent = 2 * (pg.size() - 1) * numel // pg.size() * _BYTES_PER_FLOAT
    return sent, lambda: dist.all_reduce(buffer, group=pg)


def _reduce_scatter(pg: dist.ProcessGroup, numel: int, device: torch.device) -> _Call:
    share = max(1, numel // pg.size())
    source, target = _buffers(share * pg.size(), share, device)
    sent = (pg.size() - 1) * share * _BYTES_PER_FLOAT
    return sent, lambda: dist.reduce_scatter_tensor(target, source, group=pg)


def _all_gather(pg: dist.ProcessGroup, numel: int, device: torch.device) -> _Call:
    share = max(1, numel // pg.size())
    target, source = _buffers(share * pg.size(), share, device)
    sent = (pg.size() - 1) * share * _BYTES_PER_FLOAT
    return sent, lambda: dist.all_gather_into_tensor(target, source, group=pg)


def _buffers(first: int, second: int, device: torch.device) -> tuple[Tensor, Tensor]:
    return torch.zeros(first, device=device), torch.zeros(second, device=device)


_CALLS: dict[str, Callable[[dist.ProcessGroup, int, torch.device], _Call]] = {
    "all_to_all": _all_to_all,
    "all_to_all_skewed": _all_to_all_skewed,
    "row_exchange": _row_exchange,
    "all_reduce": _all_reduce,
    "reduce_scatter": _reduce_scatter,
    "all_gather": _all_gather,
}


def _told_by_first_rank(facts: dict[str, str | int], pg: dist.ProcessGroup) -> dict[str, str | int]:
    told: list[dict[str, str | int]] = [facts]
    dist.broadcast_object_list(told, group_src=0, group=pg)
    return told[0]
