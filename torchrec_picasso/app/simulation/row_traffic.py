"""The traffic of rows by form, with one word of header.

Shape letters: W ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from torchrec_picasso.app.simulation.wire import Amounts, Wire
from torchrec_picasso.cost.by_host import ByHost
from torchrec_picasso.cost.hot_cold import Exchange, HotColdTotals
from torchrec_picasso.exchange.agreement import Flags

_ROW_NUMBER_BYTES, _WIRE_BYTES, _WORD_BYTES = 4, 4, 8
_FLAG_BYTES = _WORD_BYTES * len(Flags())


class _Level(NamedTuple):
    """Traffic of one collective of rows, and which ranks take part in it."""

    wire: Wire
    parts_W: Amounts
    """Ranks of one number exchange."""
    num_behind: int
    """Number of ranks whose header goes to a peer, or through it."""
    num_united: int
    """Number of united bits of hot rows that go to a peer."""
    hot_on_link: int
    """Bytes on a host's link for each byte of hot sums that a rank sends in a ring."""


class RowTraffic:
    """Traffic of rows that ranks and home ranks send each other directly.

    Args:
        num_hosts: Number of hosts.
        num_places: Ranks of each host.
        bit_bytes: Bytes that say which hot rows are touched: of a part, if ranks unite them.
        is_shared: Whether ranks unite them in parts.
    """

    def __init__(self, num_hosts: int, num_places: int, bit_bytes: int, is_shared: bool) -> None:
        self.num_hosts, self.num_places = num_hosts, num_places
        self._bit_bytes, self._is_shared = bit_bytes, int(is_shared)
        self.levels = self._levels(np.arange(num_hosts * num_places))
        """Traffic by collective."""

    @staticmethod
    def applies(num_hosts: int, num_places: int) -> bool:
        """Whether ranks on such hosts can exchange so."""
        return True

    def _levels(self, ranks_W: Amounts) -> dict[str, _Level]:
        wire = Wire(self.num_hosts, self.num_places)
        return {"row_exchange": _Level(wire, 0 * ranks_W, 1, 1, int(self.num_hosts > 1))}

    @property
    def num_peers(self) -> int:
        """Number of ranks that a rank exchanges rows with."""
        return sum(int(np.sum(each.parts_W == 0)) - 1 for each in self.levels.values())

    def exchange(self, totals: HotColdTotals, crossing: HotColdTotals, num_packs: int) -> Exchange:
        """Returns the exchange to price; ``crossing`` are cold rows that cross once per host."""
        return Exchange(totals=totals, num_packs=num_packs)

    def add(self, rank: int, rows_W: Amounts, elements_W: Amounts) -> None:
        """Adds the header of a rank, and its exchange of cold rows and their elements by home."""
        for level in self.levels.values():
            peers_W = (level.parts_W == level.parts_W[rank]).astype(np.int64)
            level.wire.send("header", rank, peers_W * _WORD_BYTES * level.num_behind)
            # own ones, then united ones
            shares = level.num_behind + level.num_united * self._is_shared
            level.wire.send("bits", rank, peers_W * self._bit_bytes * shares)
        # flags go directly to all ranks in each form; by host they are counted as sent across
        level.wire.send("flags", rank, np.full_like(peers_W, _FLAG_BYTES))
        self._add_rows(rank, rows_W, elements_W)

    def _add_rows(self, rank: int, rows_W: Amounts, elements_W: Amounts) -> None:
        _exchange(self.levels["row_exchange"], rank, rows_W, rows_W, elements_W)

    def end_host(self, first: int, asked_W: Amounts, rows_W: Amounts, elements_W: Amounts) -> None:
        """Adds what the ranks of a host, from ``first`` on, send together: row numbers as often as
        ranks asked for them, rows once."""


class HostTraffic(RowTraffic):
    """Traffic of rows that travel by host. Arguments as for :class:`RowTraffic`."""

    @staticmethod
    def applies(num_hosts: int, num_places: int) -> bool:
        """Whether there are several ranks on each of several hosts."""
        return num_hosts > 1 and num_places > 1

    def _levels(self, ranks_W: Amounts) -> dict[str, _Level]:
        hosts, places = (self.num_hosts, self.num_places), self.num_places
        # nothing sent inside is on a host's link, and all that its ranks send across
        inside, across = Wire(*hosts, 0.0), Wire(*hosts, places)
        return {
            "inside": _Level(inside, ranks_W // places, self.num_hosts, 1, 0),
            "across": _Level(across, ranks_W % places, places, places, places),
        }

    def exchange(self, totals: HotColdTotals, crossing: HotColdTotals, num_packs: int) -> Exchange:
        """Returns the exchange to price."""
        exchange = super().exchange(totals, crossing, num_packs)
        return ByHost(**vars(exchange), crossing=crossing, ranks_per_host=self.num_places)

    def _add_rows(self, rank: int, rows_W: Amounts, elements_W: Amounts) -> None:
        def by_relay(amounts_W: Amounts) -> Amounts:
            relays_W, first = np.zeros_like(amounts_W), rank - rank % self.num_places
            by_place = amounts_W.reshape(-1, self.num_places).sum(0)
            relays_W[first : first + self.num_places] = by_place
            return relays_W

        relayed_W = by_relay(rows_W)
        _exchange(self.levels["inside"], rank, relayed_W, relayed_W, by_relay(elements_W))

    def end_host(self, first: int, asked_W: Amounts, rows_W: Amounts, elements_W: Amounts) -> None:
        """Adds the exchange of a host's relays with home ranks."""
        level = self.levels["across"]
        for place in range(self.num_places):
            own = (each_W * (level.parts_W == place) for each_W in (asked_W, rows_W, elements_W))
            _exchange(level, first + place, *own)


TRAFFIC: Mapping[str, type[RowTraffic]] = {"rows": RowTraffic, "node_rows": HostTraffic}
"""Traffic of forms that send rows."""


def _exchange(
    level: _Level, rank: int, asked_W: Amounts, rows_W: Amounts, elements_W: Amounts
) -> None:
    """Adds one rank's exchange with those that serve it: the row numbers that it asks for, the
    dirty mask of distinct rows, these rows, and their gradients."""
    level.wire.send("ids", rank, asked_W * _ROW_NUMBER_BYTES)
    level.wire.fetch("mask", rank, rows_W)
    level.wire.fetch("rows", rank, elements_W * _WIRE_BYTES)
    level.wire.send("gradients", rank, elements_W * _WIRE_BYTES)
