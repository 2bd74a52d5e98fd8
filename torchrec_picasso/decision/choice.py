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
from dataclasses import dataclass, field

import numpy as np

from torchrec_picasso.cost.exchange_totals import HotColdTotals
from torchrec_picasso.cost.hot_cold import exchange_bytes
from torchrec_picasso.cost.step_cost import StepCost
from torchrec_picasso.cost.step_price import StepPrice, StepPricer
from torchrec_picasso.cost.stock import marginal_stock_costs
from torchrec_picasso.cost.table_work import TableWork
from torchrec_picasso.decision.priced_plan import Forms, PricedPlan, price_plan
from torchrec_picasso.placement import Form

__all__ = ["Choice", "TableCandidate", "choose", "given_choice"]

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
class TableCandidate:
    """One table and its allowed placements.

    Args:
        work: Expected rows of the table.
        may_be_hot_cold: Whether a hot/cold option exists and is allowed.
        stock_types: Stock sharding types that exist and are allowed.
        may_have_hot_rows: Whether rows may be hot, if the table is hot/cold.
        forms: Allowed exchanges, if the table is hot/cold; ``"rows"`` comes first.
    """

    work: TableWork
    may_be_hot_cold: bool
    stock_types: tuple[str, ...]
    may_have_hot_rows: bool = True
    forms: tuple[Form, ...] = ("rows",)


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The chosen plan; sequences have one entry per table.

    Args:
        forms: Exchange of each hot/cold table; ``None`` = stock.
        num_hot: Number of hot rows of each table; 0 for stock tables.
        stock_types: Best stock sharding type of each table; ``None`` if none is allowed.
        cost: Predicted embedding part of the plan, without overlap.
        stock_cost: Predicted embedding part with all tables stock; ``None`` if a table has no stock
            type.
        step: Predicted step of the plan under the schedule that runs it.
        stock_step: Predicted step with all tables stock, under TorchRec's pipeline; ``None`` if a
            table has no stock type.
        priced_ms: Predicted step of each priced plan with its best hot rows, in milliseconds.
    """

    forms: tuple[Form | None, ...]
    num_hot: tuple[int, ...]
    stock_types: tuple[str | None, ...]
    cost: StepCost
    stock_cost: StepCost | None
    step: StepPrice = field(default_factory=StepPrice)
    stock_step: StepPrice | None = None
    priced_ms: Mapping[str, float] = field(default_factory=dict)

    @property
    def hot_cold(self) -> tuple[bool, ...]:
        """Whether each table is hot/cold."""
        return tuple(form is not None for form in self.forms)


def choose(
    candidates: Sequence[TableCandidate],
    pricer: StepPricer,
    replica_budget_bytes: float = float("inf"),
) -> Choice:
    """Chooses the plan with the shortest predicted step.

    Args:
        candidates: All tables of the model.
        pricer: Predicts a step from network, local work and dense part.
        replica_budget_bytes: Maximum memory of replicas per rank.
    """
    works = [candidate.work for candidate in candidates]
    all_stock_types = _best_stock_types(candidates, pricer)

    def best(forms: Forms) -> PricedPlan:
        """Prices a plan with each budget of hot rows, and returns the best."""
        stock_types = _stock_types_beside(forms, candidates, all_stock_types, pricer)
        found = price_plan(works, forms, {}, stock_types, pricer)
        may_be_hot = [
            i for i, form in forms.items() if form == "rows" and candidates[i].may_have_hot_rows
        ]
        for chance in _HOT_CHANCES if pricer.world_size > 1 and may_be_hot else ():
            num_hot = _frequent_rows(works, may_be_hot, chance, replica_budget_bytes)
            plan = price_plan(works, forms, num_hot, stock_types, pricer)
            # budgets ascend: a larger one must be clearly better
            if plan.step.step_ms < found.step.step_ms * (1 - _HOT_MARGIN):
                found = plan
        return found

    plans = {name: best(forms) for name, forms in _plans(candidates, all_stock_types).items()}
    # from the simplest plan to the mixed one, each with its margin
    chosen = plans["stock"]
    uniform = min((plans["rows"], plans["bags"]), key=_step_ms)
    if _step_ms(uniform) <= _step_ms(chosen) * (1 - _STOCK_MARGIN):
        chosen = uniform
    if _step_ms(plans["mixed"]) <= _step_ms(chosen) * (1 - _FORMS_MARGIN):
        chosen = plans["mixed"]
    priced_ms = {name: _step_ms(plan) for name, plan in plans.items()}
    return _answer(candidates, chosen, all_stock_types, pricer, priced_ms)


def given_choice(
    candidates: Sequence[TableCandidate], num_hot: Mapping[int, int], pricer: StepPricer
) -> Choice:
    """Prices a choice of the caller.

    Args:
        candidates: All tables of the model.
        num_hot: Number of hot rows by position, for the hot/cold tables; other tables are stock.
        pricer: Predicts a step.
    """
    works = [candidate.work for candidate in candidates]
    all_stock_types = _best_stock_types(candidates, pricer)
    forms: Forms = {position: candidates[position].forms[0] for position in num_hot}
    stock_types = _stock_types_beside(forms, candidates, all_stock_types, pricer)
    plan = price_plan(works, forms, num_hot, stock_types, pricer)
    return _answer(candidates, plan, all_stock_types, pricer, {})


def _plans(
    candidates: Sequence[TableCandidate], stock_types: Sequence[str | None]
) -> dict[str, Forms]:
    """Lists the plans to price; some may be equal."""
    able = {i: candidate for i, candidate in enumerate(candidates) if candidate.may_be_hot_cold}

    def fewer_bytes(candidate: TableCandidate) -> Form:
        first, last = (_sent_bytes(candidate.work, candidate.forms[end]) for end in (0, -1))
        return candidate.forms[0 if first <= last * (1 - _ROWS_MARGIN) else -1]

    return {
        # a table without a stock type is hot/cold in all plans
        "stock": {i: q.forms[0] for i, q in able.items() if stock_types[i] is None},
        "rows": {i: q.forms[0] for i, q in able.items()},
        "bags": {i: q.forms[-1] for i, q in able.items()},
        "mixed": {i: fewer_bytes(q) for i, q in able.items()},
    }


def _sent_bytes(work: TableWork, form: Form) -> float:
    totals = HotColdTotals.from_table(work, 0, form)
    return sum(exchange_bytes(totals, work.world_size, num_packs=1).values())


def _step_ms(plan: PricedPlan) -> float:
    return plan.step.step_ms


def _answer(
    candidates: Sequence[TableCandidate],
    plan: PricedPlan,
    all_stock_types: Sequence[str | None],
    pricer: StepPricer,
    priced_ms: Mapping[str, float],
) -> Choice:
    works, stock = [candidate.work for candidate in candidates], None
    if None not in all_stock_types:
        stock = price_plan(works, {}, {}, all_stock_types, pricer)
    return Choice(
        forms=tuple(plan.forms.get(i) for i in range(len(works))),
        num_hot=tuple(plan.num_hot.get(i, 0) for i in range(len(works))),
        stock_types=tuple(plan.stock_types),
        cost=plan.cost,
        stock_cost=stock.cost if stock is not None else None,
        step=plan.step,
        stock_step=stock.step if stock is not None else None,
        priced_ms=priced_ms,
    )


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
    candidates: Sequence[TableCandidate],
    all_stock_types: Sequence[str | None],
    pricer: StepPricer,
) -> list[str | None]:
    """Returns the best stock types of the tables that are not hot/cold.

    They may differ from those in an all-stock plan: fewer whole tables may be less even over ranks.
    """
    stock_types = list(all_stock_types)
    stock = [i for i in range(len(candidates)) if i not in forms]
    for i, kind in zip(stock, _best_stock_types([candidates[i] for i in stock], pricer)):
        stock_types[i] = kind
    return stock_types


def _best_stock_types(candidates: Sequence[TableCandidate], pricer: StepPricer) -> list[str | None]:
    """Returns the stock type with the smallest cost of each table.

    The cost is what the table adds to a step in which all tables have this type.
    """
    added_ms: list[dict[str, float]] = [{} for _ in candidates]
    for kind in sorted({kind for candidate in candidates for kind in candidate.stock_types}):
        tables = [i for i, candidate in enumerate(candidates) if kind in candidate.stock_types]
        works = [candidates[i].work for i in tables]
        costs = marginal_stock_costs(kind, works, pricer.curves, pricer.world_size)
        for i, cost in zip(tables, costs):
            added_ms[i][kind] = cost.exposed_ms
    return [min(ms, key=lambda kind: (ms[kind], kind)) if ms else None for ms in added_ms]
