"""Chooses hot/cold tables, their exchange, and their number of hot rows, by predicted step time.

Four plans are priced as whole steps under the schedule that runs them: all tables stock, all
row-exchanged, all owner-pooled, and each table with the exchange that sends fewer bytes; with
several ranks on each of several hosts a fifth one, all row-exchanged by host, but for modules whose
rows are faster directly. Stock tables have one sharding type, unless each table's cheapest is
clearly faster. A plan is chosen only if its predicted step is clearly shorter than those of
simpler plans, and hot rows come last, with several budgets, in the chosen plan: one disturbed curve
must not lead to hot rows on the worse route. Assumed local costs are those of one core, so a
hot/cold plan must be faster with another core's, too. Equal inputs give equal choices, in every
process.

Shape letters: K distinct lookup counts of a table; G those of several tables.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

import numpy as np

from torchrec_picasso.cost.forms import EXCHANGES
from torchrec_picasso.cost.hot_cold import Exchange
from torchrec_picasso.cost.local import LocalCosts
from torchrec_picasso.cost.schedule_time import StepPrice
from torchrec_picasso.cost.step_price import StepPricer
from torchrec_picasso.cost.stock import (
    STOCK_TYPES,
    StockCost,
    marginal_stock_costs,
    max_over_mean,
    stock_cost,
)
from torchrec_picasso.cost.table_work import TableLoad, TableWork
from torchrec_picasso.placement import FORMS, Form, HotColdParams, owner_pooled_waves, pack_key
from torchrec_picasso.storage.exactness import Refusal

Forms = Mapping[int, Form]
"""Exchange of each hot/cold table by position; the other tables are stock."""

_BY_MODULE = [form for form in EXCHANGES if FORMS[form].by_module]
_ONLY_ROWS: Mapping[Form, str] = dict.fromkeys(list(EXCHANGES)[1:], "it was not considered")

_SIMPLER_MARGIN, _ONCE_MARGIN = 0.03, 0.05
"""A hot/cold plan is chosen only if its predicted step is shorter than stock's by these shares of
the step and of what any step with hot/cold tables costs once. The latter decides small steps: by
the curves of seven sweeps no chosen plan was below 0.98 of stock with a share of 0.05, and one in
each of two sweeps with 0; none of 60 was in a sweep with today's prices (docs/dev/log.md,
2026-11-28, 2026-11-29)."""
_TYPE_MARGIN = 0.05
"""Stock tables have the same sharding type unless this share of the step is gained without it: by
noise in a curve 26 tables became row-wise, 4.39 ms, where table-wise took 3.99."""
_FORMS_MARGIN = 0.18
"""The same for a mixed plan and the best other plan. The combined work of both exchanges is not
priced in full: mixed plans of 40 and 130 tables at 1 Gbit/s were predicted to take 0.87 and 0.86 of
the owner-pooled plan, and took 1.07 and 1.11."""
_ROWS_MARGIN = 0.08
"""In the mixed plan a table is row-exchanged only if that sends fewer bytes than owner-pooling by
this share. Bags are even over micro-batches; rows are not, and need a mask of dirty rows."""
_HOT_MARGIN = 0.005
"""A larger hot set is chosen only if the predicted step is shorter by this share."""
_ANY_HOT_MARGIN = 0.1
"""The same for any hot rows at all. Their sums are one more exchange whose time is predicted with
the least certainty: plans that were predicted to gain 6 % took 1.0 to 1.2 of the time without."""
_HOT_CHANCES = (0.999, 0.97, 0.9, 0.6, 0.3, 0.1)
"""Budgets of hot rows: all rows that one rank's batch uses with at least this probability. The
savings of a hot row grow with this probability, its cost with the probability that any rank uses
it."""


@dataclass(frozen=True, kw_only=True)
class TableInfo:
    """One table of the model and its allowed placements."""

    load: TableLoad
    not_hot_cold: Refusal | None = None  # reason why the table cannot be hot/cold; None = it can
    no_hot_rows: Refusal | None = None  # reason why it cannot have hot rows; None = it can
    no_form: Mapping[Form, str] = field(default_factory=lambda: _ONLY_ROWS)
    """Reasons why it cannot have other forms than rows, by form."""
    required: HotColdParams | None = None  # placement in the user's constraints
    stock_types: tuple[str, ...] = ("table_wise", "row_wise")  # allowed ones

    @property
    def forms(self) -> tuple[Form, ...]:
        """Allowed exchanges of the table alone, if it is hot/cold."""
        if self.required is not None:
            return (self.required.form,)
        return tuple(f for f in EXCHANGES if f not in _BY_MODULE and f not in self.no_form)


@dataclass(frozen=True, kw_only=True)
class PricedPlan:
    """A plan and its predicted step; the tuples have one entry per table."""

    forms: tuple[Form | None, ...]  # exchange of a hot/cold table; None = stock
    num_hot: tuple[int, ...]
    stock_types: tuple[str | None, ...]  # sharding type of a stock table; None = hot/cold
    step: StepPrice  # under the schedule that runs it
    sent_bytes: Mapping[str, float]  # that a rank sends for tables, by purpose; mean over ranks


@dataclass(frozen=True, kw_only=True)
class Choice(PricedPlan):
    """The chosen plan."""

    works: tuple[TableWork, ...]
    stock: PricedPlan | None
    """All tables stock, under TorchRec's pipeline; ``None`` if a table has no stock type."""
    stock_costs: tuple[Mapping[str, StockCost], ...]
    """What each table adds to a step in which all tables have one stock type, by that type."""
    priced_ms: Mapping[str, float]
    """Predicted step of each priced plan without hot rows; empty if the caller chose."""


def choose(
    tables: Sequence[TableInfo],
    pricer: StepPricer,
    replica_budget_bytes: float = float("inf"),
    *,
    given_hot: Mapping[int, int] | None = None,
) -> Choice:
    """Chooses the plan with the shortest predicted step, or prices the choice of the caller.

    ``given_hot`` has the number of hot rows of each table that is hot/cold by the caller's choice,
    by position; the other tables are stock. ``None`` = the cost model chooses.
    """
    places = pricer.curves.ranks_per_host
    works = tuple(TableWork(table.load, pricer.world_size, places) for table in tables)
    model = _PricedModel(tables, works, pricer)
    priced_ms: dict[str, float] = {}
    if given_hot is not None:
        chosen = _price(model, {i: tables[i].forms[0] for i in given_hot}, given_hot)
    else:
        by_name = _plans(tables, works)
        for form in _BY_MODULE:
            if in_modules := _in_modules(model, by_name["rows"], form):
                by_name[form] = in_modules
        plans = _price_all(model, by_name)
        priced_ms = {name: plan.step.step_ms for name, plan in plans.items()}
        name = _fastest(plans, pricer)
        if name != "stock" and not pricer.curves.local.measured:
            # the gain must not depend on the core that was assumed
            newer = _PricedModel(tables, works, pricer.with_local(LocalCosts.newer_core()))
            both = _price_all(newer, {n: by_name[n] for n in (name, "stock")})
            if not _beats_stock(both[name].step, both["stock"].step, newer.pricer):
                name = "stock"
        chosen = _with_hot_rows(model, by_name[name], plans[name], replica_budget_bytes)
    return Choice(
        **vars(chosen),
        works=works,
        stock=_price(model, {}, {}) if all(table.stock_types for table in tables) else None,
        stock_costs=marginal_stock_costs(works, pricer.curves, pricer.world_size),
        priced_ms=priced_ms,
    )


class _PricedModel(NamedTuple):
    """The tables of a model, their work, and the prices."""

    tables: Sequence[TableInfo]
    works: Sequence[TableWork]
    pricer: StepPricer


def _price(model: _PricedModel, forms: Forms, num_hot: Mapping[int, int]) -> PricedPlan:
    """Prices a plan with the best types of the stock tables."""
    found, *others = (
        price_plan(model.works, forms, num_hot, stock_types, model.pricer)
        for stock_types in _stock_plans(model, forms)
    )
    for plan in others:
        if plan.step.step_ms < found.step.step_ms * (1 - _TYPE_MARGIN):
            found = plan
    return found


def _price_all(model: _PricedModel, by_name: Mapping[str, Forms]) -> dict[str, PricedPlan]:
    """Prices plans without hot rows, by name."""
    return {name: _price(model, forms, {}) for name, forms in by_name.items()}


def _with_hot_rows(
    model: _PricedModel, forms: Forms, without: PricedPlan, budget_bytes: float
) -> PricedPlan:
    """Prices a plan with several budgets of hot rows; returns the best, if it gains enough."""
    tables, works, pricer = model
    found = without
    rows = [i for i, form in forms.items() if tables[i].no_hot_rows is None]
    rows = [i for i in rows if not FORMS[forms[i]].sends_bags]
    for chance in _HOT_CHANCES if pricer.world_size > 1 and rows else ():
        num_hot = _frequent_rows(works, rows, chance, budget_bytes)
        plan = price_plan(works, forms, num_hot, dict(enumerate(found.stock_types)), pricer)
        # budgets ascend: a larger one must be clearly better
        if plan.step.step_ms < found.step.step_ms * (1 - _HOT_MARGIN):
            found = plan
    is_worth_it = found.step.step_ms < without.step.step_ms * (1 - _ANY_HOT_MARGIN)
    return found if is_worth_it else without


def _fastest(plans: Mapping[str, PricedPlan], pricer: StepPricer) -> str:
    """Names the fastest plan: that with hot/cold tables must beat stock's by the margins."""
    name = fastest_hot_cold({name: plan.step.step_ms for name, plan in plans.items()})
    return name if _beats_stock(plans[name].step, plans["stock"].step, pricer) else "stock"


def fastest_hot_cold(priced_ms: Mapping[str, float]) -> str:
    """Names the fastest plan with hot/cold tables: each must beat those with fewer mechanisms by
    its margin."""
    name = "rows" if priced_ms["rows"] <= priced_ms["bags"] else "bags"
    by_module = [(form, EXCHANGES[form].margin) for form in _BY_MODULE]
    for other, margin in [("mixed", _FORMS_MARGIN), *by_module]:
        if other in priced_ms and priced_ms[other] <= priced_ms[name] * (1 - margin):
            name = other
    return name


def _beats_stock(step: StepPrice, stock: StepPrice, pricer: StepPricer) -> bool:
    """Whether a step is shorter than stock's by the margins."""
    return step.step_ms <= stock.step_ms - least_gain_ms(stock.step_ms, pricer.curves.local)


def least_gain_ms(stock_ms: float, costs: LocalCosts) -> float:
    """Returns what the predicted step of a hot/cold plan must save of stock's, milliseconds."""
    return _SIMPLER_MARGIN * stock_ms + _ONCE_MARGIN * costs.hot_cold.once_ms


def _in_modules(model: _PricedModel, forms: Forms, other: Form) -> Forms | None:
    """Returns tables with another form in each module where that shortens the predicted step, and
    in one at least; ``None`` = no module allows it."""
    modules: dict[str, list[int]] = {}
    for i in forms:
        modules.setdefault(model.works[i].load.module, []).append(i)
    able = [
        its for its in modules.values() if all(other not in model.tables[i].no_form for i in its)
    ]
    found: dict[int, Form] = {**forms, **dict.fromkeys(chain.from_iterable(able), other)}
    for its in able:
        without = {**found, **{i: forms[i] for i in its}}
        if without != forms:  # another module has the form
            ms, other_ms = (_price(model, plan, {}).step.step_ms for plan in (without, found))
            found = without if ms <= other_ms else found
    return found if able else None


def price_plan(
    works: Sequence[TableWork],
    forms: Forms,
    num_hot: Mapping[int, int],
    stock_types: Mapping[int, str | None],
    pricer: StepPricer,
) -> PricedPlan:
    """Prices one plan; ``num_hot`` and ``stock_types`` by position, as in :class:`PricedPlan`."""
    curves, world_size, positions = pricer.curves, pricer.world_size, range(len(works))
    kinds = tuple(None if i in forms else stock_types.get(i) for i in positions)
    stock = StockCost()
    for kind in sorted({kind for kind in kinds if kind is not None}):
        alike = [work for work, found in zip(works, kinds) if found == kind]
        stock = stock.plus(stock_cost(kind, alike, curves, world_size))

    def pack(i: int) -> Hashable:
        load = works[i].load
        return pack_key(forms[i], 0, load.dim, load.element_bytes)

    bags = [i for i in sorted(forms) if FORMS[forms[i]].sends_bags]
    bag_packs = {(works[i].load.module, pack(i)) for i in bags}  # no pack has two modules
    tables_of: dict[type[Exchange], list[int]] = {}
    for i in sorted(forms):
        own = EXCHANGES[forms[i]]
        # a requested form without a price is priced as rows that are sent directly
        tables_of.setdefault(own if own.has_price(curves, world_size) else Exchange, []).append(i)
    exchanges = [
        own.from_tables(
            # further packs of further modules are in the price of these
            [(works[i], num_hot.get(i, 0), forms[i]) for i in its],
            len(set(map(pack, its))),
        )
        for own, its in tables_of.items()
    ]
    sent = [way.sent for each in exchanges for way in each.ways(world_size)]
    return PricedPlan(
        forms=tuple(forms.get(i) for i in positions),
        num_hot=tuple(num_hot.get(i, 0) for i in positions),
        stock_types=kinds,
        step=pricer.price(
            exchanges,
            stock,
            num_modules=len({works[i].load.module for i in forms}),
            uneven_bags=max_over_mean("table_wise", [works[i].load for i in bags], world_size),
            num_bag_waves=len(owner_pooled_waves(len(bag_packs))) or 1,
        ),
        sent_bytes=StockCost.sum(
            StockCost(sent_bytes=each) for each in [stock.sent_bytes, *sent]
        ).sent_bytes,
    )


def _stock_plans(model: _PricedModel, forms: Forms) -> list[dict[int, str | None]]:
    """Lists the sharding types to price for the tables that are not in ``forms``, by position: one
    type for all that allow it, and each table's cheapest. The simplest plan is the first."""
    tables, works, pricer = model
    rest = [i for i in range(len(tables)) if i not in forms]
    # fewer whole tables may be less even over ranks than all of them
    added = marginal_stock_costs([works[i] for i in rest], pricer.curves, pricer.world_size)
    # None without stock types
    cheapest = {
        i: min(tables[i].stock_types, key=lambda k: (costs[k].exposed_ms, k), default=None)
        for i, costs in zip(rest, added)
    }
    plans = [cheapest]
    for kind in reversed(STOCK_TYPES):
        plan = {i: kind if kind in tables[i].stock_types else cheapest[i] for i in rest}
        plans = [plan, *(other for other in plans if other != plan)]
    return plans


def _plans(tables: Sequence[TableInfo], works: Sequence[TableWork]) -> dict[str, Forms]:
    """Returns the plans to price by name, but for those of forms of whole modules."""
    able = {i: table.forms for i, table in enumerate(tables) if table.not_hot_cold is None}

    def fewer_bytes(work: TableWork, forms: Sequence[Form]) -> Form:
        alone = (Exchange.from_tables([(work, 0, form)], 1) for form in (forms[0], forms[-1]))
        first, last = (sum(each.ways(work.world_size)[0].sent.values()) for each in alone)
        return forms[0 if first <= last * (1 - _ROWS_MARGIN) else -1]

    return {
        # a table without a stock type is hot/cold in all plans
        "stock": {i: forms[0] for i, forms in able.items() if not tables[i].stock_types},
        "rows": {i: forms[0] for i, forms in able.items()},
        "bags": {i: forms[-1] for i, forms in able.items()},
        "mixed": {i: fewer_bytes(works[i], forms) for i, forms in able.items()},
    }


def _frequent_rows(
    works: Sequence[TableWork], tables: Sequence[int], least_chance: float, budget_bytes: float
) -> dict[int, int]:
    """Counts the rows of some tables that one rank's batch uses with a minimum probability; if
    these rows exceed the budget, the most frequent ones come first."""
    chance_G = np.concatenate([works[i].used_K for i in tables])
    rows_G = np.concatenate([works[i].rows_K for i in tables])
    table_G = np.concatenate([np.full(works[i].used_K.size, i) for i in tables])
    # most frequent rows of all tables first; a stable sort keeps the order inside a table
    order_G = np.argsort(-chance_G, kind="stable")
    order_G = order_G[chance_G[order_G] >= least_chance]
    rows_G, table_G = rows_G[order_G], table_G[order_G]
    row_bytes_G = np.array([work.load.replica_bytes for work in works])[table_G]
    # bytes that are left before each group; a group that does not fit is taken in part
    left_bytes_G = budget_bytes - np.cumsum(rows_G * row_bytes_G) + rows_G * row_bytes_G
    taken_G = np.floor(np.clip(left_bytes_G / row_bytes_G, 0.0, rows_G))
    counts = np.bincount(table_G, taken_G, minlength=len(works))
    return {i: int(counts[i]) for i in tables}
