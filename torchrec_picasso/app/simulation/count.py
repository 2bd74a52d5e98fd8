"""Counts a step on W ranks from the rows that each rank's batch looks up.

Ranks are read one after another, and the rows of one host are kept, so memory grows with the rows
of the tables (4 bytes each) and with tables times W, not with lookups times W. Several clusters are
counted in one pass: a smaller one has the first ranks of the largest.

Shape letters: B samples, N lookups, R rows of all tables, side by side, T tables, U distinct rows,
W ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from torchrec_picasso.app.simulation.ids import Ids, ReadBatch
from torchrec_picasso.app.simulation.row_traffic import RowTraffic
from torchrec_picasso.app.simulation.stock_traffic import STOCK_TYPES, StockTraffic
from torchrec_picasso.app.simulation.wire import Amounts, Wire
from torchrec_picasso.cost.hot_cold import bit_bytes
from torchrec_picasso.cost.table_work import TableLoad
from torchrec_picasso.planner.home_blocks import even_blocks

RANK_COUNTED = ("lookups", "unique", "cold", "new_hot", "new_cold")
"""Counts of a rank by table: lookups; distinct rows, of these cold ones; hot and cold rows that no
rank before this one has in its batch."""
COUNTED = (*RANK_COUNTED, "dirty", "host", "host_dirty")
"""Also cold rows that any rank's batch before has; distinct cold rows of a host's batches, and
those of these that any rank's batch before has."""

_NO_RANK = np.iinfo(np.int16).max


@dataclass(frozen=True, kw_only=True)
class Stream:
    """Tables and their lookups."""

    loads: Sequence[TableLoad]
    """Tables with the lookups of the first rank's batch."""
    batch_size: int
    read: ReadBatch
    hot_T: Sequence[Ids]
    """Hot rows of each table."""

    @property
    def dims(self) -> Ids:
        """Columns of each table, ``(T,)``."""
        return np.array([load.dim for load in self.loads])


class Blocks:
    """Rows of each table on each rank, ``(T, W)``, as blocks in the rows of all tables."""

    def __init__(self, block_rows_TW: Sequence[Sequence[int]] | Amounts) -> None:
        sizes_TW = np.asarray(block_rows_TW)
        self._edges, self._shape = np.append(0, sizes_TW.ravel().cumsum()), sizes_TW.shape

    def count(self, rows: Ids) -> Amounts:
        """Counts ascending rows by block, ``(T, W)``."""
        return np.diff(np.searchsorted(rows, self._edges)).reshape(self._shape)


class Cluster:
    """Counts of one step on one cluster.

    Args:
        stream: Tables and their lookups.
        num_hosts: Number of hosts.
        num_places: Ranks of each host.
        block_rows_TW: Home rows of each table on each rank.
    """

    def __init__(
        self,
        stream: Stream,
        num_hosts: int,
        num_places: int,
        block_rows_TW: Sequence[Sequence[int]],
    ) -> None:
        self.num_hosts, self.num_places = num_hosts, num_places
        self.world_size = num_hosts * num_places
        bits = bit_bytes(sum(map(len, stream.hot_T)), self.world_size)
        hosts = num_hosts, num_places
        self.rows = {"rows": RowTraffic(*hosts, 1, *bits)}
        """Traffic of rows by form."""
        if num_hosts > 1 and num_places > 1:
            self.rows["node_rows"] = RowTraffic(*hosts, num_places, *bits)
        self._dims_T, self._homes = stream.dims, Blocks(block_rows_TW)
        self._equal = Blocks(
            [even_blocks(load.num_embeddings, self.world_size) for load in stream.loads]
        )
        is_sequence_T = np.array([load.is_sequence for load in stream.loads])
        self.stock = [
            (tables_n, self._traffic(stream, tables_n))
            for tables_n in (np.flatnonzero(~is_sequence_T), np.flatnonzero(is_sequence_T))
            if tables_n.size
        ]
        """Tables of bags, then of sequences, with their traffic by stock sharding type."""
        self.sums_T = {name: np.zeros(len(stream.loads)) for name in COUNTED}
        """Sums over ranks."""
        self.served_W = np.zeros(self.world_size)
        """Rows that each home rank serves, once per rank that asks."""
        self._host_rows: list[Ids] = []
        self._asked_W = np.zeros(self.world_size, dtype=np.int64)

    def _traffic(self, stream: Stream, tables_n: Ids) -> dict[str, StockTraffic]:
        loads, hosts = [stream.loads[t] for t in tables_n], (self.num_hosts, self.num_places)
        return {name: StockTraffic(name, loads, Wire(*hosts)) for name in STOCK_TYPES}

    def add(
        self,
        rank: int,
        lookups_N: Ids,
        cold_U: Ids,
        before_R: NDArray[np.int16],
        counts_T: Mapping[str, Amounts],
    ) -> None:
        """Adds the batch of a rank, ranks in order.

        Args:
            rank: The rank.
            lookups_N: Row of each lookup, ascending.
            cold_U: Distinct cold rows, ascending.
            before_R: First rank that has a row in its batch before.
            counts_T: Counts of :data:`RANK_COUNTED`.
        """
        by_block_TW, cold_TW = self._equal.count(lookups_N), self._homes.count(cold_U)
        dirty_T = self._count_dirty(cold_U, before_R)
        for name, values_T in {**counts_T, "dirty": dirty_T}.items():
            self.sums_T[name] += values_T
        for tables_n, traffic in ((t, each) for t, both in self.stock for each in both.values()):
            traffic.add(rank, by_block_TW[tables_n])
        rows_W, elements_W = cold_TW.sum(0), self._dims_T @ cold_TW
        self.served_W += rows_W
        self._host_rows.append(cold_U)
        self._asked_W += rows_W
        for each in self.rows.values():
            each.add(rank, rows_W, elements_W)
        if len(self._host_rows) == self.num_places:
            self._end_host(rank - rank % self.num_places, before_R)

    def _end_host(self, first: int, before_R: NDArray[np.int16]) -> None:
        """Adds the distinct rows of a host's ranks, from ``first`` on."""
        # a sort; np.unique hashes, ten times slower for a million rows
        rows_n = np.sort(np.concatenate(self._host_rows))
        once_U = rows_n[np.diff(rows_n, prepend=-1) > 0]
        once_TW = self._homes.count(once_U)
        self.sums_T["host"] += once_TW.sum(1)
        self.sums_T["host_dirty"] += self._count_dirty(once_U, before_R)
        if "node_rows" in self.rows:
            amounts = self._asked_W, once_TW.sum(0), self._dims_T @ once_TW
            self.rows["node_rows"].end_group(first, *amounts)
        self._host_rows.clear()
        self._asked_W[:] = 0

    def _count_dirty(self, cold_U: Ids, before_R: NDArray[np.int16]) -> Amounts:
        """Counts the rows, by table, that a rank of this cluster has in its batch before."""
        return self._homes.count(cold_U[before_R[cold_U] < self.world_size]).sum(1)


def count_step(
    stream: Stream, clusters: Sequence[Cluster], advance: Callable[[], None] = lambda: None
) -> NDArray[np.float64]:
    """Counts a step of each cluster, and the step before it for the dirty rows, in place.

    Args:
        stream: Tables and their lookups.
        clusters: Clusters without counts.
        advance: Called after each rank's batch.

    Returns:
        The share of the cold elements that the first 0 to B samples of a batch use, ``(B + 1,)``.
    """
    world_sizes = range(max(cluster.world_size for cluster in clusters))
    rows_T = np.array([load.num_embeddings for load in stream.loads])
    bases_T, num_rows, tables = rows_T.cumsum() - rows_T, int(rows_T.sum()), Blocks(rows_T[:, None])
    before_R, is_seen_R = np.full(num_rows, _NO_RANK, dtype=np.int16), np.zeros(num_rows, bool)
    is_hot_R, used_B = np.zeros(num_rows, bool), np.zeros(stream.batch_size)
    for hot, base in zip(stream.hot_T, bases_T):
        is_hot_R[hot + base] = True
    for rank in world_sizes:  # the first rank that has a row in its batch before
        _, rows_U, _ = _sorted(stream.read(rank, 0), bases_T)
        before_R[rows_U] = np.minimum(before_R[rows_U], rank)
        advance()
    for rank in world_sizes:
        lookups_N, rows_U, sample_U = _sorted(stream.read(rank, 1), bases_T)
        is_cold_U, is_new_U = ~is_hot_R[rows_U], ~is_seen_R[rows_U]
        is_seen_R[rows_U] = True
        cold_U = rows_U[is_cold_U]
        cold_T = tables.count(cold_U)[:, 0]
        used_B += np.bincount(
            sample_U[is_cold_U], np.repeat(stream.dims, cold_T), stream.batch_size
        )
        parts = (
            lookups_N,
            rows_U,
            cold_U,
            rows_U[is_new_U & ~is_cold_U],
            rows_U[is_new_U & is_cold_U],
        )
        counts_T = {name: tables.count(rows)[:, 0] for name, rows in zip(RANK_COUNTED, parts)}
        for cluster in (each for each in clusters if rank < each.world_size):
            cluster.add(rank, lookups_N, cold_U, before_R, counts_T)
        advance()
    return np.append(0.0, used_B.cumsum()) / max(1.0, used_B.sum())


def _sorted(ids: Iterable[tuple[Ids, Ids]], bases_T: Ids) -> tuple[Ids, Ids, Ids]:
    """Returns the row of each lookup among the rows of all tables, ascending, the distinct rows,
    and the first sample of each of these."""
    pairs = list(ids)
    bits = max(int(sample_N.max(initial=0)) for _, sample_N in pairs).bit_length()
    keys = [(rows_N + base << bits) | sample_N for (rows_N, sample_N), base in zip(pairs, bases_T)]
    keys_N = np.sort(np.concatenate(keys))
    lookups_N = keys_N >> bits
    first_U = np.flatnonzero(np.diff(lookups_N, prepend=-1))
    return lookups_N, lookups_N[first_U], keys_N[first_U] & ((1 << bits) - 1)
