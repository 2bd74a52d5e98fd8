"""The traffic of rows, sent directly or by host, with one word of header.

Shape letters: W ranks.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from torchrec_picasso.app.simulation.wire import Amounts, Wire
from torchrec_picasso.cost.by_host import ByHost
from torchrec_picasso.cost.hot_cold import (
    FLAGS_BYTES,
    WIRE_BYTES,
    WORD_BYTES,
    Exchange,
    HotColdTotals,
)

_ROW_NUMBER_BYTES = 4


class _Level(NamedTuple):
    """Traffic of one collective."""

    wire: Wire
    part_W: Amounts
    """Ranks of one part exchange."""
    num_behind: int
    """Number of ranks whose header goes to a peer, or through it."""
    bit_bytes: int
    """Bytes that tell a peer which hot rows are touched."""
    hot_on_link: int
    """Bytes on a host's link for each byte of hot sums that a rank sends in a ring."""


class RowTraffic:
    """Traffic of rows between ranks and home ranks. Groups of several neighbouring ranks send
    inside to the relay, which has the home rank's place, and across; groups of one directly.

    Args:
        num_hosts: Number of hosts.
        num_places: Ranks of each host.
        group_size: Ranks of each group, 1 or those of a host.
        bits: Bytes that say which hot rows a batch touches, from a rank to another.
        united: The same of all batches, if ranks unite them in parts, as :func:`.bit_bytes`.
    """

    def __init__(
        self, num_hosts: int, num_places: int, group_size: int, bits: int, united: int
    ) -> None:
        hosts, ranks_W = (num_hosts, num_places), np.arange(num_hosts * num_places)
        self.group_size, self._place_W = group_size, ranks_W % group_size
        num_groups, across = len(ranks_W) // group_size, group_size * (bits + united)
        if group_size == 1:
            direct = Wire(*hosts), self._place_W, 1, across, int(num_hosts > 1)
            self.levels = {"row_exchange": _Level(*direct)}
            return
        # nothing sent inside is on a host's link, and all that its ranks send across
        inside = Wire(*hosts, 0.0), ranks_W // group_size, num_groups, num_groups * bits + united, 0
        through = Wire(*hosts, num_places), self._place_W, group_size, across, num_places
        self.levels = {"inside": _Level(*inside), "across": _Level(*through)}

    @property
    def num_peers(self) -> int:
        """Number of ranks that a rank exchanges rows with."""
        return self.group_size + len(self._place_W) // self.group_size - 2

    def exchange(self, totals: HotColdTotals, crossing: HotColdTotals, num_packs: int) -> Exchange:
        """Returns the exchange to price; ``crossing`` are cold rows that cross once per host."""
        direct = Exchange(totals=totals, num_packs=num_packs)
        if self.group_size == 1:
            return direct
        return ByHost(**vars(direct), crossing=crossing, ranks_per_host=self.group_size)

    def add(self, rank: int, rows_W: Amounts, elements_W: Amounts) -> None:
        """Adds the flags and the header of a rank, and its exchange with relays, or with home
        ranks: cold rows and their elements by home rank."""
        for level in self.levels.values():
            peers_W = (level.part_W == level.part_W[rank]).astype(np.int64)
            level.wire.send("header", rank, peers_W * WORD_BYTES * level.num_behind)
            level.wire.send("bits", rank, peers_W * level.bit_bytes)
            level.wire.send("flags", rank, peers_W * FLAGS_BYTES)
        if self.group_size == 1:
            self.end_group(rank, rows_W, rows_W, elements_W)
            return
        relayed, first = np.zeros((2, len(rows_W)), dtype=np.int64), rank - rank % self.group_size
        by_place = np.stack([rows_W, elements_W]).reshape(2, -1, self.group_size).sum(1)
        relayed[:, first : first + self.group_size] = by_place
        _exchange(self.levels["inside"], rank, relayed[0], *relayed)

    def end_group(self, first: int, asked_W: Amounts, rows_W: Amounts, elements_W: Amounts) -> None:
        """Adds the exchange of a group of ranks, from ``first`` on, with home ranks: row numbers as
        often as ranks asked for them, rows once."""
        *_, across = self.levels.values()
        for place in range(self.group_size):
            own = (each_W * (self._place_W == place) for each_W in (asked_W, rows_W, elements_W))
            _exchange(across, first + place, *own)


def _exchange(
    level: _Level, rank: int, asked_W: Amounts, rows_W: Amounts, elements_W: Amounts
) -> None:
    """Adds one rank's exchange with those that serve it: the row numbers that it asks for, the
    dirty mask of distinct rows, these rows, and their gradients."""
    level.wire.send("ids", rank, asked_W * _ROW_NUMBER_BYTES)
    level.wire.fetch("mask", rank, rows_W)
    level.wire.fetch("rows", rank, elements_W * WIRE_BYTES)
    level.wire.send("gradients", rank, elements_W * WIRE_BYTES)
