"""Cost of the packed unique exchange for given hot sets. Pure arithmetic.

One exchange serves all tables of a module, so cost is a function of totals over the tables; what a
table or a row adds is a difference of two answers. Five collectives carry a step: header, ids,
rows, gradients, and the hot rows' all-reduce.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter

from torchrec_picasso.cost.curves import CommCurves
from torchrec_picasso.cost.local import LocalCosts, LocalWork
from torchrec_picasso.cost.step_cost import StepCost, sum_columns
from torchrec_picasso.cost.table_work import EARLY_SHARES, TableWork
from torchrec_picasso.placement import Form

__all__ = [
    "ExchangeWork",
    "HotColdTotals",
    "bag_costs_ms",
    "exchange_bytes",
    "exchange_work",
    "hot_cold_cost",
    "hot_cold_memory_bytes",
    "hot_cold_totals",
    "ids_cost_ms",
    "packs_cost_ms",
    "sum_hot_cold",
]

_WORD_BYTES = 8
_WORD_BITS = 64
_FLAGS = 3  # words of the header beside the counts
_LENGTH_BYTES = 4
_WIRE_BYTES = 4  # a float32 element
_LARGEST_INT32 = 2**31 - 1

# Rows of several packs are joined before an exchange and cut apart after it. On one core a second
# pack took 28 ms more in a step with 22,900 rows of D=128, 2.4 ns for each of the four times that
# an element is copied. A pack's own operators are some hundred, of 10 us each.
_COPY_NS = 2.4
_PACK_MS = 0.5  # in forward, and again in backward


@dataclass(frozen=True)
class HotColdTotals:
    """What the tables of one exchange ask of a step, expected, per rank.

    Args:
        features: Features of the tables.
        lookups: Lookups of the rank's batch.
        lookup_elements: The same times dim.
        unique: Distinct rows of the rank's batch.
        unique_elements: The same times dim.
        cold: Those of them that travel.
        cold_elements: The same times dim.
        cold_early0: Elements of the cold rows that the first part of the batch uses, by
            :data:`torchrec_picasso.cost.table_work.EARLY_SHARES`.
        cold_early1: Likewise.
        cold_early2: Likewise.
        dirty_elements: Elements of the cold rows that the batch before updates.
        dirty_early0: Of these, those that the first part of the batch uses.
        dirty_early1: Likewise.
        dirty_early2: Likewise.
        updated: Cold rows that this rank updates: distinct ones over all ranks, at their homes.
        touched: Hot rows that any rank uses.
        touched_elements: The same times dim.
        hot: Hot rows, used or not.
        rows: Rows of the tables.
        bags: Bags of the tables that travel as bags; their lookups and rows count here only, and
            in ``features``, ``rows`` and ``updated``.
        bag_elements: The same times dim.
        bag_lookups: Lookups of their bags.
        bag_lookup_elements: The same times dim.
    """

    features: float = 0.0
    lookups: float = 0.0
    lookup_elements: float = 0.0
    unique: float = 0.0
    unique_elements: float = 0.0
    cold: float = 0.0
    cold_elements: float = 0.0
    cold_early0: float = 0.0
    cold_early1: float = 0.0
    cold_early2: float = 0.0
    dirty_elements: float = 0.0
    dirty_early0: float = 0.0
    dirty_early1: float = 0.0
    dirty_early2: float = 0.0
    updated: float = 0.0
    touched: float = 0.0
    touched_elements: float = 0.0
    hot: float = 0.0
    rows: float = 0.0
    bags: float = 0.0
    bag_elements: float = 0.0
    bag_lookups: float = 0.0
    bag_lookup_elements: float = 0.0

    def plus(self, other: HotColdTotals, times: float = 1.0) -> HotColdTotals:
        """The sum with ``times`` the other; ``times=-1`` takes a table out again."""
        sums = (a + times * b for a, b in zip(_values(self), _values(other)))
        return HotColdTotals(*sums)

    @staticmethod
    def of(work: TableWork, num_hot: float, form: Form = "rows") -> HotColdTotals:
        """One table whose ``num_hot`` most frequent rows are hot, or whose bags travel."""
        load = work.load
        if form == "bags":
            return HotColdTotals(
                features=load.num_features,
                updated=work.unique_anywhere / work.world_size,
                rows=load.num_embeddings,
                bags=load.bags,
                bag_elements=load.bags * load.dim,
                bag_lookups=load.lookups,
                bag_lookup_elements=load.lookups * load.dim,
            )
        split = work.split(num_hot)
        cold_early = (rows * load.dim for rows in split.cold_early)
        dirty_early = (rows * load.dim for rows in split.dirty_early)
        return HotColdTotals(
            features=load.num_features,
            lookups=load.lookups,
            lookup_elements=load.lookups * load.dim,
            unique=work.unique,
            unique_elements=work.unique * load.dim,
            cold=split.cold_used,
            cold_elements=split.cold_used * load.dim,
            **dict(zip(_COLD_EARLY, cold_early)),
            dirty_elements=split.dirty * load.dim,
            **dict(zip(_DIRTY_EARLY, dirty_early)),
            updated=split.cold_touched / work.world_size,
            touched=split.hot_touched,
            touched_elements=split.hot_touched * load.dim,
            hot=num_hot,
            rows=load.num_embeddings,
        )

    @staticmethod
    def sum_of(tables: Iterable[tuple[float, ...]]) -> HotColdTotals:
        """The sum of tables, of each its :attr:`values`."""
        return HotColdTotals(*sum_columns(tables, len(_FIELDS)))

    @property
    def values(self) -> tuple[float, ...]:
        """All of it, in order."""
        found: tuple[float, ...] = _values(self)
        return found

    @property
    def cold_early(self) -> tuple[float, ...]:
        """Elements of the cold rows of the first parts of a batch."""
        return self.cold_early0, self.cold_early1, self.cold_early2

    @property
    def dirty_early(self) -> tuple[float, ...]:
        """Elements of the dirty ones among them."""
        return self.dirty_early0, self.dirty_early1, self.dirty_early2


_COLD_EARLY = tuple(f"cold_early{place}" for place in range(len(EARLY_SHARES)))
_DIRTY_EARLY = tuple(f"dirty_early{place}" for place in range(len(EARLY_SHARES)))
_FIELDS = tuple(field.name for field in dataclasses.fields(HotColdTotals))
_values = attrgetter(*_FIELDS)


def hot_cold_totals(works: Iterable[TableWork], num_hot: Iterable[float]) -> HotColdTotals:
    """Sums tables that travel as rows, with their numbers of hot rows."""
    return sum_hot_cold(HotColdTotals.of(work, hot) for work, hot in zip(works, num_hot))


def sum_hot_cold(tables: Iterable[HotColdTotals]) -> HotColdTotals:
    """Sums what single tables ask for."""
    return HotColdTotals.sum_of(map(_values, tables))


def hot_cold_cost(
    totals: HotColdTotals,
    curves: CommCurves,
    world_size: int,
    *,
    num_packs: int = 1,
    home_max_over_mean: float = 1.0,
) -> StepCost:
    """Expected cost of one step of one module's hot/cold tables.

    Args:
        totals: Their sum.
        curves: Measured communication and local work.
        world_size: Ranks.
        num_packs: Distinct dims among the tables.
        home_max_over_mean: Load of the busiest home over the mean.

    Returns:
        Zero for no tables.
    """
    if not totals.features:
        return StepCost()
    wire = exchange_bytes(totals, world_size, num_packs)

    def ms(collective: str, name: str, uneven: float = 1.0) -> float:
        return curves.ms(collective, wire[name] * uneven, world_size)

    header_and_ids_ms = ms("row_exchange", "header") + ms("row_exchange", "ids", home_max_over_mean)
    hot_ms = ms("all_reduce", "hot") if wire["hot"] else 0.0
    work = exchange_work(totals)
    costs = curves.local.hot_cold
    packs_ms = packs_cost_ms(totals, num_packs)
    bags_forward_ms, bags_backward_ms = bag_costs_ms(totals, curves.local)
    return StepCost(
        input_dist_ms=ids_cost_ms(totals, curves.local) + header_and_ids_ms,
        forward_compute_ms=costs.forward.ms(work.fetched) + packs_ms + bags_forward_ms,
        forward_comms_ms=ms("row_exchange", "rows", home_max_over_mean),
        backward_compute_ms=costs.backward.ms(work.updated) + packs_ms + bags_backward_ms,
        backward_comms_ms=ms("row_exchange", "gradients", home_max_over_mean) + hot_ms,
        input_dist_wire_ms=header_and_ids_ms,
        sent_bytes=wire,
    )


@dataclass(frozen=True, kw_only=True)
class ExchangeWork:
    """What a rank does in a step, for its own batch and as a home.

    Args:
        fetched: Forward: rows gathered at home and placed, lookups pooled.
        updated: Backward: gradients summed by row, and rows updated.
    """

    fetched: LocalWork
    updated: LocalWork


def exchange_work(totals: HotColdTotals, num_parts: int = 1) -> ExchangeWork:
    """The local work of one step.

    The rank that bags are for copies them, as it copies rows; what their home does with their
    lookups is in :func:`bag_costs_ms`.

    Args:
        totals: Of the tables.
        num_parts: Parts that the batch is cut into: only one at a time has its buffers.
    """
    row_elements = totals.unique_elements + totals.bag_elements
    fetched = LocalWork(
        features=totals.features,
        lookups=totals.lookups,
        rows=totals.unique + totals.bags,
        lookup_elements=totals.lookup_elements,
        row_elements=row_elements,
        buffer_elements=totals.lookup_elements / num_parts + 2 * row_elements,
    )
    # every rank updates all touched replicas, and the cold rows that are at home there
    updated = dataclasses.replace(
        fetched,
        rows=totals.cold + totals.touched + totals.bags,
        row_elements=totals.cold_elements + totals.touched_elements + totals.bag_elements,
        updated=totals.updated + totals.touched,
    )
    return ExchangeWork(fetched=fetched, updated=updated)


def bag_costs_ms(totals: HotColdTotals, costs: LocalCosts) -> tuple[float, float]:
    """What a home does with the lookups of bags: pools them, and sums their gradients by row.

    That is what stock tables do with theirs. A home has as many of them as a rank's batch has:
    those of all ranks, spread over the homes.

    Returns:
        Milliseconds in forward and in backward.
    """
    work = LocalWork(lookups=totals.bag_lookups, lookup_elements=totals.bag_lookup_elements)
    _, forward_ms, _ = costs.stock.forward.split_ms(work)
    _, backward_ms, _ = costs.stock.backward.split_ms(work)
    return forward_ms, backward_ms


def ids_cost_ms(totals: HotColdTotals, costs: LocalCosts) -> float:
    """Local work on ids: rows are made unique; bags only wander home, as stock ones do."""
    unique = LocalWork(
        features=totals.features,
        lookups=totals.lookups,
        rows=totals.unique,
        lookup_elements=totals.lookup_elements,
        row_elements=totals.unique_elements,
        updated=totals.updated,
    )
    return costs.hot_cold.input_dist.ms(unique) + (
        costs.stock.input_dist.lookup_ns * totals.bag_lookups * 1e-6
    )


def packs_cost_ms(totals: HotColdTotals, num_packs: int) -> float:
    """What several packs take more than one, in forward as in backward."""
    if num_packs == 1:
        return 0.0
    return _PACK_MS * (num_packs - 1) + 2 * totals.cold_elements * _COPY_NS * 1e-6


def exchange_bytes(totals: HotColdTotals, world_size: int, num_packs: int) -> dict[str, float]:
    """Mean bytes that a rank sends, by purpose; homes share the cold rows evenly.

    Args:
        totals: Of the tables.
        world_size: Ranks.
        num_packs: Distinct dims among the tables.
    """
    to_others = (world_size - 1) / world_size
    hot_words = math.ceil(totals.hot / _WORD_BITS)
    id_bytes = 4 if totals.rows <= _LARGEST_INT32 else 8
    rows = (totals.cold_elements + totals.bag_elements) * _WIRE_BYTES * to_others
    ids = (totals.cold + totals.bag_lookups) * id_bytes + totals.bags * _LENGTH_BYTES
    return {
        "header": (world_size - 1) * _WORD_BYTES * (num_packs + _FLAGS + hot_words),
        "ids": ids * to_others,
        "rows": rows,
        "gradients": rows,
        "hot": 2 * to_others * totals.touched_elements * _WIRE_BYTES,
    }


def hot_cold_memory_bytes(works: Sequence[TableWork], num_hot: Sequence[float]) -> dict[str, float]:
    """Expected bytes per rank.

    Args:
        works: The tables.
        num_hot: Hot rows of each.

    Returns:
        ``home`` and ``replica`` (weights and optimizer state), ``optimizer`` (the state's part of
        both), ``buffers`` (rows asked of this home, rows fetched, the gradients of both, and the
        pooled output with its gradient).
    """
    home = replica = optimizer = buffers = 0.0
    for work, hot in zip(works, num_hot):
        load = work.load
        at_home = load.num_embeddings / work.world_size
        home += at_home * load.row_bytes
        replica += hot * load.row_bytes
        optimizer += (
            (at_home + hot) * load.row_bytes * (load.optimizer_share / (1 + load.optimizer_share))
        )
        buffers += (4 * work.unique + 2 * load.bags) * load.dim * _WIRE_BYTES
    return {"home": home, "replica": replica, "optimizer": optimizer, "buffers": buffers}
