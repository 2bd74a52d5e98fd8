"""The cluster as a context: hosts on a switch on entry, nothing left on exit, however it came.

The switches are a namespace too, so the machine's own network is neither changed nor used, and its
firewall has no say. Each link is shaped at both ends: what the host sends, and what the switch
sends to it, so a host that several others write to is as slow as a real one.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType

from benchmarks.cluster.enter_host import HOST_INTERFACE, EnterHost
from benchmarks.cluster.namespaces import ClusterError, Namespace
from benchmarks.cluster.shaping import LinkShape, link_shape

_SWITCH = "switch"
_MAX_HOSTS = 250


@dataclass(frozen=True, kw_only=True)
class LinkCounters:
    """Traffic of one host's link since the cluster came up.

    Args:
        sent_bytes: Bytes that the host sent, each frame with its headers.
        dropped_packets: Packets that found a queue full, in either direction.
    """

    sent_bytes: int
    dropped_packets: int


class EmulatedCluster:
    """Hosts on one machine; use as a context manager, with ranks by ``run_ranks(on_start=...)``.

        with EmulatedCluster(num_hosts=2, rate_mbit=1000) as cluster:
            run_ranks(fn, cluster.world_size, timeout_s=60, on_start=cluster.on_start)
            cluster.sent_bytes()

    Args:
        num_hosts: Hosts, each with one link to the switch.
        rate_mbit: Rate of every link in each direction, Mbit/s; ``None`` = not shaped.
        ranks_per_host: Ranks that share a host and its link.
        pin: Whether each rank keeps to one core; give ``run_ranks`` one thread per rank then.
        racks: Rack of each host, 0 or 1: two switches, joined by one link of the same rate; all
            hosts are on one switch by default.

    Raises:
        ValueError: If there is no host, no rank or no rate, or not one rack for each host.
        ClusterError: On entry, if the machine cannot; nothing is left behind.
    """

    def __init__(
        self,
        num_hosts: int,
        rate_mbit: float | None = None,
        ranks_per_host: int = 1,
        *,
        pin: bool = True,
        racks: Sequence[int] | None = None,
    ) -> None:
        if not 1 <= num_hosts <= _MAX_HOSTS:
            raise ValueError(f"num_hosts is {num_hosts}; a cluster has 1 to {_MAX_HOSTS} hosts")
        if ranks_per_host < 1:
            raise ValueError(f"ranks_per_host is {ranks_per_host}; a host runs at least 1 rank")
        self._racks = [0] * num_hosts if racks is None else list(racks)
        if len(self._racks) != num_hosts or not {0, 1}.issuperset(self._racks):
            raise ValueError(f"racks is {racks}; each of {num_hosts} hosts is in rack 0 or 1")
        self.num_hosts = num_hosts
        self.rate_mbit = rate_mbit
        self.ranks_per_host = ranks_per_host
        self.pin = pin
        self._shape = link_shape(rate_mbit)
        self._resources = contextlib.ExitStack()
        self._switch: Namespace | None = None
        self._hosts: list[Namespace] = []

    @property
    def world_size(self) -> int:
        """Ranks of all hosts."""
        return self.num_hosts * self.ranks_per_host

    @property
    def on_start(self) -> EnterHost:
        """For ``run_ranks``: puts each rank on its host.

        Raises:
            ClusterError: If the cluster is not up.
        """
        self._up()
        return EnterHost(tuple(host.path for host in self._hosts), self.ranks_per_host, self.pin)

    def sent_bytes(self) -> list[int]:
        """Bytes that each host put on its link since entry, headers included.

        Raises:
            ClusterError: If the cluster is not up.
        """
        return [counters.sent_bytes for counters in self.link_counters()]

    def link_counters(self) -> list[LinkCounters]:
        """Counters of each host's link since entry.

        The queues count, not the interfaces: an interface counts the headers of an offloaded packet
        once (0.2 % of the bytes), not once for each of its frames (4.6 %).

        Raises:
            ClusterError: If the cluster is not up.
        """
        switch = self._up()
        return [
            _link_counters(_queue(host, HOST_INTERFACE), _queue(switch, _port(index)))
            for index, host in enumerate(self._hosts)
        ]

    def uplink_bytes(self) -> list[int]:
        """Bytes that each rack sent to the other since entry, headers included.

        Raises:
            ClusterError: If the cluster is not up.
        """
        switch = self._up()
        return [_queue(switch, _uplink(rack))["bytes"] for rack in (0, 1)]

    def set_link(self, host: int, up: bool) -> None:
        """Takes a host's port at the switch away, or gives it back.

        Raises:
            ClusterError: If the cluster is not up.
        """
        self._up().run("ip", "link", "set", "dev", _port(host), "up" if up else "down")

    def __enter__(self) -> EmulatedCluster:
        if self._switch is not None:
            raise ClusterError("the emulated cluster is up already; make another one")
        try:
            self._switch = self._namespace()
            _make_switches(self._switch, self._shape)
            for index in range(self.num_hosts):
                self._hosts.append(self._namespace())
                _plug_in(self._hosts[index], self._switch, index, self._racks[index], self._shape)
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._close()

    def _namespace(self) -> Namespace:
        return self._resources.enter_context(contextlib.closing(Namespace()))

    def _up(self) -> Namespace:
        if self._switch is None:
            raise ClusterError("the emulated cluster is not up; use it inside its `with` block")
        return self._switch

    def _close(self) -> None:
        self._switch = None
        self._hosts.clear()
        self._resources.close()


def host_address(host: int) -> str:
    """IPv4 address of a host, by its number."""
    return f"10.77.0.{host + 1}"


def why_unavailable() -> str | None:
    """Reason why this machine cannot emulate a cluster, or ``None``; found by making one."""
    try:
        with EmulatedCluster(num_hosts=1, rate_mbit=1000):
            return None
    except ClusterError as error:
        return str(error)


def _make_switches(switch: Namespace, shape: LinkShape) -> None:
    """Makes a switch per rack and their link, shaped at both ends before it is up."""
    switch.run("ip", "link", "add", _uplink(0), "type", "veth", "peer", "name", _uplink(1))
    for rack in (0, 1):
        bridge = f"{_SWITCH}{rack}"
        switch.run("ip", "link", "add", bridge, "type", "bridge", "mcast_snooping", "0")
        # no IPv6 addresses anywhere: their neighbour search would be counted as traffic
        switch.run("ip", "link", "set", "dev", bridge, "addrgenmode", "none", "up")
        for command in shape.commands(_uplink(rack)):
            switch.run(*command)
        up = ("addrgenmode", "none", "master", bridge, "up")
        switch.run("ip", "link", "set", "dev", _uplink(rack), *up)


def _plug_in(host: Namespace, switch: Namespace, index: int, rack: int, shape: LinkShape) -> None:
    """Joins a host to a switch by a pair of interfaces, both ends shaped before they are up."""
    port = _port(index)
    peer = ("peer", "name", HOST_INTERFACE, "netns", host.path)
    switch.run("ip", "link", "add", port, "type", "veth", *peer)
    for namespace, interface in ((host, HOST_INTERFACE), (switch, port)):
        for command in shape.commands(interface):
            namespace.run(*command)
    up = ("addrgenmode", "none", "master", f"{_SWITCH}{rack}", "up")
    switch.run("ip", "link", "set", "dev", port, *up)
    host.run("ip", "link", "set", "dev", "lo", "up")
    host.run("ip", "address", "add", f"{host_address(index)}/24", "dev", HOST_INTERFACE)
    host.run("ip", "link", "set", "dev", HOST_INTERFACE, "addrgenmode", "none", "up")


def _uplink(rack: int) -> str:
    return f"uplink{rack}"


def _port(index: int) -> str:
    return f"port{index}"


def _queue(namespace: Namespace, interface: str) -> dict[str, int]:
    (queue,) = json.loads(namespace.run("tc", "-s", "-j", "qdisc", "show", "dev", interface))
    return queue


def _link_counters(sending: dict[str, int], receiving: dict[str, int]) -> LinkCounters:
    return LinkCounters(
        sent_bytes=sending["bytes"], dropped_packets=sending["drops"] + receiving["drops"]
    )
