"""Cost of the packed unique exchange, computed from totals over the hot/cold tables.

All tables of a module share five collectives per step: header, ids, rows, gradients, and the
all-reduce of hot rows' gradients.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from torchrec_picasso.batches.split import micro_batch_sizes
from torchrec_picasso.cost.local import LocalCosts, LocalWork
from torchrec_picasso.cost.table_work import Summable, TableLoad, TableWork
from torchrec_picasso.ops.ids import parts_to_unite, words_of
from torchrec_picasso.placement import Form

_WORD_BYTES = 8
HEADER_FLAGS = 3
"""Words of a header that are no counts."""
_LENGTH_BYTES = 4
_WIRE_BYTES = 4  # a float32 element
_MARK_BYTES, _COUNT_BYTES = 1, 4  # of a home row
_LARGEST_INT32 = 2**31 - 1

# Rows of several packs are concatenated before an exchange and split after it. On one core, 24
# tables in two or four packs took 9 to 12 ms more than in one with 21,700 rows of D=128, 1.7 and
# 2.9 ms with 5,900, 3.7 ms with 21,700 of D=64 (four packs): 0.3 to 1.0 ns for each of four copies
# of an element, beside the cost of a pack.
_COPY_NS = 0.7

_MATRICES = (2.75, 3.5)
"""Rows held at the peak of a step, per distinct row of the batch: of a whole batch, and in
micro-batches. Two matrices with their slack, in micro-batches sums too, and rows that are sent."""
_LOOKUP_BYTES = (100, 170)
"""Of ids and positions, per lookup, in the same two cases. Predictions of sequences and of pooled
tables are within 10 % of measured peaks (``benchmarks.sequence_memory``, docs/dev/log.md)."""
_RELAYED, _RELAYED_BYTES = 1.125, 100
"""Of relays: vectors held per row that one asks home ranks for, and per gradient that it sums, both
in buffers with their slack; bytes of positions per row that it is asked for."""
_SAMPLES = 1000  # of which micro-batches have shares


@dataclass(frozen=True, kw_only=True)
class HotColdTotals(Summable):
    """Expected work of one step on one rank, summed over the tables of one exchange.

    An owner-pooled table counts only in ``features``, ``updated``, ``rows`` and the fields of bags;
    a row-exchanged one is pooled on this rank, and its bags count in ``pooled_elements``.
    Fields named ``*_elements`` are numbers of rows, lookups or bags times dim.
    """

    features: float = 0.0
    lookups: float = 0.0
    lookup_elements: float = 0.0
    pooled_elements: float = 0.0
    unique: float = 0.0  # distinct rows of the rank's batch
    unique_elements: float = 0.0
    cold: float = 0.0  # distinct cold rows of the rank's batch
    cold_elements: float = 0.0
    dirty_elements: float = 0.0  # of the cold rows that the batch before updates
    updated: float = 0.0  # home rows that the rank updates: distinct over all ranks' batches
    touched: float = 0.0  # hot rows in any rank's batch
    touched_elements: float = 0.0
    hot: float = 0.0  # hot rows of the tables
    rows: float = 0.0  # rows of the tables
    bags: float = 0.0  # bags of the rank's batch in owner-pooled tables
    bag_elements: float = 0.0
    bag_lookups: float = 0.0
    bag_lookup_elements: float = 0.0
    # of tables by host: distinct cold rows of the batches of a host's ranks, over their number
    crossing: float = 0.0
    crossing_elements: float = 0.0
    crossing_dirty_elements: float = 0.0  # of those that the batch before updates

    @staticmethod
    def from_table(work: TableWork, num_hot: float, form: Form = "rows") -> HotColdTotals:
        """Computes the work of one table; its most frequent rows are hot unless owner-pooled."""
        load = work.load
        if form == "bags":
            # The lookups of all ranks spread over the home ranks: on average as many as one batch.
            return HotColdTotals(
                features=load.num_features,
                updated=work.unique_anywhere / work.world_size,
                rows=load.num_embeddings,
                bags=load.bags,
                bag_elements=load.bags * load.dim,
                bag_lookups=load.lookups,
                bag_lookup_elements=load.lookups * load.dim,
            )
        split, crossing, crossing_dirty = work.split(num_hot), 0.0, 0.0
        if form == "node_rows":
            crossing = split.cold_on_host / work.ranks_per_host
            crossing_dirty = split.dirty_on_host / work.ranks_per_host
        return HotColdTotals(
            features=load.num_features,
            lookups=load.lookups,
            lookup_elements=load.lookups * load.dim,
            pooled_elements=load.vectors * load.dim,
            unique=work.unique,
            unique_elements=work.unique * load.dim,
            cold=split.cold_used,
            cold_elements=split.cold_used * load.dim,
            dirty_elements=split.dirty * load.dim,
            updated=split.cold_touched / work.world_size,
            touched=split.hot_touched,
            touched_elements=split.hot_touched * load.dim,
            hot=num_hot,
            rows=load.num_embeddings,
            crossing=crossing,
            crossing_elements=crossing * load.dim,
            crossing_dirty_elements=crossing_dirty * load.dim,
        )


@dataclass(frozen=True, kw_only=True)
class ByHost:
    """The tables whose rows travel by host: in an exchange of their own, of two parts."""

    totals: HotColdTotals
    num_packs: int
    ranks_per_host: int

    @property
    def crossing(self) -> HotColdTotals:
        """The totals with the cold rows that a relay asks home ranks for, each once."""
        totals = self.totals
        return replace(
            totals,
            cold=totals.crossing,
            cold_elements=totals.crossing_elements,
            dirty_elements=totals.crossing_dirty_elements,
        )


@dataclass(frozen=True, kw_only=True)
class ExchangeTimes:
    """Local work of one step on one rank, milliseconds."""

    ids_ms: float  # deduplication and layout of ids
    call_ms: float  # fixed cost of forward
    pool_ms: float  # pooling of fetched rows
    bag_pool_ms: float  # pooling at the home ranks of owner-pooled tables
    gather_ms: float  # copies of rows at the home rank and at the rank of the batch
    backward_call_ms: float  # fixed cost of backward
    sum_ms: float  # sums of gradients by row
    update_ms: float  # sums of received gradients, and the update


def exchange_times(
    totals: HotColdTotals,
    costs: LocalCosts,
    num_modules: int = 1,
    num_packs: int = 1,
    num_parts: int = 1,
) -> ExchangeTimes:
    """Predicts the local work of one step in ``num_parts`` micro-batches.

    A home rank pools the lookups of bags and sums their gradients by row with the operators of
    row-exchanged tables, and sorts these lookups by row in backward. On average it has as many of
    them as one rank's batch. Their ids are only sent.
    """
    ids, fetched, updated = _works(totals, num_modules, num_packs, num_parts)
    bag_work = LocalWork(
        lookups=totals.bag_lookups,
        lookup_elements=totals.bag_lookup_elements,
        bag_elements=totals.bag_elements,
    )
    ours, million_bag_lookups = costs.hot_cold, totals.bag_lookups * 1e-6
    # two copies of each element in forward, two in backward
    copies_ms = 2 * totals.cold_elements * _COPY_NS * 1e-6 if num_packs > 1 else 0.0
    call_ms, pool_ms, gather_ms = ours.forward.split_ms(fetched)
    backward_call_ms, sum_ms, update_ms = ours.backward.split_ms(updated)
    bag_sum_ms = ours.backward.split_ms(bag_work)[1]
    bag_sort_ms = ours.input_dist.lookup_ns * million_bag_lookups
    return ExchangeTimes(
        ids_ms=ours.input_dist.ms(ids) + costs.stock.input_dist.lookup_ns * million_bag_lookups,
        call_ms=call_ms,
        pool_ms=pool_ms,
        bag_pool_ms=ours.forward.split_ms(bag_work)[1],
        gather_ms=gather_ms + copies_ms,
        backward_call_ms=backward_call_ms,
        sum_ms=sum_ms,
        update_ms=update_ms + copies_ms + bag_sum_ms + bag_sort_ms,
    )


def with_relays(times: ExchangeTimes, by_host: ByHost, costs: LocalCosts) -> ExchangeTimes:
    """Adds the work of relays: row numbers are sorted there, and once more at home; each asked row
    is copied, and its gradient is summed, once more."""
    totals, ours = by_host.totals, costs.hot_cold
    relayed = LocalWork(calls=0, rows=totals.cold, row_elements=totals.cold_elements)
    return replace(
        times,
        ids_ms=times.ids_ms + 2 * ours.input_dist.lookup_ns * totals.cold * 1e-6,
        gather_ms=times.gather_ms + ours.forward.ms(relayed),
        update_ms=times.update_ms + ours.backward.ms(relayed),
    )


def _works(
    totals: HotColdTotals, num_modules: int, num_packs: int, num_parts: int
) -> tuple[LocalWork, LocalWork, LocalWork]:
    """Returns the work on ids, in forward and in backward; a received bag is copied like a row."""
    row_elements = totals.unique_elements + totals.bag_elements
    fetched = LocalWork(
        calls=num_modules,
        features=totals.features,
        lookups=totals.lookups,
        rows=totals.unique + totals.bags,
        lookup_elements=totals.lookup_elements,
        bag_elements=totals.pooled_elements,
        row_elements=row_elements,
        # pooled output of one micro-batch; rows and their gradients of the whole batch
        buffer_elements=totals.pooled_elements / num_parts + 2 * row_elements,
        packs=num_packs - 1,
    )
    # every rank updates all touched replicas and its own home rows
    updated = replace(
        fetched,
        rows=totals.cold + totals.touched + totals.bags,
        row_elements=totals.cold_elements + totals.touched_elements + totals.bag_elements,
        updated=totals.updated + totals.touched,
    )
    ids = replace(fetched, rows=totals.unique, row_elements=totals.unique_elements)
    return replace(ids, buffer_elements=0.0, updated=totals.updated), fetched, updated


def exchange_bytes(totals: HotColdTotals, world_size: int, num_packs: int) -> dict[str, float]:
    """Predicts the bytes that a rank sends, by purpose: mean over ranks."""
    to_others = (world_size - 1) / world_size  # rows with their home on this rank are not sent
    rows = (totals.cold_elements + totals.bag_elements) * _WIRE_BYTES * to_others
    ids = (totals.cold + totals.bag_lookups) * id_bytes(totals.rows) + totals.bags * _LENGTH_BYTES
    bits, united = _bit_bytes(totals, world_size)
    return {
        "header": (world_size - 1) * (_count_bytes(num_packs) + bits),
        "ids": ids * to_others + (world_size - 1) * united,
        "rows": rows,
        "gradients": rows,
        "hot": 2 * to_others * totals.touched_elements * _WIRE_BYTES,  # summed in a ring
    }


def level_bytes(by_host: ByHost, world_size: int) -> dict[str, dict[str, float]]:
    """Predicts the bytes that a rank sends inside its host and across hosts, by purpose: mean over
    ranks. Row numbers cross with repeats, rows and their gradients once per host."""
    totals, places = by_host.totals, by_host.ranks_per_host
    hot = totals.touched_elements * _WIRE_BYTES
    bits, united = _bit_bytes(totals, world_size)
    members = {"inside": places, "across": world_size // places}
    rows = {"inside": totals.cold_elements, "across": totals.crossing_elements}
    summed = {"inside": hot, "across": hot / places}  # each place sums a piece over hosts
    united_by = {"inside": places * united, "across": world_size * united}  # those of its host
    sent = {
        level: {
            # each peer gets those of the ranks behind it
            "header": world_size * (_count_bytes(by_host.num_packs) + bits),
            "ids": totals.cold * id_bytes(totals.rows) + united_by[level],
            "rows": rows[level] * _WIRE_BYTES,
            "gradients": rows[level] * _WIRE_BYTES,
            "hot": 2 * summed[level],
        }
        for level, num in members.items()
    }
    return {
        level: {name: (num - 1) / num * sent[level][name] for name in sent[level]}
        for level, num in members.items()
    }


def _count_bytes(num_packs: int) -> float:
    """Returns the bytes of a header from one rank to another, of one chunk, without bits."""
    return _WORD_BYTES * (num_packs + HEADER_FLAGS)


def _bit_bytes(totals: HotColdTotals, world_size: int) -> tuple[int, int]:
    """Returns the bytes that say which hot rows are touched, from one rank to another: of a batch,
    in the header, and united over ranks."""
    hot = math.ceil(totals.hot)
    num_parts = parts_to_unite(hot, world_size)
    num_bytes = _WORD_BYTES * words_of(hot, num_parts)
    return num_bytes, num_bytes * (num_parts > 1)


def id_bytes(num_rows: float) -> int:
    """Returns the bytes of a row number, if tables of so many rows share an exchange."""
    return 4 if num_rows <= _LARGEST_INT32 else 8


def home_row_bytes(load: TableLoad, num_hot: float, form: Form) -> float:
    """Returns the bytes of a home row: weights, optimizer state, and what is kept beside them."""
    return load.row_bytes + beside_home_row_bytes(num_hot, form)


def beside_home_row_bytes(num_hot: float, form: Form) -> int:
    """Returns the bytes that are kept of a home row beside the row: its mark as dirty, and its
    access count if the table has hot rows (``rows/row_route.py``, ``storage/row_uses.py``). Bags
    have neither."""
    return 0 if form == "bags" else _MARK_BYTES + _COUNT_BYTES * (num_hot > 0)


def hot_cold_memory_bytes(
    tables: Iterable[tuple[TableWork, float, Form]], num_parts: int = 1
) -> dict[str, float]:
    """Predicts the bytes of hot/cold tables per rank; each has its number of hot rows and its form.

    ``home`` and ``replica`` are rows with their state, ``optimizer`` the state of both, and
    ``buffers`` those of a step in ``num_parts`` micro-batches with lookahead: rows, output, and
    their gradients, those that a relay passes on included."""
    home = replica = optimizer = buffers = 0.0
    sizes_K = micro_batch_sizes(_SAMPLES, num_parts)
    matrices, lookup_bytes = _MATRICES[num_parts > 1], _LOOKUP_BYTES[num_parts > 1]
    with_gradient = 1 + max(sizes_K) / _SAMPLES
    for work, hot, form in tables:
        load = work.load
        at_home = load.num_embeddings / work.world_size
        home += at_home * home_row_bytes(load, hot, form)
        replica += hot * load.replica_bytes
        state_bytes = load.row_bytes * (load.optimizer_share / (1 + load.optimizer_share))
        optimizer += (at_home + hot) * state_bytes
        vectors = matrices * work.unique + with_gradient * load.vectors
        buffers += load.lookups * lookup_bytes
        if form == "node_rows":
            relayed = HotColdTotals.from_table(work, hot, form)
            vectors += _RELAYED * (relayed.crossing + relayed.cold)
            buffers += relayed.cold * _RELAYED_BYTES
        buffers += vectors * load.dim * _WIRE_BYTES
    return {"home": home, "replica": replica, "optimizer": optimizer, "buffers": buffers}
