"""Cost of TorchRec's own sharding types.

TorchRec exchanges lengths and values of the KeyedJaggedTensor, then pooled rows or the row of each
lookup of sequences, then their gradients. Row-wise sharding uses a reduce-scatter and an all-gather
of partial sums for pooled rows, data-parallel sharding an all-reduce of the gradients of whole
tables, and all else an all-to-all.

Source: TorchRec ``distributed/sharding/{tw,rw,cw,dp}_sharding.py``,
``distributed/sharding/rw_sequence_sharding.py``, ``distributed/dist_data.py``.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np

from torchrec_picasso.cost.curves import CommCurves
from torchrec_picasso.cost.local import PHASES, LocalWork
from torchrec_picasso.cost.table_work import Summable, TableLoad, TableWork

STOCK_TYPES = ("table_wise", "row_wise", "column_wise", "data_parallel")
"""TorchRec sharding types with a cost model."""

_ID_BYTES = 8
_LENGTH_BYTES = 4
_WIRE_BYTES = 4
_HELD_BYTES = 16  # ids, lengths and order, per own lookup and per served one
_MIN_COLUMNS = 4  # FBGEMM's narrowest shard
_Number = TypeVar("_Number", float, np.ndarray)
_SMALL_MAP = 4_000  # rows; those of a smaller map take as long each
_DENSE_UPDATE_PASSES = 3  # over the whole table: zero, write and apply the gradient


@dataclass(frozen=True, kw_only=True)
class StockCost(Summable):
    """Predicted cost of the stock tables in one step on the busiest rank, without overlap."""

    ids_ms: float = 0.0  # local work on ids
    ids_wire_ms: float = 0.0  # exchange of ids
    forward_ms: float = 0.0  # gather and pooling
    forward_wire_ms: float = 0.0  # exchange of rows
    backward_ms: float = 0.0  # gradients of rows, and the update
    backward_wire_ms: float = 0.0  # exchange of gradients
    exchanges: float = 0.0  # of rows: one for each module and sharding type
    sent_bytes: Mapping[str, float] = field(default_factory=dict)
    """Bytes that a rank sends, by purpose; mean over ranks."""

    @property
    def compute_ms(self) -> float:
        """All local work."""
        return self.ids_ms + self.forward_ms + self.backward_ms

    @property
    def wire_ms(self) -> float:
        """All communication."""
        return self.ids_wire_ms + self.forward_wire_ms + self.backward_wire_ms

    @property
    def exposed_ms(self) -> float:
        """Everything but the exchange of ids, which TorchRec's pipelines hide."""
        return self.compute_ms + self.wire_ms - self.ids_wire_ms


@dataclass(frozen=True, kw_only=True)
class StockTotals(Summable):
    """Expected work of one step on one rank, summed over tables of one stock sharding type. Fields
    named ``*_elements`` are numbers of lookups, bags or rows times dim."""

    features: float = 0.0
    lookups: float = 0.0  # of the rank's batch, times the ranks that each is sent to
    lookup_elements: float = 0.0
    weights: float = 0.0  # of lookups, times the ranks that each is sent to
    lengths: float = 0.0  # bag lengths of the batch, times the ranks that each is sent to
    vector_elements: float = 0.0  # of outputs that are sent as they are
    summed_elements: float = 0.0  # of those that are sums of all ranks' parts
    rows: float = 0.0  # distinct rows over all ranks' batches in each shard that the rank updates
    row_elements: float = 0.0
    hashed: float = 0.0  # :func:`hashed_work` of sequences
    table_elements: float = 0.0

    @staticmethod
    def from_table(sharding_type: str, work: TableWork) -> StockTotals:
        """Computes the work of one table."""
        load, world_size = work.load, work.world_size
        # every column shard gets all ids
        copies = _column_shards(load, world_size) if sharding_type == "column_wise" else 1
        # a data-parallel table updates the rows of its own batch on each rank
        is_own = sharding_type == "data_parallel"
        whole_rows = work.unique if is_own else work.unique_anywhere / world_size
        rows = whole_rows * copies
        is_row_wise = sharding_type == "row_wise"
        is_summed, elements = is_row_wise and not load.is_sequence, load.vectors * load.dim
        return StockTotals(
            features=load.num_features,
            lookups=load.lookups * copies,
            lookup_elements=load.lookups * load.dim,
            weights=load.weights * copies,
            lengths=load.bags * (world_size if is_row_wise else copies),
            vector_elements=0.0 if is_summed else elements,
            summed_elements=elements if is_summed else 0.0,
            rows=rows,
            row_elements=whole_rows * load.dim,
            hashed=float(hashed_work(rows, rows if is_row_wise else work.unique_anywhere))
            if load.is_sequence
            else 0.0,
            table_elements=load.num_embeddings * load.dim,
        )


def hashed_work(rows: _Number, rows_of_table: _Number) -> _Number:
    """Returns the work of finding equal rows of sequences. FBGEMM's CPU kernel of sequences fills
    hash maps: a row takes 0.4 to 0.8 us longer than one of bags in small tables, 0.9 in one of
    16,000 rows, 1.9 of 64,000 and 3 to 4 of 256,000, about like the root of their number
    (docs/dev/log.md, 2026-11-27 and 28).

    Source: FBGEMM, ``split_embedding_nobag_backward_exact_cpu_kernel``.

    Args:
        rows: Distinct rows of a table that a rank updates, mean over ranks.
        rows_of_table: Distinct rows on a rank that has some.
    """
    return rows * np.maximum(rows_of_table, _SMALL_MAP) ** 0.5


def stock_cost(
    sharding_type: str,
    works: Sequence[TableWork],
    curves: CommCurves,
    world_size: int,
) -> StockCost:
    """Predicts the cost of one step of tables of one stock sharding type, without overlap; TorchRec
    exchanges the tables of each module by themselves."""
    modules = {work.load.module for work in works}
    bag_modules = {work.load.module for work in works if not work.load.is_sequence}
    uneven = max_over_mean(sharding_type, [work.load for work in works], world_size)
    totals = StockTotals.sum(StockTotals.from_table(sharding_type, work) for work in works)
    return cost_of_totals(
        sharding_type,
        totals,
        uneven,
        curves,
        world_size,
        len(modules),
        num_bag_modules=len(bag_modules),
    )


def cost_of_totals(
    sharding_type: str,
    totals: StockTotals,
    uneven: float,
    curves: CommCurves,
    world_size: int,
    num_modules: int = 1,
    busiest_bytes: Mapping[str, float] | None = None,
    num_bag_modules: int = 0,
) -> StockCost:
    """Predicts the cost of some work, 0 without tables. ``uneven`` is the load of the busiest rank
    divided by the mean, ``busiest_bytes`` are its bytes of ids, rows and gradients where they were
    counted, mean of sent and received ones, of tables whose outputs travel alike.
    ``num_bag_modules`` counts where they do not."""
    if not totals.features:
        return StockCost()
    to_others = (world_size - 1) / world_size
    # gloo's all-to-all carries one direction at a time, and the busiest rank sends more than the
    # mean in forward and receives more in backward, never both
    both_ways = (1 + uneven) / 2
    vector_bytes = totals.vector_elements * _WIRE_BYTES * to_others
    summed_bytes = totals.summed_elements * _WIRE_BYTES * (world_size - 1)

    def exchange_ms(collective: str, num_bytes: float, num_modules: int = num_modules) -> float:
        one_by_one = num_modules * curves.ms(collective, num_bytes / num_modules, world_size)
        # a link's burst carries the first bytes of all modules, not those of each; that those of
        # several sharding types share it, too, has no price
        return max(one_by_one, curves.ms(collective, num_bytes, world_size))

    def outputs_ms(purpose: str, collective_of_sums: str) -> float:
        sent = {"all_to_all": vector_bytes * both_ways, collective_of_sums: summed_bytes}
        found = {name: num_bytes for name, num_bytes in sent.items() if num_bytes}
        if busiest_bytes is not None:
            found = dict.fromkeys(found, busiest_bytes[purpose])
        counts = dict.fromkeys(found, num_modules)
        if len(found) == 2:  # a module has one of them
            sequences = num_modules - num_bag_modules
            counts = {"all_to_all": max(1, sequences), collective_of_sums: max(1, num_bag_modules)}
        return sum(exchange_ms(name, sent, counts[name]) for name, sent in found.items())

    works = local_works(totals, uneven, world_size, num_modules)
    if sharding_type == "data_parallel":
        return _data_parallel(totals, replace(works[0], updated=0.0), curves, world_size)
    ids = totals.lookups * _ID_BYTES + totals.weights * _WIRE_BYTES + totals.lengths * _LENGTH_BYTES
    ids *= to_others
    busiest_ids = ids * both_ways if busiest_bytes is None else busiest_bytes["ids"]
    # an all-to-all of splits, then one of lengths and one of values
    ids_wire_ms = exchange_ms("all_to_all", 0) + 2 * exchange_ms("all_to_all", busiest_ids / 2)
    rows = vector_bytes + summed_bytes
    costs = curves.local.stock
    ids_ms, forward_ms, backward_ms = (
        getattr(costs, phase).ms(work) for phase, work in zip(PHASES, works)
    )
    return StockCost(
        ids_ms=ids_ms,
        ids_wire_ms=ids_wire_ms,
        forward_ms=forward_ms,
        forward_wire_ms=outputs_ms("rows", "reduce_scatter"),
        backward_ms=backward_ms,
        backward_wire_ms=outputs_ms("gradients", "all_gather"),
        exchanges=num_modules if world_size > 1 else 0,
        sent_bytes={"ids": ids, "rows": rows, "gradients": rows},
    )


def local_works(
    totals: StockTotals, uneven: float, world_size: int, num_modules: int = 1
) -> list[LocalWork]:
    """Returns the work of the busiest rank in each of ``PHASES``: costs are fitted to it, and price
    it."""
    # a partial sum of every bag of all ranks is written, with rows of it here or not
    output = totals.vector_elements * uneven + totals.summed_elements * world_size
    work = LocalWork(
        calls=num_modules,
        features=totals.features,
        lookups=totals.lookups * uneven,
        rows=totals.rows * uneven,
        lookup_elements=totals.lookup_elements * uneven,
        bag_elements=output,
        row_elements=totals.row_elements * uneven,
        buffer_elements=2 * output,
        updated=totals.rows * uneven,
    )
    return [work, work, replace(work, hashed=totals.hashed * uneven)]


def marginal_stock_costs(
    works: Sequence[TableWork], curves: CommCurves, world_size: int
) -> tuple[dict[str, StockCost], ...]:
    """Predicts what each table adds to a step in which all tables have one of ``STOCK_TYPES``, by
    that type: the cost of all tables minus the cost without the table.

    All lookups count as equally many distinct rows. TorchRec's partitioner deals tables out by
    these costs, and ranks wait for each other in each exchange: a rank with more tables and fewer
    rows in each makes the others wait in one, and waits in the other.
    """
    added: tuple[dict[str, StockCost], ...] = tuple({} for _ in works)
    for kind in STOCK_TYPES:
        uneven = max_over_mean(kind, [work.load for work in works], world_size)
        each = [StockTotals.from_table(kind, work) for work in works]
        totals = StockTotals.sum(each)
        rows, row_elements = (
            mine / lookups if lookups else 0.0
            for mine, lookups in (
                (totals.rows, totals.lookups),
                (totals.row_elements, totals.lookup_elements),
            )
        )
        all_tables = cost_of_totals(kind, totals, uneven, curves, world_size)
        in_sequences = sum(own.lookups for own in each if own.hashed)
        for costs, own in zip(added, each):
            own = replace(
                own,
                rows=rows * own.lookups,
                row_elements=row_elements * own.lookup_elements,
                hashed=totals.hashed * own.lookups / in_sequences
                if own.hashed and in_sequences
                else 0.0,
            )
            others = cost_of_totals(kind, totals.plus(own, -1.0), uneven, curves, world_size)
            saved = all_tables.plus(others, -1.0)
            numbers = {name: number for name, number in vars(saved).items() if name != "sent_bytes"}
            costs[kind] = replace(saved, **{name: max(0.0, each) for name, each in numbers.items()})
    return added


def _data_parallel(
    totals: StockTotals, work: LocalWork, curves: CommCurves, world_size: int
) -> StockCost:
    # the dense update writes every element of the tables, whether looked up or not
    dense_update = LocalWork(
        calls=0.0,
        bag_elements=totals.table_elements * _DENSE_UPDATE_PASSES,
        buffer_elements=totals.table_elements,
    )
    sent = 2 * (world_size - 1) / world_size * totals.table_elements * _WIRE_BYTES
    costs = curves.local.stock
    return StockCost(
        forward_ms=costs.forward.ms(work),
        backward_ms=costs.backward.ms(work) + costs.forward.ms(dense_update),
        backward_wire_ms=curves.ms("all_reduce", sent, world_size),
        sent_bytes={"gradients": sent},
    )


def max_over_mean(sharding_type: str, loads: Sequence[TableLoad], world_size: int) -> float:
    """Computes the load of the busiest rank divided by the mean: of lookups in equal blocks of
    rows; or of outputs, if the largest whole tables or columns are placed first."""
    if sharding_type == "row_wise":
        return over_mean(
            sum(lookups * load.dim for lookups, load in zip(lookups_T, loads))
            for lookups_T in zip(*_row_wise(loads, world_size))
        )
    load_W = [0.0] * world_size
    if sharding_type in ("table_wise", "column_wise"):
        for load, ranks in zip(loads, deal_out(sharding_type, loads, world_size)):
            for rank in ranks:
                load_W[rank] += load.vectors * load.dim / len(ranks)
    return over_mean(load_W)


def rank_loads(
    sharding_type: str, loads: Sequence[TableLoad], world_size: int
) -> list[dict[str, float]]:
    """Predicts what each rank serves, sends and holds in one step, if all tables were
    ``row_wise``, ``table_wise`` or ``column_wise``.

    ``served_lookups`` are those of all ranks' batches in its rows, tables or columns,
    ``sent_bytes`` ids, rows and gradients, which have the means of :func:`stock_cost`,
    ``home_bytes`` rows with their optimizer state, and ``memory_bytes`` these and what is held
    beside them at the step's peak (``benchmarks.sequence_memory``, docs/dev/log.md).
    """
    is_row_wise, others = sharding_type == "row_wise", world_size - 1
    names = ("served_lookups", "sent_bytes", "home_bytes", "memory_bytes")
    found = [dict.fromkeys(names, 0.0) for _ in range(world_size)]
    at_exchange_W, in_backward = [0.0] * world_size, 0.0
    for load, parts_W in zip(loads, _parts(sharding_type, loads, world_size)):
        num_parts = sum(parts_W)
        own = load.vectors * load.dim * _WIRE_BYTES
        in_backward += 2 * own  # the output and its gradient
        for w, (rank, parts) in enumerate(zip(found, parts_W)):
            elsewhere = num_parts - parts  # parts that other ranks have
            lengths = load.bags * (others if is_row_wise else elsewhere)
            # rows for other ranks, and gradients of rows from other ranks; or partial sums
            is_summed = is_row_wise and not load.is_sequence
            vectors = 2 * others if is_summed else (parts * others + elsewhere) / num_parts
            ids = elsewhere * (load.lookups * _ID_BYTES + load.weights * _WIRE_BYTES)
            ids += lengths * _LENGTH_BYTES
            share = 1 / world_size if is_row_wise else parts / num_parts
            rank["served_lookups"] += world_size * parts * load.lookups
            rank["sent_bytes"] += ids + vectors * load.vectors * load.dim * _WIRE_BYTES
            rank["home_bytes"] += share * load.num_embeddings * load.row_bytes
            # what it looked up for all ranks, and the output; of one of them also a copy, of what
            # was looked up by receiver
            looked_up = world_size * own * (1 if is_summed else parts / num_parts)
            is_sent_as_it_is = not (is_row_wise or load.is_sequence)
            at_exchange_W[w] += looked_up + own + (own if is_sent_as_it_is else looked_up)
            lookups = load.lookups * (2 if is_row_wise else 1) + world_size * parts * load.lookups
            rank["memory_bytes"] += lookups * _HELD_BYTES
    for rank, at_exchange in zip(found, at_exchange_W):
        rank["memory_bytes"] += rank["home_bytes"] + max(at_exchange, in_backward)
    return found


def data_parallel_bytes(load: TableLoad) -> float:
    """Predicts what a rank holds for a table that each rank has: rows with their optimizer state
    and dense gradient, the output and its gradient."""
    gradient = load.dim * _WIRE_BYTES
    return load.num_embeddings * (load.row_bytes + gradient) + 2 * load.vectors * gradient


def _parts(
    sharding_type: str, loads: Sequence[TableLoad], world_size: int
) -> list[Sequence[float]]:
    """Returns the parts of each table on each rank: whole tables or columns, or the share of the
    lookups in its equal block of rows."""
    if sharding_type == "row_wise":
        even = [1 / world_size] * world_size
        return [
            [lookups / total for lookups in lookups_W] if (total := sum(lookups_W)) else even
            for lookups_W in _row_wise(loads, world_size)
        ]
    dealt = map(Counter, deal_out(sharding_type, loads, world_size))
    return [[ranks[rank] for rank in range(world_size)] for ranks in dealt]


def _row_wise(loads: Sequence[TableLoad], world_size: int) -> list[Sequence[float]]:
    """Returns a rank's lookups of each table by the rank of their row, in equal blocks."""
    return [load.row_wise_W or [load.lookups / world_size] * world_size for load in loads]


def deal_out(sharding_type: str, loads: Sequence[TableLoad], world_size: int) -> list[list[int]]:
    """Returns the rank of each shard of each table, whole tables or columns: the largest one first,
    each on the rank with the smallest load."""
    parts = [
        _column_shards(load, world_size) if sharding_type == "column_wise" else 1 for load in loads
    ]
    shards = [(load.vectors * load.dim / num, t) for t, (load, num) in enumerate(zip(loads, parts))]
    filled = [(0.0, rank) for rank in range(world_size)]  # a heap: the smallest load is the first
    ranks: list[list[int]] = [[] for _ in loads]
    for weight, t in sorted(shards, reverse=True):
        for _ in range(parts[t]):
            load, rank = filled[0]
            heapq.heapreplace(filled, (load + weight, rank))
            ranks[t].append(rank)
    return ranks


def over_mean(load_W: Iterable[float]) -> float:
    """Divides the load of the busiest rank by the mean; 1 if no rank has any."""
    loads = list(load_W)
    return max(loads) * len(loads) / total if (total := sum(loads)) else 1.0


def _column_shards(load: TableLoad, world_size: int) -> int:
    """Returns the number of column shards: one per rank, or a few more of an allowed width, or the
    whole table where that does not divide its columns."""
    width = load.dim // world_size // _MIN_COLUMNS * _MIN_COLUMNS
    return load.dim // width if width and load.dim % width == 0 else 1
