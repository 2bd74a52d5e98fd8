"""Prices one plan: the exchange and the number of hot rows of each hot/cold table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torchrec_picasso.cost.hot_cold import HotColdTotals, hot_cold_cost, sum_hot_cold
from torchrec_picasso.cost.schedule_time import StepPrice
from torchrec_picasso.cost.step_cost import StepCost
from torchrec_picasso.cost.step_price import StepPricer
from torchrec_picasso.cost.stock import max_over_mean, placed_over_mean, stock_cost, stock_totals
from torchrec_picasso.cost.table_work import TableWork
from torchrec_picasso.placement import Form, owner_pooled_waves, pack_key

__all__ = ["Forms", "PricedPlan", "price_plan"]

Forms = Mapping[int, Form]
"""Exchange of each hot/cold table by position; the other tables are stock."""


@dataclass(frozen=True, kw_only=True)
class PricedPlan:
    """A plan and its predicted step; sequences have one entry per table.

    Args:
        forms: Exchange of each hot/cold table; ``None`` = stock.
        num_hot: Number of hot rows of each table.
        stock_types: Stock type of each table; not used for hot/cold tables.
        step: Predicted step under the schedule that runs it.
        cost: Predicted embedding part of the step, without overlap.
    """

    forms: tuple[Form | None, ...]
    num_hot: tuple[int, ...]
    stock_types: tuple[str | None, ...]
    step: StepPrice
    cost: StepCost

    @property
    def hot_cold(self) -> tuple[bool, ...]:
        """Whether each table is hot/cold."""
        return tuple(form is not None for form in self.forms)


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
        works: Expected rows of all tables.
        forms: Exchange of each hot/cold table.
        num_hot: Number of hot rows by position.
        stock_types: Stock type of each table; not used for hot/cold tables.
        pricer: Predicts a step.
        homes: Rank of each whole table by position, if the plan is placed; ``None`` = whole tables
            are spread over ranks as evenly as possible.
        num_micro_batches: Number of micro-batches; ``None`` = the best number.
    """
    curves, world_size = pricer.curves, pricer.world_size
    hot_cold = sorted(forms)

    def uneven(kind: str, tables: Sequence[int]) -> float:
        """Returns the load of the busiest rank divided by the mean."""
        loads = [works[i].load for i in tables]
        if homes is None or kind != "table_wise":
            return max_over_mean(kind, loads, world_size)
        return placed_over_mean(loads, [homes[i] for i in tables], world_size)

    totals = sum_hot_cold(
        HotColdTotals.from_table(works[i], num_hot.get(i, 0), forms[i]) for i in hot_cold
    )
    # stock tables of one type share their exchanges; those of different types do not
    stock = StepCost()
    for kind in sorted({kind for kind in stock_types if kind is not None}):
        tables = [i for i, found in enumerate(stock_types) if found == kind and i not in forms]
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
        forms=tuple(forms.get(i) for i in range(len(works))),
        num_hot=tuple(num_hot.get(i, 0) for i in range(len(works))),
        stock_types=tuple(stock_types),
        step=pricer.price(
            totals,
            stock,
            num_packs=num_packs,
            uneven_bags=uneven("table_wise", bags),
            num_bag_waves=len(owner_pooled_waves(num_bag_packs)) or 1,
            micro_batch_counts=None if num_micro_batches is None else [num_micro_batches],
        ),
        cost=hot_cold_cost(totals, curves, world_size, num_packs=max(1, num_packs)).plus(stock),
    )
