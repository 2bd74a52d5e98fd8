"""First step of a rank of an emulated cluster: move onto its host.

This has to come before the process group: gloo's threads and sockets belong to the namespace of the
thread that makes them, for good.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass

from benchmarks.cluster.namespaces import enter_namespace, leave_host_name

HOST_INTERFACE = "eth0"
"""Name of the one link inside every host."""


@dataclass(frozen=True)
class EnterHost:
    """Moves a rank into its host's namespace and onto a core; picklable, for ``run_ranks``.

    Args:
        hosts: Path of each host's namespace.
        ranks_per_host: Ranks that share a host, numbered host by host.
        pin: Whether each rank keeps to one core; where cores are few, hosts share none before
            their own ranks do.
    """

    hosts: tuple[str, ...]
    ranks_per_host: int
    pin: bool

    def __call__(self, rank: int) -> None:
        """Enters the host of ``rank`` and sets what gloo and TorchRec read of the environment."""
        host, local_rank = divmod(rank, self.ranks_per_host)
        enter_namespace(self.hosts[host])
        leave_host_name()
        socket.sethostname(f"host{host}")
        if self.pin:
            cores = sorted(os.sched_getaffinity(0))
            world_size = len(self.hosts) * self.ranks_per_host
            os.sched_setaffinity(0, {cores[rank * len(cores) // world_size]})
        os.environ.update(
            GLOO_SOCKET_IFNAME=HOST_INTERFACE,
            LOCAL_RANK=str(local_rank),
            LOCAL_WORLD_SIZE=str(self.ranks_per_host),
        )
