"""The price of one plan: which tables are hot/cold in which form, with how many hot rows each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torchrec_picasso.cost.exchange_totals import HotColdTotals, sum_hot_cold
from torchrec_picasso.cost.hot_cold import hot_cold_cost
from torchrec_picasso.cost.step_cost import StepCost
from torchrec_picasso.cost.step_price import StepPrice, StepPricer
from torchrec_picasso.cost.stock import max_over_mean, placed_over_mean, stock_cost, stock_totals
from torchrec_picasso.cost.table_work import TableWork
from torchrec_picasso.placement import Form, owner_pooled_waves, pack_key

__all__ = ["Forms", "PricedPlan", "price_plan"]

Forms = Mapping[int, Form]
"""Form of each hot/cold table by its position; the other tables are stock."""


@dataclass(frozen=True, kw_only=True)
class PricedPlan:
    """A plan and its predicted step.

    Args:
        forms: The hot/cold tables.
        num_hot: Hot rows by position; a table without an entry has none.
        step: The step under the schedule that will run.
        cost: The embedding part of the step with nothing hidden.
    """

    forms: Forms = field(default_factory=dict)
    num_hot: Mapping[int, int] = field(default_factory=dict)
    step: StepPrice
    cost: StepCost


def price_plan(
    works: Sequence[TableWork],
    forms: Forms,
    num_hot: Mapping[int, int],
    stock_types: Sequence[str | None],
    pricer: StepPricer,
    *,
    homes: Mapping[int, int] | None = None,
    num_micro_batches: int | None = None,
) -> PricedPlan:
    """Prices one plan.

    Args:
        works: All tables.
        forms: The hot/cold tables.
        num_hot: Hot rows by position.
        stock_types: Stock type of each table; read for the tables without a form.
        pricer: Prices a step.
        homes: Rank of each whole table by position, for a plan that has been placed; ``None`` =
            tables are dealt to ranks as evenly as possible.
        num_micro_batches: Price this number only; ``None`` = the best number.
    """
    curves, world_size = pricer.curves, pricer.world_size
    hot_cold = sorted(forms)

    def uneven(kind: str, tables: Sequence[int]) -> float:
        """Load of the busiest rank over the mean load."""
        loads = [works[i].load for i in tables]
        if homes is None or kind != "table_wise":
            return max_over_mean(kind, loads, world_size)
        return placed_over_mean(loads, [homes[i] for i in tables], world_size)

    totals = sum_hot_cold(HotColdTotals.of(works[i], num_hot.get(i, 0), forms[i]) for i in hot_cold)
    stock = StepCost()
    for kind in sorted({kind for kind in stock_types if kind is not None}):
        tables = [
            i for i, of_table in enumerate(stock_types) if of_table == kind and i not in forms
        ]
        kind_totals = stock_totals(kind, [works[i] for i in tables])
        stock = stock.plus(
            stock_cost(kind, kind_totals, curves, world_size, uneven=uneven(kind, tables))
        )
    bags = [i for i in hot_cold if forms[i] == "bags"]
    num_packs, num_bag_packs = (
        len({pack_key(forms[i], 0, works[i].load.dim, works[i].load.element_bytes) for i in tables})
        for tables in (hot_cold, bags)
    )
    return PricedPlan(
        forms=forms,
        num_hot=num_hot,
        step=pricer.price(
            totals,
            stock,
            num_packs=num_packs,
            uneven_bags=uneven("table_wise", bags),
            num_bag_waves=len(owner_pooled_waves(num_bag_packs)) or 1,
            pieces=None if num_micro_batches is None else [num_micro_batches],
        ),
        cost=hot_cold_cost(totals, curves, world_size, num_packs=max(1, num_packs)).plus(stock),
    )
