"""Cost of hot/cold tables, from totals over those that share an exchange.

Tables of all modules share its collectives: header, ids, dirty mask, rows, gradients, and the
all-reduce of hot rows' gradients. Before each step all ranks agree on flags.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, TypeVar

from torchrec_picasso.cost.curves import CommCurves
from torchrec_picasso.cost.local import LocalCosts, LocalWork
from torchrec_picasso.cost.table_work import Summable, TableWork
from torchrec_picasso.exchange.agreement import Flags
from torchrec_picasso.exchange.header import NUM_OWN_WORDS
from torchrec_picasso.ops.ids import parts_to_unite, words_of
from torchrec_picasso.placement import FORMS, Form

HotColdTable = tuple[TableWork, float, Form]
"""The work of a table, its number of hot rows, and its form."""

WORD_BYTES, LENGTH_BYTES, WIRE_BYTES = 8, 4, 4
"""Bytes of an int64, of the length of a bag, and of a float32 element."""
FLAGS_BYTES = WORD_BYTES * len(Flags())
"""Bytes of a rank's flags, to each peer."""
_LARGEST_INT32 = 2**31 - 1

_COPY_NS = 0.7
"""Rows of several packs are concatenated before an exchange and split after it: 0.3 to 1.0 ns an
element and copy (docs/dev/log.md, 2026-11-24), beside the cost of a pack."""
_FURTHER_MODULE = 0.6
"""Cost of each further module, which shares the exchange of the first, in fixed costs of one: 0.5
to 0.9 for a second module, 0.3 to 0.6 each for three (docs/dev/log.md, 2026-11-27)."""


@dataclass(frozen=True, kw_only=True)
class HotColdTotals(Summable):
    """Expected work of one step on one rank, summed over the tables of one exchange.

    An owner-pooled table counts only in ``features``, ``rows`` and the fields of bags;
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
    bag_weights: float = 0.0
    bag_updated: float = 0.0  # ``updated`` of these tables: their home rank gets no row numbers

    @staticmethod
    def from_table(work: TableWork, num_hot: float, form: Form = "rows") -> HotColdTotals:
        """Computes the work of one table; its most frequent rows are hot unless owner-pooled."""
        load = work.load
        if FORMS[form].sends_bags:
            # lookups of all ranks spread over the home ranks: on average as many as of one batch
            return HotColdTotals(
                features=load.num_features,
                rows=load.num_embeddings,
                bags=load.bags,
                bag_elements=load.bags * load.dim,
                bag_lookups=load.lookups,
                bag_lookup_elements=load.lookups * load.dim,
                bag_weights=load.weights,
                bag_updated=work.unique_anywhere / work.world_size,
            )
        split = work.split(num_hot)
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
    uneven_bags: float = 1.0,
) -> ExchangeTimes:
    """Predicts the local work of one step in ``num_parts`` micro-batches.

    The work of a home rank on bags in forward is theirs alone; that in backward counts as update.
    """
    ids, fetched, updated = local_works(totals, num_modules, num_packs, num_parts)
    bags, ours = work_on_bags(totals, uneven_bags), costs.hot_cold
    # two copies of each element in forward, two in backward
    copies_ms = 2 * totals.cold_elements * _COPY_NS * 1e-6 if num_packs > 1 else 0.0
    call_ms, pool_ms, gather_ms = ours.forward.split_ms(fetched)
    backward_call_ms, sum_ms, update_ms = ours.backward.split_ms(updated)
    return ExchangeTimes(
        ids_ms=ours.input_dist.ms(ids),
        call_ms=call_ms,
        pool_ms=pool_ms,
        bag_pool_ms=ours.forward.ms(bags),
        gather_ms=gather_ms + copies_ms,
        backward_call_ms=backward_call_ms,
        sum_ms=sum_ms,
        update_ms=update_ms + copies_ms + ours.backward.ms(bags),
    )


def local_works(
    totals: HotColdTotals, num_modules: int = 1, num_packs: int = 1, num_parts: int = 1
) -> tuple[LocalWork, LocalWork, LocalWork]:
    """Returns the work on ids, in forward and in backward, without :func:`work_on_bags`. Costs are
    fitted to both, and price them. A received bag is copied like a row."""
    row_elements = totals.unique_elements + totals.bag_elements
    fetched = LocalWork(
        calls=1 + _FURTHER_MODULE * (num_modules - 1),
        features=totals.features,
        lookups=totals.lookups,
        rows=totals.unique + totals.bags,
        lookup_elements=totals.lookup_elements,
        bag_elements=totals.pooled_elements,
        row_elements=row_elements,
        # pooled output of one micro-batch; rows and their gradients of the whole batch
        buffer_elements=totals.pooled_elements / num_parts + 2 * row_elements,
        updated=totals.updated + totals.bag_updated,  # home rows, which are read
        packs=num_packs - 1,
    )
    # every rank updates all touched replicas and its own home rows
    updated = replace(
        fetched,
        rows=totals.cold + totals.touched + totals.bags,
        row_elements=totals.cold_elements + totals.touched_elements + totals.bag_elements,
        updated=fetched.updated + totals.touched,
    )
    ids = replace(
        fetched,
        bag_lookups=totals.bag_lookups,
        rows=totals.unique,
        row_elements=totals.unique_elements,
        buffer_elements=0.0,
        updated=totals.updated,
    )
    return ids, fetched, updated


def work_on_bags(totals: HotColdTotals, uneven: float) -> LocalWork:
    """Returns the work of the busiest home rank on owner-pooled bags, once in forward and once in
    backward: it pools them, and sums their gradients, with the operators of row-exchanged tables.
    ``uneven`` is its load divided by the mean."""
    return LocalWork(
        calls=0.0,
        lookups=totals.bag_lookups * uneven,
        bag_lookups=totals.bag_lookups * uneven,
        lookup_elements=totals.bag_lookup_elements * uneven,
        bag_elements=totals.bag_elements * uneven,
    )


def bit_bytes(num_hot: float, world_size: int) -> tuple[int, int]:
    """Returns the bytes that say which hot rows are touched, from one rank to another: of a batch,
    in the header, and united over ranks."""
    hot = math.ceil(num_hot)
    num_parts = parts_to_unite(hot, world_size)
    num_bytes = WORD_BYTES * words_of(hot, num_parts)
    return num_bytes, num_bytes * (num_parts > 1)


def id_bytes(num_rows: float) -> int:
    """Returns the bytes of a row number, if a home rank has so many rows."""
    return 4 if num_rows <= _LARGEST_INT32 else 8


@dataclass(frozen=True)
class Way:
    """Traffic of one collective of rows in a step."""

    collective: str
    """The collective of rows, as in curves."""
    sum_collective: str
    """The collective of hot rows' gradients."""
    totals: HotColdTotals
    """Work by what travels: a row that crosses hosts counts once per host."""
    sent: Mapping[str, float]
    """Bytes that a rank sends, by purpose."""


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """The tables of one exchange, here of ranks with home ranks, directly. A form whose rows travel
    in another way has a subclass, in :data:`.EXCHANGES`."""

    way: ClassVar[str] = "directly"
    margin: ClassVar[float] = 0.0
    """A plan of such tables is chosen only if it gains this share of the best other plan's step."""

    totals: HotColdTotals
    num_packs: int = 1

    @classmethod
    def from_tables(cls: type[_E], tables: Sequence[HotColdTable], num_packs: int) -> _E:
        """Computes the work of tables, in ``num_packs`` packs."""
        totals = HotColdTotals.sum(HotColdTotals.from_table(*table) for table in tables)
        return cls(totals=totals, num_packs=num_packs)

    @staticmethod
    def has_price(curves: CommCurves, world_size: int) -> bool:
        """Whether curves have the times of its collectives between so many ranks."""
        return True

    @staticmethod
    def held(work: TableWork, num_hot: float) -> tuple[float, float]:
        """Returns vectors of a table, and other bytes, that a rank holds for others in a step."""
        return 0.0, 0.0

    @staticmethod
    def describe(work: TableWork, num_hot: float) -> str:
        """Says what this way saves of a table, followed by a comma; nothing by default."""
        return ""

    def ways(self, world_size: int) -> list[Way]:
        """Predicts what each collective of rows carries: mean over ranks."""
        totals, others = self.totals, world_size - 1
        share = others / world_size  # rows with their home on this rank are not sent
        rows = (totals.cold_elements + totals.bag_elements) * WIRE_BYTES * share
        ids = (totals.cold + totals.bag_lookups) * id_bytes(totals.rows / world_size)
        ids += totals.bag_weights * WIRE_BYTES + totals.bags * LENGTH_BYTES
        header, united = self._pair_bytes(world_size)
        sent = {
            "flags": others * FLAGS_BYTES,
            "header": others * header,
            "ids": ids * share + others * united,
            "rows": rows,
            "gradients": rows,
            "hot": 2 * share * totals.touched_elements * WIRE_BYTES,  # summed in a ring
        }
        return [Way("row_exchange", "all_reduce", totals, sent)]

    def _pair_bytes(self, world_size: int) -> tuple[int, int]:
        """Returns the bytes from one rank to another of a header, of one chunk, and of united bits
        of hot rows."""
        bits, united = bit_bytes(self.totals.hot, world_size)
        return WORD_BYTES * (self.num_packs + NUM_OWN_WORDS) + bits, united

    def with_own_work(self, times: ExchangeTimes, costs: LocalCosts) -> ExchangeTimes:
        """Adds work beside that of ranks and home ranks."""
        return times


_E = TypeVar("_E", bound=Exchange)
