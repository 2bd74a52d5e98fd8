"""Which tables are hot/cold, in which form, and which rows are hot: the least predicted step.

The step is that of the schedule that will run, and what a table costs there depends on what the
others leave hidden: where the wire has time to spare, bytes are nearly free, and where the core
has, work is. So tables are ordered by several guesses of what a millisecond on the wire costs, from
all of it to nothing; for each guess every table takes its cheapest form, tables join the exchange
in order of what they gain over stock, and every plan on the way is priced as a whole, micro-batches
included. Where the prediction is closer than its error, the simpler plan is taken.

Everything here is arithmetic on one host: same input, same answer, on every run and rank.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import numpy as np

from torchrec_picasso.cost.marginal import marginal_hot_cold_costs, marginal_stock_costs
from torchrec_picasso.cost.step_cost import StepCost
from torchrec_picasso.cost.step_price import StepPrice, StepPricer
from torchrec_picasso.cost.table_work import TableWork
from torchrec_picasso.decision.hot_counts import best_hot_counts
from torchrec_picasso.decision.plan_parts import Forms, PlanParts
from torchrec_picasso.placement import Form

__all__ = ["Choice", "TableQuestion", "choose", "given_choice"]

_STOCK_MARGIN = 0.02
"""Hot/cold must be predicted to take this share less than stock, or stock stays."""
_MIXED_MARGIN = 0.05
"""Likewise, less than either, where some tables of a plan stay stock though they need not: their
exchange is exposed, and each kind of placement has operators of its own."""
_FORMS_MARGIN = 0.2
"""Likewise where rows travel beside bags though they need not. The work that both forms together
ask for is not priced in full: such plans of 40 and 130 mixed tables at 1 Gbit/s were predicted to
take 0.87 and 0.86 of what all bags take, and took 1.07 and 1.11."""
_WIRE_PRICES = (1.0, 0.5, 0.25, 0.0)
"""What a millisecond on the wire may cost, as a part of one on the core."""
_MOST_PLANS = 16
"""Numbers of hot/cold tables that are tried at first, and again around the best."""
_MOST_CHANGES = 24
"""Changes of single tables that are tried."""
_MOST_ROUNDS = 3
_FEW_PIECES = (1, 4, 16)
"""Numbers of micro-batches by which plans are compared; the one that is taken is priced by all."""


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
    """

    forms: tuple[Form | None, ...]
    num_hot: tuple[int, ...]
    stock_types: tuple[str | None, ...]
    cost: StepCost
    stock_cost: StepCost | None
    step: StepPrice = field(default_factory=StepPrice)
    stock_step: StepPrice | None = None

    @property
    def hot_cold(self) -> tuple[bool, ...]:
        """Which tables take the packed exchange."""
        return tuple(form is not None for form in self.forms)


def choose(
    questions: Sequence[TableQuestion],
    pricer: StepPricer,
    replica_budget_bytes: float = float("inf"),
) -> Choice:
    """Finds the placement with the least predicted step.

    Args:
        questions: All tables of the model.
        pricer: Prices a step: network, local work, dense part.
        replica_budget_bytes: Memory per rank that replicas may take.

    Returns:
        The choice.
    """
    stock_types = _best_stock_types(questions, pricer)
    works = [question.work for question in questions]
    able = [i for i, question in enumerate(questions) if question.may_be_hot_cold]

    def hot_counts(forms: Forms, parts: PlanParts) -> dict[int, int]:
        positions = [i for i in sorted(forms) if forms[i] == "rows"]
        counts = best_hot_counts(
            [works[i] for i in positions],
            pricer,
            replica_budget_bytes,
            [questions[i].may_have_hot_rows for i in positions],
            parts.beside_rows(forms),
        )
        return dict(zip(positions, counts))

    search = _Search(questions, able, stock_types, pricer)
    parts = PlanParts(works, {}, stock_types, pricer)
    num_hot = hot_counts({i: questions[i].forms[0] for i in able}, parts)
    forms = search.best(num_hot)
    # other tables share the latencies now: choose their rows again
    num_hot = hot_counts(forms, PlanParts(works, num_hot, stock_types, pricer))
    return _answer(works, forms, num_hot, stock_types, pricer)


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
    forms: Forms = {position: questions[position].forms[0] for position in num_hot}
    return _answer(works, forms, num_hot, _best_stock_types(questions, pricer), pricer)


def _answer(
    works: Sequence[TableWork],
    forms: Forms,
    num_hot: Mapping[int, int],
    stock_types: Sequence[str | None],
    pricer: StepPricer,
) -> Choice:
    parts = PlanParts(works, num_hot, stock_types, pricer)
    can_all_be_stock = all(kind is not None for kind in stock_types)
    return Choice(
        forms=tuple(forms.get(i) for i in range(len(works))),
        num_hot=tuple(num_hot.get(i, 0) if i in forms else 0 for i in range(len(works))),
        stock_types=tuple(stock_types),
        cost=parts.cost(forms),
        stock_cost=parts.cost({}) if can_all_be_stock else None,
        step=parts.price(forms),
        stock_step=parts.price({}) if can_all_be_stock else None,
    )


class _PlanTime(Protocol):
    def __call__(self, forms: Forms, /) -> float: ...


class _Search:
    """Plans on the way from all stock to all hot/cold, by several prices of the wire."""

    def __init__(
        self,
        questions: Sequence[TableQuestion],
        able: Sequence[int],
        stock_types: Sequence[str | None],
        pricer: StepPricer,
    ) -> None:
        self._questions, self._able, self._pricer = questions, able, pricer
        self._works = [question.work for question in questions]
        self._stock_types = stock_types
        self._must = [i for i in able if stock_types[i] is None]
        self._pieces = [k for k in _FEW_PIECES if k in pricer.pieces] or list(pricer.pieces)
        self._stock_ms = _stock_ms(able, self._works, stock_types, pricer)

    def best(self, num_hot: Mapping[int, int]) -> Forms:
        """The form of each table that joins the exchange."""
        by_form = self._costs_by_form(num_hot)
        parts = PlanParts(self._works, num_hot, self._stock_types, self._pricer)
        plans: dict[tuple[tuple[int, Form], ...], float] = {}

        def ms(forms: Forms) -> float:
            key = tuple(sorted(forms.items()))
            if key not in plans:
                plans[key] = parts.price(forms, self._pieces).step_ms
            return plans[key]

        ms({i: _cheapest(by_form[i], 1.0)[1] for i in self._must})
        for wire_price in _WIRE_PRICES:
            cheapest = {i: _cheapest(by_form[i], wire_price) for i in self._able}
            gains = {i: self._stock_ms[i] - cheapest[i][0] for i in self._able}
            order = sorted(self._able, key=lambda i: (i not in self._must, -gains[i], i))
            self._try_sizes([(i, cheapest[i][1]) for i in order], ms)
        largest = sorted(self._able, key=lambda i: (-_most_ms(by_form[i]), i))
        for size in (len(self._able), None):
            start = min((p for p in plans if size in (None, len(p))), key=lambda p: (plans[p], p))
            self._change_single(dict(start), largest, by_form, ms, may_be_stock=size is None)
        alike: list[Forms] = [
            {i: self._questions[i].forms[end] for i in self._able} for end in (0, -1)
        ]
        for forms in alike:
            ms(forms)
        keys = {tuple(sorted(forms.items())) for forms in alike}
        best: tuple[tuple[int, Form], ...] = _best_plan(
            plans,
            {key: len(key) for key in plans},
            keys,
            {key: _FORMS_MARGIN if self._has_both(dict(key)) else _MIXED_MARGIN for key in plans},
        )
        return dict(best)

    def _has_both(self, forms: Forms) -> bool:
        """Whether rows of some tables travel beside bags though none of these must."""
        of_able = {form for i, form in forms.items() if len(self._questions[i].forms) > 1}
        return len(of_able) > 1

    def _change_single(
        self,
        forms: dict[int, Form],
        order: Sequence[int],
        by_form: Mapping[int, Mapping[Form, StepCost]],
        ms: _PlanTime,
        *,
        may_be_stock: bool,
    ) -> None:
        """Prices plans with one table changed, from the best so far on, the largest tables first.

        What no guess of the price of the wire sees shows here: few tables, uneven homes.
        """
        least_ms, left = ms(forms), _MOST_CHANGES
        for i in itertools.chain.from_iterable(itertools.repeat(order, _MOST_ROUNDS)):
            others: list[Form | None] = [form for form in by_form[i] if form != forms.get(i)]
            if may_be_stock and i in forms and i not in self._must:
                others.append(None)
            for form in others[: max(0, left)]:
                left -= 1
                changed = {j: f for j, f in forms.items() if j != i} | ({i: form} if form else {})
                if ms(changed) < least_ms:
                    forms, least_ms = changed, ms(changed)

    def _try_sizes(self, order: Sequence[tuple[int, Form]], ms: _PlanTime) -> None:
        """Prices plans of the first tables in order: evenly spread numbers, then near the best."""
        low, high = len(self._must), len(order)
        for _ in range(2):
            sizes = _spread(low, high)
            times = [ms(dict(order[:size])) for size in sizes]
            best = int(np.argmin(times))
            low, high = sizes[max(0, best - 1)], sizes[min(len(sizes) - 1, best + 1)]

    def _costs_by_form(self, num_hot: Mapping[int, int]) -> dict[int, dict[Form, StepCost]]:
        """What each table adds to a step of tables that all travel alike."""
        curves, world_size = self._pricer.curves, self._pricer.world_size
        found: dict[int, dict[Form, StepCost]] = {i: {} for i in self._able}
        forms: tuple[Form, ...] = ("rows", "bags")
        for form in forms:
            group = [i for i in self._able if form in self._questions[i].forms]
            works, hot = [self._works[i] for i in group], [num_hot.get(i, 0) for i in group]
            costs = marginal_hot_cold_costs(works, hot, curves, world_size, [form] * len(group))
            for i, cost in zip(group, costs):
                found[i][form] = cost
        return found


def _most_ms(costs: Mapping[Form, StepCost]) -> float:
    return max(cost.total_ms for cost in costs.values())


def _cheapest(costs: Mapping[Form, StepCost], wire_price: float) -> tuple[float, Form]:
    """The least of a table's forms; of equals, rows."""
    times: list[tuple[float, int, Form]] = [
        (cost.total_ms - (1 - wire_price) * cost.wire_ms, place, form)
        for place, (form, cost) in enumerate(costs.items())
    ]
    ms, _, form = min(times)
    return ms, form


def _spread(low: int, high: int) -> list[int]:
    """Whole numbers from one to another, evenly spread where there are many."""
    if high - low <= _MOST_PLANS:
        return list(range(low, high + 1))
    return sorted({round(x) for x in np.linspace(low, high, _MOST_PLANS + 1)})


_Plan = TypeVar("_Plan", bound=Hashable)


def _best_plan(
    plans_ms: Mapping[_Plan, float],
    sizes: Mapping[_Plan, int],
    alike: Collection[_Plan],
    margins: Mapping[_Plan, float],
) -> _Plan:
    """The plan to take: as few hot/cold tables as can be, all, or a mixture that wins clearly.

    Args:
        plans_ms: Predicted steps.
        sizes: Hot/cold tables of each plan.
        alike: Plans of all tables that can be, all in one form as far as they can.
        margins: By how much each plan must win if it is another.
    """

    def least(plans: Sequence[_Plan]) -> _Plan:
        return min(plans, key=lambda plan: (plans_ms[plan], sizes[plan]))

    few = min(sizes.values())
    best = least([plan for plan in plans_ms if sizes[plan] == few])
    whole = least(list(alike))
    if plans_ms[whole] <= plans_ms[best] * (1 - _STOCK_MARGIN):
        best = whole
    wins = [plan for plan in plans_ms if plans_ms[plan] <= plans_ms[best] * (1 - margins[plan])]
    return least(wins) if wins else best


def _best_stock_types(questions: Sequence[TableQuestion], pricer: StepPricer) -> list[str | None]:
    """The stock type that adds least, for each table, when all tables have that type."""
    marginal: list[dict[str, float]] = [{} for _ in questions]
    for sharding_type in sorted({kind for q in questions for kind in q.stock_types}):
        group = [i for i, q in enumerate(questions) if sharding_type in q.stock_types]
        works = [questions[i].work for i in group]
        added = marginal_stock_costs(sharding_type, works, pricer.curves, pricer.world_size)
        for i, cost in zip(group, added):
            marginal[i][sharding_type] = cost.exposed_ms
    return [min(of, key=lambda kind: (of[kind], kind)) if of else None for of in marginal]


def _stock_ms(
    able: Sequence[int],
    works: Sequence[TableWork],
    stock_types: Sequence[str | None],
    pricer: StepPricer,
) -> dict[int, float]:
    """What each table adds to a step of stock tables, of whose exchange only the ids are hidden."""
    found = dict.fromkeys(able, 0.0)
    for sharding_type in sorted({kind for kind in stock_types if kind is not None}):
        group = [i for i in able if stock_types[i] == sharding_type]
        of_group = [works[i] for i in group]
        added = marginal_stock_costs(sharding_type, of_group, pricer.curves, pricer.world_size)
        for i, cost in zip(group, added):
            found[i] = cost.exposed_ms
    return found
