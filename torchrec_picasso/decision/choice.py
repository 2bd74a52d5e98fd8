"""Which tables are hot/cold, and how many of their rows are hot: the least predicted step.

Three facts make the search small. A row's gain from being hot does not depend on other rows, but
for the latencies that all share, so hot sets are thresholds on the gain. One exchange serves all
hot/cold tables, so what counts for a table is what it adds. And the answer need only beat stock
TorchRec: where the prediction is closer than its error, the simpler plan is taken.

Everything here is arithmetic on one host: same input, same answer, on every run and rank.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from torchrec_picasso.cost.curves import CommCurves
from torchrec_picasso.cost.hot_cold import (
    HotColdTotals,
    hot_cold_cost,
    hot_cold_totals,
    sum_hot_cold,
)
from torchrec_picasso.cost.marginal import marginal_hot_cold_costs, marginal_stock_costs, num_packs
from torchrec_picasso.cost.step_cost import StepCost
from torchrec_picasso.cost.stock import StockTotals, max_over_mean, stock_cost, sum_stock
from torchrec_picasso.cost.table_work import TableWork

__all__ = ["Choice", "TableQuestion", "best_hot_counts", "choose", "given_choice"]

_STOCK_MARGIN = 0.02
"""Hot/cold must be predicted to take this share less than stock, or stock stays."""
_MIXED_MARGIN = 1 / 6
"""Likewise where some tables of a plan stay stock. Each kind of placement then pays for operators
and collectives of its own, which are not priced in full: 40 and 130 mixed tables were predicted to
take 0.81 of stock at 1 Gbit/s, 40 to take 0.85 on loopback; they took 0.96, 0.92 and 1.16."""
_HOT_MARGIN = 0.005
"""A larger hot set must be predicted to take this share less than a smaller one."""
_MOST_PLANS = 64
"""Numbers of hot/cold tables that are tried."""
_SIZES = (0.0, 1 / 16, 1 / 4, 1 / 2, 3 / 4, 1.0)
"""Parts of the rows with a gain that are tried as hot set."""


@dataclass(frozen=True, kw_only=True)
class TableQuestion:
    """One table and what may be done with it.

    Args:
        work: Its expected rows.
        may_be_hot_cold: Whether a hot/cold option exists and is allowed.
        stock_types: Stock sharding types that exist and are allowed.
        may_have_hot_rows: Whether, if hot/cold, some of its rows may be hot.
    """

    work: TableWork
    may_be_hot_cold: bool
    stock_types: tuple[str, ...]
    may_have_hot_rows: bool = True


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The answer, one entry per question, in their order.

    Args:
        hot_cold: Which tables take the packed unique exchange.
        num_hot: Hot rows of each; 0 for stock tables.
        stock_types: Best stock sharding type of each; ``None`` where none is allowed.
        cost: Predicted step of the answer.
        stock_cost: Predicted step with every table stock; ``None`` where one cannot be.
    """

    hot_cold: tuple[bool, ...]
    num_hot: tuple[int, ...]
    stock_types: tuple[str | None, ...]
    cost: StepCost
    stock_cost: StepCost | None


def choose(
    questions: Sequence[TableQuestion],
    curves: CommCurves,
    world_size: int,
    replica_budget_bytes: float = float("inf"),
) -> Choice:
    """Finds the placement with the least predicted step.

    Args:
        questions: All tables of the model.
        curves: Measured communication and local work.
        world_size: Ranks.
        replica_budget_bytes: Memory per rank that replicas may take.

    Returns:
        The choice.
    """
    stock_types = _best_stock_types(questions, curves, world_size)
    able = [i for i, question in enumerate(questions) if question.may_be_hot_cold]
    works = [question.work for question in questions]

    def best_counts(positions: Sequence[int]) -> dict[int, int]:
        counts = best_hot_counts(
            [works[i] for i in positions],
            curves,
            world_size,
            replica_budget_bytes,
            [questions[i].may_have_hot_rows for i in positions],
        )
        return dict(zip(positions, counts))

    num_hot = best_counts(able)
    gains = _gains_over_stock(able, num_hot, works, stock_types, curves, world_size)
    # tables that gain most from the exchange join it first; those without a stock option must
    order = sorted(able, key=lambda i: (stock_types[i] is not None, -gains[i], i))
    must = sum(stock_types[i] is None for i in able)
    parts = _Parts(works, num_hot, stock_types, curves, world_size)
    plans = {size: parts.cost(set(order[:size])) for size in _sizes_to_try(must, len(order))}
    best = _best_size({size: plan.total_ms for size, plan in plans.items()})
    chosen = sorted(order[:best])
    if len(chosen) < len(able):  # fewer tables share the latencies: choose their rows again
        num_hot = best_counts(chosen)
        parts = _Parts(works, num_hot, stock_types, curves, world_size)
    in_exchange = set(chosen)
    return Choice(
        hot_cold=tuple(i in in_exchange for i in range(len(questions))),
        num_hot=tuple(num_hot[i] if i in in_exchange else 0 for i in range(len(questions))),
        stock_types=tuple(stock_types),
        cost=parts.cost(in_exchange),
        stock_cost=plans[0] if must == 0 else None,
    )


def given_choice(
    questions: Sequence[TableQuestion],
    num_hot: Mapping[int, int],
    curves: CommCurves,
    world_size: int,
) -> Choice:
    """Prices a choice that somebody else made.

    Args:
        questions: All tables of the model.
        num_hot: Hot rows by position, of the tables that are hot/cold; the others are stock.
        curves: Measured communication and local work.
        world_size: Ranks.
    """
    stock_types = _best_stock_types(questions, curves, world_size)
    works = [question.work for question in questions]
    no_stock = any(kind is None for kind in stock_types)
    parts = _Parts(works, num_hot, stock_types, curves, world_size)
    return Choice(
        hot_cold=tuple(i in num_hot for i in range(len(questions))),
        num_hot=tuple(num_hot.get(i, 0) for i in range(len(questions))),
        stock_types=tuple(stock_types),
        cost=parts.cost(set(num_hot)),
        stock_cost=None if no_stock else parts.cost(set()),
    )


def _best_size(plans_ms: Mapping[int, float]) -> int:
    """The number of hot/cold tables to take: the fewest, all, or a mixture that wins clearly.

    Args:
        plans_ms: Predicted steps by number of hot/cold tables.
    """
    fewest, most = min(plans_ms), max(plans_ms)
    best = min(plans_ms, key=lambda size: (plans_ms[size], size))
    margins = {best: _MIXED_MARGIN, most: _STOCK_MARGIN}
    wins = [size for size in margins if plans_ms[size] <= plans_ms[fewest] * (1 - margins[size])]
    return wins[0] if wins else fewest


def _sizes_to_try(least: int, most: int) -> list[int]:
    """All numbers of tables, or evenly spread ones where there are many."""
    if most - least <= _MOST_PLANS:
        return list(range(least, most + 1))
    return sorted({round(x) for x in np.linspace(least, most, _MOST_PLANS + 1)})


def best_hot_counts(
    works: Sequence[TableWork],
    curves: CommCurves,
    world_size: int,
    replica_budget_bytes: float = float("inf"),
    may_have_hot_rows: Sequence[bool] | None = None,
) -> list[int]:
    """How many rows of each table of one exchange should be hot.

    Args:
        works: The tables.
        curves: Measured communication and local work.
        world_size: Ranks.
        replica_budget_bytes: Memory per rank that replicas may take.
        may_have_hot_rows: Which tables may have any; ``None`` = all.

    Returns:
        Hot rows of each table, its most frequent ones; possibly all 0.
    """
    none_hot = [0] * len(works)
    allowed = may_have_hot_rows or [True] * len(works)
    if not any(allowed) or world_size == 1:
        return none_hot
    packs = num_packs(works)

    def cost_ms(num_hot: Sequence[float]) -> float:
        totals = hot_cold_totals(works, num_hot)
        return hot_cold_cost(totals, curves, world_size, num_packs=packs).total_ms

    best, best_ms = none_hot, cost_ms(none_hot)
    totals = hot_cold_totals(works, none_hot)
    rows_with_gain = _rows_by_gain(works, allowed, totals, curves, world_size)
    for size in _SIZES[1:]:
        tried = _prefix(rows_with_gain, works, size, replica_budget_bytes)
        ms = cost_ms(tried)
        if ms < best_ms * (1 - _HOT_MARGIN):
            best, best_ms = tried, ms
    return best


@dataclass(frozen=True)
class _RowGroups:
    """Rows of one table with the same count, by what each gains from being hot; G groups.

    Args:
        tables_G: Which table.
        rows_G: How many rows.
    """

    tables_G: np.ndarray
    rows_G: np.ndarray


def _rows_by_gain(
    works: Sequence[TableWork],
    allowed: Sequence[bool],
    totals: HotColdTotals,
    curves: CommCurves,
    world_size: int,
) -> _RowGroups:
    """Groups of rows with a gain, largest first, of the tables that may have hot rows.

    A cold row costs by how often one rank uses it, a hot row by how often any rank does; both
    prices are slopes of the cost at the totals of a step without hot rows.
    """
    packs = num_packs(works)
    base_ms = hot_cold_cost(totals, curves, world_size, num_packs=packs).total_ms
    mean_dim = totals.unique_elements / max(totals.unique, 1e-9)

    def price(sign: float, **fields: float) -> float:
        """Milliseconds per row of a step with some thousand rows more (or fewer)."""
        rows = max(1.0, 0.1 * totals.unique)
        step = HotColdTotals(**{name: rows * x for name, x in fields.items()})
        moved_ms = hot_cold_cost(
            totals.plus(step, sign), curves, world_size, num_packs=packs
        ).total_ms
        return (moved_ms - base_ms) * sign / rows

    cold_row_ms = price(-1, cold=1.0, cold_elements=0.0)
    cold_element_ms = price(-1, cold_elements=mean_dim) / mean_dim
    # with a reduction already running, so that its latency is not charged to each row
    latency_ms = curves.ms("all_reduce", 0, world_size)
    rows = max(1.0, 0.1 * totals.unique)
    hot_row_ms = price(1, touched=1.0)
    hot_element_ms = max(0.0, price(1, touched_elements=mean_dim) - latency_ms / rows) / mean_dim
    bit_ms = max(0.0, price(1, hot=1.0))
    tables, rows_of, gains, positions = [], [], [], []
    for table, work in enumerate(works):
        dim = work.load.dim
        cold_ms = cold_row_ms + dim * cold_element_ms
        hot_ms = hot_row_ms + dim * hot_element_ms
        gain_K = work.used_K * cold_ms - work.touched_K * hot_ms - bit_ms
        position_g = np.flatnonzero((gain_K > 0) & allowed[table])
        tables.append(np.full(position_g.size, table))
        positions.append(position_g)
        gains.append(gain_K[position_g])
        rows_of.append(work.rows_K[position_g])
    tables_G, rows_G = np.concatenate(tables), np.concatenate(rows_of)
    order_G = np.lexsort((np.concatenate(positions), tables_G, -np.concatenate(gains)))
    return _RowGroups(tables_G[order_G], rows_G[order_G])


def _prefix(
    groups: _RowGroups, works: Sequence[TableWork], share: float, budget_bytes: float
) -> list[int]:
    """Hot counts when the first ``share`` of the rows with a gain are hot, as memory allows."""
    rows_G, tables_G = groups.rows_G, groups.tables_G
    bytes_G = np.array([work.load.row_bytes for work in works])[tables_G]
    wanted = share * sum(rows_G.tolist())
    left_G1 = np.subtract.accumulate([wanted, *rows_G])
    budget_G1 = np.subtract.accumulate([budget_bytes, *(rows_G * bytes_G)])
    whole_G = (rows_G <= left_G1[:-1]) & (rows_G <= budget_G1[:-1] / bytes_G) & (rows_G >= 1)
    num_whole = len(rows_G) if whole_G.all() else int(whole_G.argmin())
    counts = np.bincount(tables_G[:num_whole], rows_G[:num_whole], minlength=len(works))
    wanted, budget_bytes = float(left_G1[num_whole]), float(budget_G1[num_whole])
    for rows, table, row_bytes in zip(
        rows_G[num_whole:].tolist(), tables_G[num_whole:].tolist(), bytes_G[num_whole:].tolist()
    ):
        taken = min(rows, wanted, budget_bytes / row_bytes)
        if taken < 1:
            break
        counts[table] += taken
        wanted -= taken
        budget_bytes -= taken * row_bytes
    return [int(count) for count in counts]


def _best_stock_types(
    questions: Sequence[TableQuestion], curves: CommCurves, world_size: int
) -> list[str | None]:
    """The stock type that adds least, for each table, when all tables have that type."""
    marginal: list[dict[str, float]] = [{} for _ in questions]
    for sharding_type in sorted({kind for q in questions for kind in q.stock_types}):
        group = [i for i, q in enumerate(questions) if sharding_type in q.stock_types]
        works = [questions[i].work for i in group]
        added = marginal_stock_costs(sharding_type, works, curves, world_size)
        for i, cost in zip(group, added):
            marginal[i][sharding_type] = cost.total_ms
    return [min(of, key=lambda kind: (of[kind], kind)) if of else None for of in marginal]


def _gains_over_stock(
    able: Sequence[int],
    num_hot: dict[int, int],
    works: Sequence[TableWork],
    stock_types: Sequence[str | None],
    curves: CommCurves,
    world_size: int,
) -> dict[int, float]:
    gains = {
        i: -cost.total_ms
        for i, cost in zip(
            able,
            marginal_hot_cold_costs(
                [works[i] for i in able], [num_hot[i] for i in able], curves, world_size
            ),
        )
    }
    for sharding_type in sorted({kind for kind in stock_types if kind is not None}):
        group = [i for i in able if stock_types[i] == sharding_type]
        added = marginal_stock_costs(sharding_type, [works[i] for i in group], curves, world_size)
        for i, cost in zip(group, added):
            gains[i] += cost.total_ms
    return gains


class _Parts:
    """What each table asks for, hot/cold or stock, from which plans are put together.

    Args:
        works: All tables.
        num_hot: Hot rows by position, of the tables that may be hot/cold.
        stock_types: Stock type of each table, if it has one.
        curves: Measured communication and local work.
        world_size: Ranks.
    """

    def __init__(
        self,
        works: Sequence[TableWork],
        num_hot: Mapping[int, int],
        stock_types: Sequence[str | None],
        curves: CommCurves,
        world_size: int,
    ) -> None:
        self._works, self._curves, self._world_size = works, curves, world_size
        self._packed = {i: HotColdTotals.of(works[i], hot) for i, hot in num_hot.items()}
        self._by_type: dict[str, dict[int, StockTotals]] = {}
        for kind in sorted({kind for kind in stock_types if kind is not None}):
            self._by_type[kind] = {
                i: StockTotals.of(kind, works[i])
                for i, of_table in enumerate(stock_types)
                if of_table == kind
            }

    def cost(self, in_exchange: Collection[int]) -> StepCost:
        """A step with some tables in the exchange and the others stock."""
        curves, world_size = self._curves, self._world_size
        chosen = sorted(in_exchange)
        totals = sum_hot_cold(self._packed[i] for i in chosen)
        packs = max(1, num_packs([self._works[i] for i in chosen]))
        cost = hot_cold_cost(totals, curves, world_size, num_packs=packs)
        for kind, tables in self._by_type.items():
            group = [i for i in tables if i not in in_exchange]
            uneven = max_over_mean(kind, [self._works[i].load for i in group], world_size)
            of_kind = sum_stock(tables[i] for i in group)
            cost = cost.plus(stock_cost(kind, of_kind, curves, world_size, uneven=uneven))
        return cost
