"""Chooses hot/cold tables, their exchange, and their number of hot rows, by predicted step time.

Four plans are priced as whole steps under the schedule that runs them: all tables stock, all
row-exchanged, all owner-pooled, and each table with the exchange that sends fewer bytes. Plans with
row-exchanged tables are priced with several budgets of hot rows. The plan with the shortest
predicted step is chosen; if predictions differ by less than their error, the simpler plan.

Equal inputs give equal choices, in every process.

Shape letters: G groups of rows with equal lookup counts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from torchrec_picasso.cost.hot_cold import HotColdTotals, exchange_bytes
from torchrec_picasso.cost.step_price import StepPricer
from torchrec_picasso.cost.stock import marginal_stock_costs
from torchrec_picasso.cost.table_work import TableLoad, TableWork
from torchrec_picasso.placement import Form
from torchrec_picasso.planner.priced_plan import Forms, PricedPlan, price_plan

__all__ = ["Choice", "TableInfo", "choose", "given_choice"]

_STOCK_MARGIN = 0.02
"""A hot/cold plan is chosen only if its predicted step is shorter than stock by this share."""
_FORMS_MARGIN = 0.18
"""A mixed plan is chosen only if its predicted step is shorter than the best other plan by this
share. The combined work of both exchanges is not priced in full: mixed plans of 40 and 130 tables
at 1 Gbit/s were predicted to take 0.87 and 0.86 of the owner-pooled plan, and took 1.07 and 1.11.
"""
_ROWS_MARGIN = 0.08
"""In the mixed plan a table is row-exchanged only if that sends fewer bytes than owner-pooling by
this share. Bags are even over micro-batches; rows are not, and need a mask of dirty rows."""
_HOT_MARGIN = 0.005
"""A larger hot set is chosen only if the predicted step is shorter by this share."""
_HOT_CHANCES = (0.999, 0.97, 0.9, 0.6, 0.3, 0.1)
"""Budgets of hot rows: all rows that one rank's batch uses with at least this probability. The
savings of a hot row grow with this probability, its cost with the probability that any rank uses
it."""


@dataclass(frozen=True, kw_only=True)
class TableInfo:
    """One table of the model and its allowed placements.

    Args:
        load: Rows, columns and lookups per step.
        not_hot_cold: Reason why the table cannot be hot/cold; ``None`` = it can.
        no_hot_rows: Reason why it cannot have hot rows; ``None`` = it can.
        no_bags: Reason why it cannot be owner-pooled; ``None`` = it can.
        required_form: Exchange that the user requires if the table is hot/cold; ``None`` = any.
        stock_types: Allowed stock sharding types.
        module: Path of the table's module; its tables share an exchange.
    """

    load: TableLoad
    not_hot_cold: str | None = None
    no_hot_rows: str | None = None
    no_bags: str | None = "owner-pooling was not considered"
    required_form: Form | None = None
    stock_types: tuple[str, ...] = ("table_wise", "row_wise")
    module: str = ""

    @property
    def may_be_hot_cold(self) -> bool:
        """Whether the table can be hot/cold."""
        return self.not_hot_cold is None

    @property
    def forms(self) -> tuple[Form, ...]:
        """Allowed exchanges, if the table is hot/cold."""
        if self.required_form is not None:
            return (self.required_form,)
        return ("rows", "bags") if self.no_bags is None else ("rows",)


@dataclass(frozen=True, kw_only=True)
class Choice(PricedPlan):
    """The chosen plan.

    Args:
        works: Expected rows of each table.
        stock: The plan with all tables stock, under TorchRec's pipeline; ``None`` if a table has no
            stock type.
        priced_ms: Predicted step of each priced plan with its best hot rows, in milliseconds.
    """

    works: tuple[TableWork, ...]
    stock: PricedPlan | None
    priced_ms: Mapping[str, float]


def choose(
    tables: Sequence[TableInfo],
    pricer: StepPricer,
    replica_budget_bytes: float = float("inf"),
) -> Choice:
    """Chooses the plan with the shortest predicted step."""
    works = _works(tables, pricer)
    all_stock_types = _best_stock_types(tables, works, pricer)

    def best(forms: Forms) -> PricedPlan:
        """Prices a plan with each budget of hot rows, and returns the best."""
        stock_types = _stock_types_beside(forms, tables, works, all_stock_types, pricer)
        found = price_plan(works, forms, {}, stock_types, pricer)
        may_be_hot = [
            i for i, form in forms.items() if form == "rows" and tables[i].no_hot_rows is None
        ]
        for chance in _HOT_CHANCES if pricer.world_size > 1 and may_be_hot else ():
            num_hot = _frequent_rows(works, may_be_hot, chance, replica_budget_bytes)
            plan = price_plan(works, forms, num_hot, stock_types, pricer)
            # budgets ascend: a larger one must be clearly better
            if plan.step.step_ms < found.step.step_ms * (1 - _HOT_MARGIN):
                found = plan
        return found

    plans = {name: best(forms) for name, forms in _plans(tables, works, all_stock_types).items()}
    # from the simplest plan to the mixed one, each with its margin
    chosen = plans["stock"]
    uniform = min((plans["rows"], plans["bags"]), key=_step_ms)
    if _step_ms(uniform) <= _step_ms(chosen) * (1 - _STOCK_MARGIN):
        chosen = uniform
    if _step_ms(plans["mixed"]) <= _step_ms(chosen) * (1 - _FORMS_MARGIN):
        chosen = plans["mixed"]
    priced_ms = {name: _step_ms(plan) for name, plan in plans.items()}
    return _answer(works, chosen, all_stock_types, pricer, priced_ms)


def given_choice(
    tables: Sequence[TableInfo], num_hot: Mapping[int, int], pricer: StepPricer
) -> Choice:
    """Prices a choice of the caller.

    Args:
        tables: All tables of the model.
        num_hot: Number of hot rows by position, for the hot/cold tables; other tables are stock.
        pricer: Predicts a step.
    """
    works = _works(tables, pricer)
    all_stock_types = _best_stock_types(tables, works, pricer)
    forms: Forms = {position: tables[position].forms[0] for position in num_hot}
    stock_types = _stock_types_beside(forms, tables, works, all_stock_types, pricer)
    plan = price_plan(works, forms, num_hot, stock_types, pricer)
    return _answer(works, plan, all_stock_types, pricer, {})


def _works(tables: Sequence[TableInfo], pricer: StepPricer) -> tuple[TableWork, ...]:
    return tuple(TableWork(table.load, pricer.world_size) for table in tables)


def _plans(
    tables: Sequence[TableInfo], works: Sequence[TableWork], stock_types: Sequence[str | None]
) -> dict[str, Forms]:
    """Lists the plans to price; some may be equal."""
    able = {i: table.forms for i, table in enumerate(tables) if table.may_be_hot_cold}

    def fewer_bytes(work: TableWork, forms: Sequence[Form]) -> Form:
        first, last = (_sent_bytes(work, forms[end]) for end in (0, -1))
        return forms[0 if first <= last * (1 - _ROWS_MARGIN) else -1]

    return {
        # a table without a stock type is hot/cold in all plans
        "stock": {i: forms[0] for i, forms in able.items() if stock_types[i] is None},
        "rows": {i: forms[0] for i, forms in able.items()},
        "bags": {i: forms[-1] for i, forms in able.items()},
        "mixed": {i: fewer_bytes(works[i], forms) for i, forms in able.items()},
    }


def _sent_bytes(work: TableWork, form: Form) -> float:
    totals = HotColdTotals.from_table(work, 0, form)
    return sum(exchange_bytes(totals, work.world_size, num_packs=1).values())


def _step_ms(plan: PricedPlan) -> float:
    return plan.step.step_ms


def _answer(
    works: tuple[TableWork, ...],
    plan: PricedPlan,
    all_stock_types: Sequence[str | None],
    pricer: StepPricer,
    priced_ms: Mapping[str, float],
) -> Choice:
    stock = None
    if None not in all_stock_types:
        stock = price_plan(works, {}, {}, all_stock_types, pricer)
    return Choice(**vars(plan), works=works, stock=stock, priced_ms=priced_ms)


def _frequent_rows(
    works: Sequence[TableWork], tables: Sequence[int], least_chance: float, budget_bytes: float
) -> dict[int, int]:
    """Counts the rows of each table that one rank's batch uses with a minimum probability.

    Args:
        works: All tables.
        tables: Positions of the tables that may have hot rows.
        least_chance: Minimum probability that one rank's batch uses a row.
        budget_bytes: Maximum memory of these rows; the most frequent rows come first.
    """
    chance_G = np.concatenate([works[i].used_K for i in tables])
    rows_G = np.concatenate([works[i].rows_K for i in tables])
    table_G = np.concatenate([np.full(works[i].used_K.size, i) for i in tables])
    # most frequent rows of all tables first; a stable sort keeps the order inside a table
    order_G = np.argsort(-chance_G, kind="stable")
    order_G = order_G[chance_G[order_G] >= least_chance]
    rows_G, table_G = rows_G[order_G], table_G[order_G]
    row_bytes_G = np.array([work.load.row_bytes for work in works])[table_G]
    # bytes that are left before each group; a group that does not fit is taken in part
    left_bytes_G = budget_bytes - np.cumsum(rows_G * row_bytes_G) + rows_G * row_bytes_G
    taken_G = np.floor(np.clip(left_bytes_G / row_bytes_G, 0.0, rows_G))
    counts = np.bincount(table_G, taken_G, minlength=len(works))
    return {i: int(counts[i]) for i in tables}


def _stock_types_beside(
    forms: Forms,
    tables: Sequence[TableInfo],
    works: Sequence[TableWork],
    all_stock_types: Sequence[str | None],
    pricer: StepPricer,
) -> list[str | None]:
    """Returns the best stock types of the tables that are not hot/cold.

    They may differ from those in an all-stock plan: fewer whole tables may be less even over ranks.
    """
    stock_types = list(all_stock_types)
    stock = [i for i in range(len(tables)) if i not in forms]
    found = _best_stock_types([tables[i] for i in stock], [works[i] for i in stock], pricer)
    for i, kind in zip(stock, found):
        stock_types[i] = kind
    return stock_types


def _best_stock_types(
    tables: Sequence[TableInfo], works: Sequence[TableWork], pricer: StepPricer
) -> list[str | None]:
    """Returns the stock type with the smallest cost of each table.

    The cost is what the table adds to a step in which all tables have this type.
    """
    added_ms: list[dict[str, float]] = [{} for _ in tables]
    for kind in sorted({kind for table in tables for kind in table.stock_types}):
        able = [i for i, table in enumerate(tables) if kind in table.stock_types]
        able_works = [works[i] for i in able]
        costs = marginal_stock_costs(kind, able_works, pricer.curves, pricer.world_size)
        for i, cost in zip(able, costs):
            added_ms[i][kind] = cost.exposed_ms
    return [min(ms, key=lambda kind: (ms[kind], kind)) if ms else None for ms in added_ms]
