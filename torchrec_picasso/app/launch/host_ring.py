"""Finds the order of hosts in which a ring through all of them is fastest.

gloo sums dense gradients in a ring, from each rank to the next. A path that several hosts share,
such as the uplink of a rack, is crossed as often as neighbours in the ring are in different racks.
One pair of hosts does not fill such a path, so the hosts exchange in pairs, all at once, in each
round with other partners. The ring of least time between neighbours is then measured beside the
given one. All-to-alls send as many bytes between two hosts in any order, so the order of the
fastest ring has the shortest step.

After PLink (Luo et al., MLSys 2020) and Cloud Collectives (Luo et al., 2021).
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median

import torch
import torch.distributed as dist

LEAST_GAIN = 1.05
"""A ring replaces the given one if it is faster by this factor in every round."""

_ROUNDS = 5


@dataclass(frozen=True, kw_only=True)
class HostRing:
    """Milliseconds of hosts, which are numbered in the given order; none for fewer than four.

    Args:
        hosts: Names of the hosts in the given order.
        num_bytes: Bytes that a host sends and receives in each exchange.
        pair_ms_YY: Time of each pair of hosts while the other hosts exchange in pairs.
        ring: Numbers of the hosts in the best ring of pairs.
        given_ms: Time of the given ring, by round.
        best_ms: Time of ``ring``, by round.
    """

    hosts: tuple[str, ...]
    num_bytes: int
    pair_ms_YY: list[list[float]] = field(default_factory=list)
    ring: list[int] = field(default_factory=list)
    given_ms: list[float] = field(default_factory=list)
    best_ms: list[float] = field(default_factory=list)

    @property
    def is_faster(self) -> bool:
        """Whether ``ring`` was faster than the given order in every round."""
        rounds = list(zip(self.given_ms, self.best_ms))
        return bool(rounds) and all(given > LEAST_GAIN * best for given, best in rounds)

    @property
    def order(self) -> list[str]:
        """Names of the hosts in the order to use."""
        return [self.hosts[y] for y in self.ring] if self.is_faster else list(self.hosts)

    def sum_ms(self, ring_ms: Sequence[float], num_bytes: int, world_size: int) -> float:
        """Predicts the all-reduce of ``num_bytes`` in a ring from the ring's times."""
        sent = 2 * (world_size - 1) / world_size * num_bytes  # by each rank to the next
        return median(ring_ms) * sent / self.num_bytes


def best_ring(pair_ms_YY: Sequence[Sequence[float]]) -> list[int]:
    """Returns a ring of hosts with a small sum of neighbours' times: the nearest neighbours from
    host 0, then parts are reversed while that shortens the ring (2-opt), for times that are equal
    both ways. Of equal hosts the first comes first."""
    size, ring, improved = len(pair_ms_YY), [0], True
    while left := sorted(set(range(size)).difference(ring)):
        ring.append(min(left, key=lambda host: pair_ms_YY[ring[-1]][host]))
    while improved:
        improved = False
        for i, j in itertools.combinations(range(1, size + 1), 2):
            # the part [i, j) lies between before and after
            before, first, last, after = ring[i - 1], ring[i], ring[j - 1], ring[j % size]
            old_ms = pair_ms_YY[before][first] + pair_ms_YY[last][after]
            new_ms = pair_ms_YY[before][last] + pair_ms_YY[first][after]
            if new_ms < old_ms - 1e-9:
                ring = ring[:i] + ring[i:j][::-1] + ring[j:]
                improved = True
    return ring


def tournament(num_hosts: int) -> list[list[int]]:
    """Returns each round's partner of each host; each two meet once, and of an odd number of hosts
    one is its own partner."""
    size = num_hosts + num_hosts % 2
    rounds = []
    for number in range(size - 1):
        partner_Y = list(range(num_hosts))
        for host in range(size - 1):
            # the circle method: numbers that add up to the round's; one meets the last host
            other = (number - host) % (size - 1)
            other = size - 1 if other == host else other
            if host < num_hosts and other < num_hosts:
                partner_Y[host], partner_Y[other] = other, host
        rounds.append(partner_Y)
    return rounds


def measure_hosts(host_by_rank: Sequence[str], num_bytes: int) -> HostRing:
    """Measures pairs of hosts and the best ring of them. Collective; equal on all ranks.

    The first rank of each host exchanges, on the CPU, by gloo in the default process group. Fewer
    than four hosts have one ring, which is not measured.

    Args:
        host_by_rank: Name of each rank's host.
        num_bytes: Bytes of each exchange.
    """
    hosts = tuple(dict.fromkeys(host_by_rank))
    if len(hosts) < 4:
        return HostRing(hosts=hosts, num_bytes=num_bytes)
    leaders_Y = [host_by_rank.index(name) for name in hosts]
    measure = partial(_exchange_ms, leaders_Y, num_bytes)
    pair_ms_YY = pair_times(len(hosts), measure)
    ring = best_ring(pair_ms_YY)
    rings = [list(range(len(hosts))), ring]
    times = measure([_successors(ring) for _ in range(1 + _ROUNDS) for ring in rings])
    times = times[2:]  # the first round connects, and is not counted
    given_ms, best_ms = (list(map(max, times[start::2])) for start in (0, 1))
    return HostRing(
        hosts=hosts,
        num_bytes=num_bytes,
        pair_ms_YY=pair_ms_YY,
        ring=ring,
        given_ms=given_ms,
        best_ms=best_ms,
    )


def _successors(ring: list[int]) -> list[int]:
    """Returns the next host of each host in a ring."""
    return [ring[(ring.index(host) + 1) % len(ring)] for host in range(len(ring))]


def pair_times(
    num_hosts: int, measure: Callable[[list[list[int]]], list[list[float]]]
) -> list[list[float]]:
    """Returns mean times of pairs, over tournaments in which pairs meet in different company.

    Args:
        num_hosts: Number of hosts.
        measure: Returns each host's time of each exchange, from the host that each host sends to.
    """
    exchanges = tournament(num_hosts)  # the first connects, and is not counted
    warmups = len(exchanges)
    for number in range(_ROUNDS):
        names = list(range(num_hosts))
        random.Random(number).shuffle(names)
        for partner_Y in tournament(num_hosts):
            exchanges.append([names[partner_Y[names.index(host)]] for host in range(num_hosts)])
    total_YY = [[0.0] * num_hosts for _ in range(num_hosts)]
    for partner_Y, ms_Y in zip(exchanges[warmups:], measure(exchanges)[warmups:]):
        for host, other in enumerate(partner_Y):
            total_YY[host][other] += max(ms_Y[host], ms_Y[other])
    return [
        [total / _ROUNDS * (host != other) for other, total in enumerate(total_Y)]
        for host, total_Y in enumerate(total_YY)
    ]


def _exchange_ms(
    leaders_Y: list[int], num_bytes: int, exchanges: list[list[int]]
) -> list[list[float]]:
    """Returns each host's time of each exchange, in which every host sends to one. Collective.

    Args:
        leaders_Y: First rank of each host.
        num_bytes: Bytes that a host sends.
        exchanges: The host that each host sends to; itself = it does not take part.
    """
    rank, own_ms = dist.get_rank(), []
    sent = torch.zeros(num_bytes, dtype=torch.uint8)
    received = torch.empty_like(sent)
    for to_Y in exchanges:
        dist.barrier()
        start_s = time.perf_counter()
        if rank in leaders_Y and to_Y[host := leaders_Y.index(rank)] != host:
            receiving = dist.irecv(received, leaders_Y[to_Y.index(host)])
            dist.send(sent, leaders_Y[to_Y[host]])
            assert receiving is not None  # it is None outside the group
            receiving.wait()
        own_ms.append((time.perf_counter() - start_s) * 1e3)
    by_rank: list[list[float]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(by_rank, own_ms)
    return list(map(list, zip(*(by_rank[rank] for rank in leaders_Y))))
