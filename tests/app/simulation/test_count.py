"""Counts of a step against sets and loops over all pairs of ranks; ids drawn from counts."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from torchrec_picasso.app.simulation.count import Cluster, Stream, count_step
from torchrec_picasso.app.simulation.ids import from_counts
from torchrec_picasso.app.simulation.wire import Wire
from torchrec_picasso.cost.table_work import TableLoad
from torchrec_picasso.frequency import FrequencyStats, ModelTable, TableCounts

ROWS, DIMS, BATCH = (40, 9, 7), (4, 8, 4), 6
BLOCKS = ([13, 9, 8, 10], [4, 2, 2, 1], [1, 2, 2, 2])
LOOKUPS = (2, 1, 3)
"""Lookups of a sample; the last table is looked up as sequences, by one feature."""
HOT = (0, 0, 3)
"""Number of hot rows, the first ones."""


def _read(rank: int, step: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng([rank, step])
    for rows, num in zip(ROWS, LOOKUPS):
        yield rng.integers(rows, size=BATCH * num), np.repeat(np.arange(BATCH), num)


def _stream() -> Stream:
    loads = [
        TableLoad(
            name=f"t{t}",
            num_embeddings=ROWS[t],
            dim=DIMS[t],
            lookups=BATCH * LOOKUPS[t],
            bags=BATCH,
            is_sequence=t == 2,
        )
        for t in range(3)
    ]
    hot = [np.arange(num) for num in HOT]
    return Stream(loads=loads, batch_size=BATCH, read=_read, hot_T=hot)


def _cold(rank: int, step: int) -> set[tuple[int, int]]:
    """Table and row of the cold rows of a batch."""
    ids = enumerate(_read(rank, step))
    return {(t, int(row)) for t, (rows, _) in ids for row in rows if row >= HOT[t]}


def _home(t: int, row: int) -> int:
    return int(np.searchsorted(np.cumsum(BLOCKS[t]), row, side="right"))


def _bytes(sent: dict[str, np.ndarray], wire: Wire, share: float | None = None) -> None:
    """Compares a matrix of bytes from rank to rank, ``(W, W)``, with what was counted. ``share``:
    bytes on a link by those that each rank sends of an even exchange."""
    places, means, across = wire.num_places, wire.sent_bytes(), 0
    either_way = wire.busiest_bytes(is_duplex=True)
    both_ways = wire.busiest_bytes(is_duplex=False)
    for purpose, matrix in sent.items():
        np.fill_diagonal(matrix, 0)
        assert means[purpose] == matrix.sum() / len(matrix), purpose
        hosts = np.arange(len(matrix)) // places
        crossing = matrix * (hosts[:, None] != hosts)
        across += crossing.sum()
        by_host = crossing.reshape(wire.num_hosts, places, -1).sum((1, 2))
        into_host = crossing.T.reshape(wire.num_hosts, places, -1).sum((1, 2))
        if share is None:
            share = places * places * (wire.num_hosts - 1) / (len(matrix) - 1)
        ways = (by_host / share, into_host / share) if share else (matrix.sum(1), matrix.sum(0))
        assert either_way[purpose] == np.max(ways), purpose
        assert both_ways[purpose] == np.mean(ways, axis=0).max(), purpose
    assert wire.across_bytes() == across / wire.num_hosts
    total = sum(sent.values())
    busiest = max(*total.sum(0), *total.sum(1))
    assert wire.busiest_over_mean() == pytest.approx(busiest / total.sum() * len(total))


def _cluster(num_hosts: int = 2, num_places: int = 2) -> tuple[Cluster, np.ndarray]:
    stream = _stream()
    cluster = Cluster(stream, num_hosts, num_places, BLOCKS)
    return cluster, count_step(stream, [cluster])


def test_rows_travel_once_for_each_rank_or_host() -> None:
    cluster, _ = _cluster()
    names = ("flags", "header", "bits", "ids", "mask", "rows", "gradients")
    flat, inside, across = ({name: np.zeros((4, 4), dtype=int) for name in names} for _ in range(3))

    def travel(sent: dict[str, np.ndarray], asks: int, serves: int, t: int, ids: int) -> None:
        sent["ids"][asks, serves] += 4 * ids
        sent["mask"][serves, asks] += 1
        sent["rows"][serves, asks] += 4 * DIMS[t]
        sent["gradients"][asks, serves] += 4 * DIMS[t]

    flat["flags"] += 32  # four of 8
    flat["header"] += 8
    flat["bits"] += 8
    for rank in range(4):
        for home in range(4):
            relay = rank // 2 * 2 + home % 2
            inside["header"][rank, relay] += 8
            across["header"][relay, home] += 8
            inside["flags"][rank, relay] = across["flags"][relay, home] = 32
            inside["bits"][rank, relay] += 8
            across["bits"][relay, home] += 8
        for t, row in _cold(rank, 1):
            home = _home(t, row)
            travel(flat, rank, home, t, 1)
            travel(inside, rank, rank // 2 * 2 + home % 2, t, 1)
    for host in range(2):
        asked = [row for rank in (2 * host, 2 * host + 1) for row in _cold(rank, 1)]
        for t, row in set(asked):
            home = _home(t, row)
            travel(across, 2 * host + home % 2, home, t, asked.count((t, row)))
    _bytes(flat, cluster.rows["rows"].levels["row_exchange"].wire)
    _bytes(inside, cluster.rows["node_rows"].levels["inside"].wire, 0.0)
    _bytes(across, cluster.rows["node_rows"].levels["across"].wire, 2.0)
    assert across["rows"].sum() < flat["rows"][:2, 2:].sum() + flat["rows"][2:, :2].sum()


def test_stock_sends_every_lookup() -> None:
    cluster, _ = _cluster()
    for tables, traffic_by_type in cluster.stock:
        for name, traffic in traffic_by_type.items():
            sent = {part: np.zeros((4, 4), dtype=int) for part in ("ids", "rows", "gradients")}
            for rank in range(4):
                for i, t in enumerate(tables):
                    rows, _ = list(_read(rank, 1))[t]
                    owners = np.repeat(np.arange(4), traffic.parts_TW[i])
                    homes = rows // -(-ROWS[t] // 4)
                    for home in homes if name == "row_wise" else ():
                        sent["ids"][rank, home] += 8
                        sent["rows"][home, rank] += 4 * DIMS[t]
                        sent["gradients"][rank, home] += 4 * DIMS[t]
                    for owner in owners:
                        sent["ids"][rank, owner] += 4 * BATCH
                        if name != "row_wise":
                            vectors = rows.size if t == 2 else BATCH
                            sent["ids"][rank, owner] += 8 * rows.size
                            width = 4 * DIMS[t] // len(owners)
                            sent["rows"][owner, rank] += width * vectors
                            sent["gradients"][rank, owner] += width * vectors
            if name == "row_wise" and 2 not in tables:
                sums = 3 * 4 * BATCH * sum(DIMS[t] for t in tables)
                for part in ("rows", "gradients"):
                    del sent[part]
                    assert (
                        traffic.wire.sent_bytes()[part]
                        == sums
                        == traffic.wire.busiest_bytes(is_duplex=True)[part]
                    )
                continue
            _bytes(sent, traffic.wire)


def test_rows_of_ranks_hosts_and_steps() -> None:
    cluster, first_used = _cluster()
    now, before = ([_cold(rank, step) for rank in range(4)] for step in (1, 0))
    assert cluster.sums_T["lookups"].tolist() == [4 * BATCH * num for num in LOOKUPS]
    for t in range(3):
        own = [{row for table, row in rows if table == t} for rows in now]
        earlier = {row for rows in before for table, row in rows if table == t}
        assert cluster.sums_T["cold"][t] == sum(map(len, own))
        assert cluster.sums_T["dirty"][t] == sum(len(rows & earlier) for rows in own)
        assert cluster.sums_T["new_cold"][t] == len(set.union(*own))
    assert 0 < cluster.sums_T["new_hot"][2] <= 3
    earlier, by_host = set.union(*before), (now[0] | now[1], now[2] | now[3])
    assert cluster.sums_T["host"].sum() == sum(map(len, by_host))
    assert cluster.sums_T["host_dirty"].sum() == sum(len(rows & earlier) for rows in by_host)
    served = [sum(_home(*row) == home for rows in now for row in rows) for home in range(4)]
    assert cluster.served_W.tolist() == served
    # of half of the samples the rows of both, by columns
    half = 0
    for rank in range(4):
        for t, (rows, sample) in enumerate(_read(rank, 1)):
            half += DIMS[t] * len({row for row in rows[sample < BATCH // 2] if row >= HOT[t]})
    total = sum(DIMS[t] for rows in now for t, _ in rows)
    assert first_used[BATCH // 2] == pytest.approx(half / total)
    assert (first_used[0], first_used[-1]) == (0, 1)


def test_smaller_clusters_have_the_first_ranks() -> None:
    stream = _stream()
    pair = Cluster(stream, 2, 1, [[20, 20], [5, 4], [4, 3]])
    count_step(stream, [pair, Cluster(stream, 2, 2, BLOCKS)])
    alone = Cluster(stream, 2, 1, [[20, 20], [5, 4], [4, 3]])
    count_step(stream, [alone])
    wires = (each.rows["rows"].levels["row_exchange"].wire for each in (pair, alone))
    assert len({str(wire.sent_bytes()) for wire in wires}) == 1
    assert all((pair.sums_T[name] == alone.sums_T[name]).all() for name in alone.sums_T)


def test_drawn_rows_follow_the_counts() -> None:
    counts = TableCounts(
        num_embeddings=1000,
        feature_names=("f",),
        rows_U=torch.tensor([3, 10, 500]),
        counts_U=torch.tensor([600, 300, 100]),
    )
    stats = FrequencyStats(tables={"t": counts}, num_samples=500)
    table = ModelTable(name="t", num_embeddings=1000, feature_names=("f",))
    ((rows, sample),) = from_counts(stats, [table], 5000, seed=0)(rank=1, step=0)
    assert rows.size == 10_000
    assert np.bincount(sample).tolist() == [2] * 5000
    found = {row: (rows == row).mean() for row in (3, 10, 500)}
    assert found == pytest.approx({3: 0.6, 10: 0.3, 500: 0.1}, abs=0.02)
    # half of the lookups are of rows seen once, so half of those to come are of rare rows
    once = torch.cat([torch.tensor([250]), torch.ones(250, dtype=torch.int64)])
    seen = TableCounts(
        num_embeddings=1000, feature_names=("f",), rows_U=torch.arange(251), counts_U=once
    )
    stats = FrequencyStats(tables={"t": seen}, num_samples=500)
    ((rows, _),) = from_counts(stats, [table], 5000, seed=0)(rank=0, step=0)
    assert (rows == 0).mean() == pytest.approx(0.5, abs=0.03)
    # more than were seen, spread over the table
    assert 500 < np.unique(rows).size < 1000
    assert 900 < rows.max() < 1000
    # rare rows are near those seen once: all in the first 5,000
    few = TableCounts(
        num_embeddings=1_000_000,
        feature_names=("f",),
        rows_U=torch.arange(0, 5000, 5),
        counts_U=torch.tensor([1, 2]).repeat(500),
    )
    stats = FrequencyStats(tables={"t": few}, num_samples=1500)
    ((rows, _),) = from_counts(stats, [table], 5000, seed=0)(rank=0, step=0)
    assert (rows < 5000).mean() > 0.99
    assert 1150 < np.unique(rows).size <= 1250  # 1,000 seen ones, and 250 by Chao's bound
