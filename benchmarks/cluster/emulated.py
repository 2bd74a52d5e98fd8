"""The cluster as a context: hosts up on entry, everything gone on exit, however the exit came."""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass
from types import TracebackType

from benchmarks.cluster.namespaces import (
    HOST_INTERFACE,
    ClusterError,
    add_bridge,
    add_host,
    host_name,
    remove_all,
    sent_bytes,
    sweep,
    why_unavailable,
)

__all__ = ["EmulatedCluster", "EnterHost"]

_CLONE_NEWNET = 0x40000000


@dataclass(frozen=True)
class EnterHost:
    """What a rank does first: moves into its host's namespace, and onto its core.

    Only the calling thread moves; threads made later, gloo's among them, follow it.
    """

    hosts: tuple[str, ...]
    ranks_per_host: int

    def __call__(self, rank: int) -> None:
        """Enters the host of ``rank``; called before the process group is made."""
        host = rank // self.ranks_per_host
        libc = ctypes.CDLL(None, use_errno=True)
        with open(f"/var/run/netns/{self.hosts[host]}") as namespace:
            if libc.setns(namespace.fileno(), _CLONE_NEWNET):
                error = ctypes.get_errno()
                raise ClusterError(f"rank {rank} cannot enter its host: {os.strerror(error)}")
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[rank % len(cores)]})
        os.environ.update(
            GLOO_SOCKET_IFNAME=HOST_INTERFACE,
            LOCAL_RANK=str(rank % self.ranks_per_host),
            LOCAL_WORLD_SIZE=str(self.ranks_per_host),
        )


class EmulatedCluster:
    """Hosts on one machine; use as a context manager, ranks by ``run_ranks(on_start=...)``.

    Args:
        num_hosts: Hosts.
        rate_mbit: Rate of every link in both directions, Mbit/s; ``None`` = not shaped.
        ranks_per_host: Ranks that share a host and its link.

    Raises:
        ClusterError: On entry, if the machine cannot; nothing is left behind.
    """

    def __init__(
        self, num_hosts: int, rate_mbit: float | None = None, ranks_per_host: int = 1
    ) -> None:
        self.num_hosts = num_hosts
        self.rate_mbit = rate_mbit
        self.ranks_per_host = ranks_per_host

    @property
    def world_size(self) -> int:
        """Ranks of all hosts."""
        return self.num_hosts * self.ranks_per_host

    @property
    def on_start(self) -> EnterHost:
        """For ``run_ranks``: puts each rank on its host."""
        hosts = tuple(host_name(index) for index in range(self.num_hosts))
        return EnterHost(hosts, self.ranks_per_host)

    def sent_bytes(self) -> list[int]:
        """Bytes that each host put on its link since entry, headers included."""
        return [sent_bytes(index) for index in range(self.num_hosts)]

    def __enter__(self) -> EmulatedCluster:
        reason = why_unavailable()
        if reason is not None:
            raise ClusterError(f"cannot emulate a cluster: {reason}")
        sweep()
        try:
            add_bridge()
            for index in range(self.num_hosts):
                add_host(index, self.rate_mbit)
        except BaseException:
            remove_all()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        remove_all()
