"""The traffic of stock TorchRec: every lookup, and pooled vectors or the vector of every lookup.

Shape letters: T tables, W ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from torchrec_picasso.app.simulation.wire import Amounts, Wire
from torchrec_picasso.cost.stock import deal_out
from torchrec_picasso.cost.table_work import TableLoad

STOCK_TYPES = ("table_wise", "row_wise", "column_wise")
"""Sharding types that are counted."""

_ID_BYTES, _LENGTH_BYTES, _WIRE_BYTES = 8, 4, 4


class StockTraffic:
    """Traffic of tables of one sharding type, all looked up as bags or all as sequences.

    Args:
        sharding_type: One of :data:`STOCK_TYPES`.
        loads: The tables; whole tables and columns are dealt out by their loads.
        wire: Hosts and ranks, without traffic.
    """

    def __init__(self, sharding_type: str, loads: Sequence[TableLoad], wire: Wire) -> None:
        self.loads, self.wire = loads, wire
        self.is_sequence = loads[0].is_sequence
        self.in_blocks = sharding_type == "row_wise"
        """Whether a lookup is sent to the home rank of its row, of equal blocks."""
        self.is_summed = self.in_blocks and not self.is_sequence
        """Whether partial sums of bags are sent."""
        self.parts_TW = np.ones((len(loads), wire.world_size), dtype=np.int64)
        """Ranks that the lengths of a table are sent to; of columns, their parts on each rank."""
        width_T = np.array([load.dim for load in loads])
        if not self.in_blocks:
            self.parts_TW[:] = 0
            for parts_W, ranks in zip(
                self.parts_TW, deal_out(sharding_type, loads, wire.world_size)
            ):
                np.add.at(parts_W, ranks, 1)
            width_T //= self.parts_TW.sum(1)
        self._width_T = width_T
        self._lengths_T = np.array([round(load.bags) for load in loads])
        self.served_W = np.zeros(wire.world_size)
        """Elements that each rank looks up."""
        if self.is_summed:
            # a reduce-scatter of a partial sum of each bag of all ranks, then an all-gather
            # in a ring, which crosses the link of each host once
            num_bytes = (wire.world_size - 1) * int(self._lengths_T @ width_T) * _WIRE_BYTES
            for purpose in ("rows", "gradients"):
                wire.even(purpose, num_bytes, num_bytes * (wire.num_hosts > 1))

    def add(self, rank: int, by_block_TW: Amounts) -> None:
        """Adds the lookups of a rank's batch, by table and equal block of rows."""
        served_TW = by_block_TW
        if not self.in_blocks:
            served_TW = by_block_TW.sum(1, keepdims=True) * self.parts_TW
        self.served_W += self._width_T @ served_TW
        lengths_W = self._lengths_T @ self.parts_TW
        self.wire.send("ids", rank, served_TW.sum(0) * _ID_BYTES + lengths_W * _LENGTH_BYTES)
        if self.is_summed:
            return  # sums of bags, which are there already
        vectors_W = (
            self._width_T @ served_TW
            if self.is_sequence
            else (self._width_T * self._lengths_T) @ self.parts_TW
        )
        self.wire.fetch("rows", rank, vectors_W * _WIRE_BYTES)
        self.wire.send("gradients", rank, vectors_W * _WIRE_BYTES)
