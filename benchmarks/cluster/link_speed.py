"""Measured speed of a link, under gloo's collectives and under plain sockets.

The sockets are the yardstick: where they fill the link in both directions and a collective does
not, the collective is the cause. gloo's all-to-all of 2 ranks fills half of a 1 Gbit/s link.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch
import torch.distributed as dist

from benchmarks.cluster.emulated import host_address

TRANSFERS = ("sockets", "all-to-all", "all-reduce")
"""Ring of sockets from each host to the next; ``all_to_all_single``; ``all_reduce``."""

_PORT = 5000  # a host of its own has no port taken
_READ_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class TransferTime:
    """One rank's times of one transfer.

    Args:
        median_s: Median over the repeats.
        worst_s: Longest repeat.
        cpu_s: CPU seconds of this rank's process per repeat.
    """

    median_s: float
    worst_s: float
    cpu_s: float


def link_bytes(transfer: str, num_bytes: int, num_hosts: int, ranks_per_host: int) -> float:
    """Payload of each host's link, per direction, when every rank hands in ``num_bytes``."""
    world_size = num_hosts * ranks_per_host
    if num_hosts == 1:
        return 0.0
    if transfer == "sockets":
        return float(num_bytes * ranks_per_host)
    if transfer == "all-to-all":
        return num_bytes * ranks_per_host * (world_size - ranks_per_host) / world_size
    return 2 * num_bytes * (world_size - 1) / world_size  # a ring crosses each link once


def time_transfer(
    rank: int, world_size: int, transfer: str, num_bytes: int, repeats: int
) -> TransferTime:
    """Times a transfer, after one to warm up. Collective: the main function of every rank."""
    act = _transfer(rank, world_size, transfer, num_bytes)
    act()
    times_s = []
    cpu_s = 0.0
    for _ in range(repeats):
        dist.barrier()
        start_s, start_cpu_s = time.perf_counter(), time.process_time()
        act()
        times_s.append(time.perf_counter() - start_s)
        cpu_s += time.process_time() - start_cpu_s
    return TransferTime(median_s=median(times_s), worst_s=max(times_s), cpu_s=cpu_s / repeats)


def _transfer(rank: int, world_size: int, transfer: str, num_bytes: int) -> Callable[[], object]:
    sent = torch.ones(num_bytes // 4)
    if transfer == "sockets":
        return _socket_ring(rank, world_size, num_bytes)
    if transfer == "all-to-all":
        received = torch.empty_like(sent)
        return lambda: dist.all_to_all_single(received, sent)
    return lambda: dist.all_reduce(sent, dist.ReduceOp.MAX)  # ones stay ones


def _socket_ring(rank: int, world_size: int, num_bytes: int) -> Callable[[], None]:
    """Sends to the rank of the same number on the next host while receiving from the previous."""
    local_rank, local_world_size = (int(os.environ[f"LOCAL_{w}"]) for w in ("RANK", "WORLD_SIZE"))
    next_host = (rank + local_world_size) % world_size // local_world_size
    with socket.create_server(("", _PORT + local_rank)) as server:
        dist.barrier()  # every server listens
        to_next = socket.create_connection((host_address(next_host), _PORT + local_rank))
        from_previous, _ = server.accept()
    payload = bytes(num_bytes)

    def act() -> None:
        sender = threading.Thread(target=to_next.sendall, args=(payload,))
        sender.start()
        missing = num_bytes
        while missing:
            data = from_previous.recv(min(missing, _READ_BYTES))
            if not data:
                raise ConnectionError(f"the rank before {rank} ended with {missing} bytes to send")
            missing -= len(data)
        sender.join()

    return act
