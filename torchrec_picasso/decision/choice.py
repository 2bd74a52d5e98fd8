"""Which tables are hot/cold, in which form, and how many of their rows are hot.

At most four plans are priced as whole steps under the schedule that will run: every table stock,
every table as rows, every table as bags, and each table in the form that sends fewer bytes. The
plans with rows are priced with several budgets of hot rows. The plan with the least predicted step
is taken; where predictions are closer than their error, the simpler plan is taken.

Everything here is arithmetic on one host: same input, same answer, on every run and rank.

Shape letters: G groups of rows that are looked up equally often.
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

__all__ = ["Choice", "TableQuestion", "choose", "given_choice"]

_STOCK_MARGIN = 0.02
"""Hot/cold must be predicted to take this share less than stock, or stock stays."""
_FORMS_MARGIN = 0.18
"""The same for rows beside bags, against the better of rows alone and bags alone. The work that
both forms together ask for is not priced in full: such plans of 40 and 130 mixed tables at 1 Gbit/s
were predicted to take 0.87 and 0.86 of what all bags take, and took 1.07 and 1.11."""
_ROWS_MARGIN = 0.08
"""A table's rows must send this share of bytes less than its bags. Bags are spread evenly over the
micro-batches; rows are not, and a mask of dirty rows travels with them."""
_HOT_MARGIN = 0.005
"""A larger hot set must be predicted to take this share less than a smaller one."""
_HOT_CHANCES = (0.999, 0.97, 0.9, 0.6, 0.3, 0.1)
"""Budgets of hot rows: the rows that one rank's batch uses with at least this chance. What a hot
row saves grows with that chance, and what it costs with the chance that any rank uses it."""


@dataclass(frozen=True, kw_only=True)
class TableQuestion:
    """One table and what may be done with it.

    Args:
        work: Its expected rows.
        may_be_hot_cold: Whether a hot/cold option exists and is allowed.
        stock_types: Stock sharding types that exist and are allowed.
        may_have_hot_rows: Whether, if hot/cold, some of its rows may be hot.
        forms: What of it may travel, if hot/cold; rows first where both may.
    """

    work: TableWork
    may_be_hot_cold: bool
    stock_types: tuple[str, ...]
    may_have_hot_rows: bool = True
    forms: tuple[Form, ...] = ("rows",)


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The answer, one entry per question, in their order.

    Args:
        forms: What travels of the tables that take the packed exchange; ``None`` = stock.
        num_hot: Hot rows of each; 0 for stock tables.
        stock_types: Best stock sharding type of each; ``None`` where none is allowed.
        cost: Predicted embedding part of the answer, nothing hidden.
        stock_cost: The same with every table stock; ``None`` where one cannot be.
        step: Predicted step of the answer under the schedule that will run.
        stock_step: Predicted step with every table stock, under TorchRec's pipeline.
        priced_ms: Predicted step of every plan that was weighed, each with its best hot rows.
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
        """Which tables take the packed exchange."""
        return tuple(form is not None for form in self.forms)


def choose(
    questions: Sequence[TableQuestion],
    pricer: StepPricer,
    replica_budget_bytes: float = float("inf"),
) -> Choice:
    """Takes the plan with the least predicted step.

    Args:
        questions: All tables of the model.
        pricer: Prices a step: network, local work, dense part.
        replica_budget_bytes: Memory per rank that replicas may take.

    Returns:
        The choice.
    """
    works = [question.work for question in questions]
    all_stock_types = _best_stock_types(questions, pricer)

    def best(forms: Forms) -> PricedPlan:
        """The plan with its best hot rows."""
        stock_types = _stock_types_beside(forms, questions, all_stock_types, pricer)
        found = price_plan(works, forms, {}, stock_types, pricer)
        may_be_hot = [
            i for i, form in forms.items() if form == "rows" and questions[i].may_have_hot_rows
        ]
        for chance in _HOT_CHANCES if pricer.world_size > 1 and may_be_hot else ():
            num_hot = _frequent_rows(works, may_be_hot, chance, replica_budget_bytes)
            plan = price_plan(works, forms, num_hot, stock_types, pricer)
            if plan.step.step_ms < found.step.step_ms * (1 - _HOT_MARGIN):
                found = plan
        return found

    plans = {name: best(forms) for name, forms in _plans(questions, all_stock_types).items()}
    taken = plans["stock"]
    alike = min((plans["rows"], plans["bags"]), key=_step_ms)
    if _step_ms(alike) <= _step_ms(taken) * (1 - _STOCK_MARGIN):
        taken = alike
    if _step_ms(plans["mixed"]) <= _step_ms(taken) * (1 - _FORMS_MARGIN):
        taken = plans["mixed"]
    priced_ms = {name: _step_ms(plan) for name, plan in plans.items()}
    return _answer(questions, taken, all_stock_types, pricer, priced_ms)


def given_choice(
    questions: Sequence[TableQuestion], num_hot: Mapping[int, int], pricer: StepPricer
) -> Choice:
    """Prices a choice that somebody else made.

    Args:
        questions: All tables of the model.
        num_hot: Hot rows by position, of the tables that are hot/cold; the others are stock.
        pricer: Prices a step.
    """
    works = [question.work for question in questions]
    all_stock_types = _best_stock_types(questions, pricer)
    forms: Forms = {position: questions[position].forms[0] for position in num_hot}
    stock_types = _stock_types_beside(forms, questions, all_stock_types, pricer)
    plan = price_plan(works, forms, num_hot, stock_types, pricer)
    return _answer(questions, plan, all_stock_types, pricer, {})


def _plans(
    questions: Sequence[TableQuestion], stock_types: Sequence[str | None]
) -> dict[str, Forms]:
    """The plans to price; some may be equal."""
    able = {i: question for i, question in enumerate(questions) if question.may_be_hot_cold}

    def fewer_bytes(question: TableQuestion) -> Form:
        first, last = (_sent_bytes(question.work, question.forms[end]) for end in (0, -1))
        return question.forms[0 if first <= last * (1 - _ROWS_MARGIN) else -1]

    return {
        # a table without a stock type is hot/cold in any plan
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
    questions: Sequence[TableQuestion],
    plan: PricedPlan,
    all_stock_types: Sequence[str | None],
    pricer: StepPricer,
    priced_ms: Mapping[str, float],
) -> Choice:
    works, stock = [question.work for question in questions], None
    if None not in all_stock_types:
        stock = price_plan(works, {}, {}, all_stock_types, pricer)
    stock_types = _stock_types_beside(plan.forms, questions, all_stock_types, pricer)
    return Choice(
        forms=tuple(plan.forms.get(i) for i in range(len(works))),
        num_hot=tuple(plan.num_hot.get(i, 0) for i in range(len(works))),
        stock_types=tuple(stock_types),
        cost=plan.cost,
        stock_cost=stock.cost if stock is not None else None,
        step=plan.step,
        stock_step=stock.step if stock is not None else None,
        priced_ms=priced_ms,
    )


def _frequent_rows(
    works: Sequence[TableWork], tables: Sequence[int], least_chance: float, budget_bytes: float
) -> dict[int, int]:
    """Rows of each table that one rank's batch uses with some chance, the most frequent first.

    Args:
        works: All tables.
        tables: Positions of the tables that may have hot rows.
        least_chance: Of a row, to be used by one rank's batch.
        budget_bytes: Memory that these rows may take.
    """
    chance_G = np.concatenate([works[i].used_K for i in tables])
    rows_G = np.concatenate([works[i].rows_K for i in tables])
    table_G = np.concatenate([np.full(works[i].used_K.size, i) for i in tables])
    # most frequent rows of all tables first; a stable sort keeps the order inside a table
    order_G = np.argsort(-chance_G, kind="stable")
    order_G = order_G[chance_G[order_G] >= least_chance]
    rows_G, table_G = rows_G[order_G], table_G[order_G]
    row_bytes_G = np.array([work.load.row_bytes for work in works])[table_G]
    # a group is cut where the memory ends
    left_bytes_G = budget_bytes - np.cumsum(rows_G * row_bytes_G) + rows_G * row_bytes_G
    taken_G = np.floor(np.clip(left_bytes_G / row_bytes_G, 0.0, rows_G))
    counts = np.bincount(table_G, taken_G, minlength=len(works))
    return {i: int(counts[i]) for i in tables}


def _stock_types_beside(
    forms: Forms,
    questions: Sequence[TableQuestion],
    all_stock_types: Sequence[str | None],
    pricer: StepPricer,
) -> list[str | None]:
    """Stock types where some tables are hot/cold: few tables left may be uneven as whole tables."""
    stock_types = list(all_stock_types)
    stock = [i for i in range(len(questions)) if i not in forms]
    for i, kind in zip(stock, _best_stock_types([questions[i] for i in stock], pricer)):
        stock_types[i] = kind
    return stock_types


def _best_stock_types(questions: Sequence[TableQuestion], pricer: StepPricer) -> list[str | None]:
    """The stock type that adds least, for each table, when all tables have that type."""
    added_ms: list[dict[str, float]] = [{} for _ in questions]
    for kind in sorted({kind for question in questions for kind in question.stock_types}):
        tables = [i for i, question in enumerate(questions) if kind in question.stock_types]
        works = [questions[i].work for i in tables]
        costs = marginal_stock_costs(kind, works, pricer.curves, pricer.world_size)
        for i, cost in zip(tables, costs):
            added_ms[i][kind] = cost.exposed_ms
    return [min(ms, key=lambda kind: (ms[kind], kind)) if ms else None for ms in added_ms]
