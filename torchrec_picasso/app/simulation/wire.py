"""Bytes between ranks and between hosts, by purpose.

Rank ``y L + l`` has place l on host y, as in :mod:`torchrec_picasso.exchange.by_host`.

Shape letters: L places, W ranks, Y hosts.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Amounts = NDArray[np.int64]

_SENT, _RECEIVED = 0, 1


class Wire:
    """Bytes that ranks and hosts send and receive in one step.

    Args:
        num_hosts: Number of hosts.
        num_places: Ranks of each host.
        share: Bytes on a host's link for each byte that a rank sends, of an even exchange; 0 =
            none leave the host, ``None`` = those of an all-to-all.
    """

    def __init__(self, num_hosts: int, num_places: int, share: float | None = None) -> None:
        self.num_hosts, self.num_places = num_hosts, num_places
        self.world_size = num_hosts * num_places
        self._share = link_share(num_hosts, num_places) if share is None else share
        self._ranks: dict[str, Amounts] = {}  # sent, then received, (2, W)
        self._hosts: dict[str, Amounts] = {}  # the same across hosts, (2, Y)
        self._even: dict[str, int] = {}

    @staticmethod
    def joined(wires: Sequence[Wire]) -> Wire:
        """Adds up the traffic of one cluster."""
        whole = Wire(wires[0].num_hosts, wires[0].num_places)
        for wire in wires:
            for purpose in wire._ranks:
                for amounts, added in zip(whole._amounts(purpose), wire._amounts(purpose)):
                    amounts += added
        return whole

    def send(self, purpose: str, rank: int, bytes_W: Amounts) -> None:
        """Adds what a rank sends to each rank; what stays on the rank is not counted."""
        self._add(purpose, _SENT, rank, bytes_W)

    def fetch(self, purpose: str, rank: int, bytes_W: Amounts) -> None:
        """Adds what each rank sends to one rank."""
        self._add(purpose, _RECEIVED, rank, bytes_W)

    def even(self, purpose: str, rank_bytes: int, host_bytes: int) -> None:
        """Adds a collective in which each rank, and each host, sends and receives as much."""
        for amounts, num_bytes in zip(self._amounts(purpose), (rank_bytes, host_bytes)):
            amounts += num_bytes
        self._even[purpose] = self._even.get(purpose, 0) + rank_bytes

    def _add(self, purpose: str, way: int, rank: int, bytes_W: Amounts) -> None:
        ranks, hosts = self._amounts(purpose)
        others_W, host = bytes_W.copy(), rank // self.num_places
        others_W[rank] = 0
        across_Y = others_W.reshape(self.num_hosts, self.num_places).sum(1)
        across_Y[host] = 0
        for amounts, one, others in ((ranks, rank, others_W), (hosts, host, across_Y)):
            amounts[way, one] += others.sum()
            amounts[1 - way] += others

    def _amounts(self, purpose: str) -> tuple[Amounts, Amounts]:
        if purpose not in self._ranks:
            self._ranks[purpose] = np.zeros((2, self.world_size), dtype=np.int64)
            self._hosts[purpose] = np.zeros((2, self.num_hosts), dtype=np.int64)
        return self._ranks[purpose], self._hosts[purpose]

    def multiply(self, purpose: str, factor: int) -> None:
        """Multiplies the bytes of a purpose."""
        for amounts in self._amounts(purpose):
            amounts *= factor

    def busiest_bytes(self, *, is_duplex: bool) -> dict[str, float]:
        """Bytes that each rank of an even exchange would send to take as long, by purpose: the
        busiest host's link is as full, or without links the busiest rank sends or receives as
        much. A link that is not duplex carries what is sent and received one after another, as in
        an even exchange."""
        found = {}
        for name in self._ranks:
            busiest = self._hosts[name] / self._share if self._share else self._ranks[name]
            busiest_W = busiest.max(axis=0) if is_duplex else busiest.mean(axis=0)
            found[name] = self._even.get(name, float(busiest_W.max()))
        return found

    def sent_bytes(self) -> dict[str, float]:
        """Bytes that a rank sends, by purpose: mean over ranks."""
        return {purpose: float(ranks[_SENT].mean()) for purpose, ranks in self._ranks.items()}

    def across_bytes(self) -> float:
        """Bytes that a host sends to other hosts: mean over hosts."""
        return float(sum(hosts[_SENT].mean() for hosts in self._hosts.values()))

    def busiest_over_mean(self) -> float:
        """Bytes that the busiest rank sends or receives, divided by the mean over ranks."""
        total = sum(self._ranks.values(), np.zeros((2, self.world_size)))
        return float(total.max() / total.mean()) if total.any() else 1.0


def link_share(num_hosts: int, num_places: int) -> float:
    """Returns the bytes on a host's link for each byte that a rank sends in an even all-to-all."""
    others = max(1, num_hosts * num_places - 1)
    return num_places * num_places * (num_hosts - 1) / others
