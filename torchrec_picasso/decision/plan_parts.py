"""What each table asks of a step in each form, from which whole plans are priced."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torchrec_picasso.cost.exchange_totals import HotColdTotals
from torchrec_picasso.cost.hot_cold import hot_cold_cost
from torchrec_picasso.cost.step_cost import StepCost
from torchrec_picasso.cost.step_price import StepPrice, StepPricer
from torchrec_picasso.cost.stock import (
    StockTotals,
    max_over_mean,
    placed_over_mean,
    stock_cost,
    sum_stock,
)
from torchrec_picasso.cost.table_work import TableWork
from torchrec_picasso.decision.hot_counts import Beside
from torchrec_picasso.ops.pack_plan import MOST_BAG_WAVES
from torchrec_picasso.placement import Form

__all__ = ["Forms", "PlanParts"]

Forms = Mapping[int, Form]
"""What of a table travels, by position, of the tables in the exchange; the others are stock."""


class PlanParts:
    """Prices plans of one model.

    Args:
        works: All tables.
        num_hot: Hot rows by position; 0 where there is none.
        stock_types: Stock type of each table, if it has one.
        pricer: Prices a step.
        homes: Rank of each whole table, by position, of a plan that has been placed; ``None`` = as
            even as the planner will deal them out.
    """

    def __init__(
        self,
        works: Sequence[TableWork],
        num_hot: Mapping[int, int],
        stock_types: Sequence[str | None],
        pricer: StepPricer,
        homes: Mapping[int, int] | None = None,
    ) -> None:
        self._works, self._num_hot, self._pricer = works, num_hot, pricer
        self._homes = homes
        self._totals: dict[tuple[int, Form], tuple[float, ...]] = {}
        self._by_type: dict[str, dict[int, StockTotals]] = {}
        for kind in sorted({kind for kind in stock_types if kind is not None}):
            self._by_type[kind] = {
                i: StockTotals.of(kind, works[i])
                for i, of_table in enumerate(stock_types)
                if of_table == kind
            }

    def price(self, forms: Forms, pieces: Sequence[int] | None = None) -> StepPrice:
        """The step under the schedule that will run.

        Args:
            forms: Of the tables in the exchange.
            pieces: Numbers of micro-batches to try; ``None`` = all.
        """
        return self._pricer.price(
            self._sum(forms),
            self.stock(forms),
            num_packs=self._num_packs(forms),
            uneven_bags=self._uneven_bags(forms),
            num_bag_waves=self._num_bag_waves(forms),
            pieces=pieces,
        )

    def cost(self, forms: Forms) -> StepCost:
        """The step with nothing hidden."""
        packs = max(1, self._num_packs(forms))
        curves, world_size = self._pricer.curves, self._pricer.world_size
        ours = hot_cold_cost(self._sum(forms), curves, world_size, num_packs=packs)
        return ours.plus(self.stock(forms))

    def beside_rows(self, forms: Forms) -> Beside:
        """What is in the step beside the tables that travel as rows."""
        bags: Forms = {i: form for i, form in forms.items() if form == "bags"}
        return Beside(
            bags=self._sum(bags),
            stock=self.stock(forms),
            uneven_bags=self._uneven_bags(forms),
            num_bag_waves=self._num_bag_waves(forms),
            num_packs=self._num_packs(bags),
        )

    def stock(self, forms: Forms) -> StepCost:
        """The tables outside the exchange, nothing hidden."""
        curves, world_size = self._pricer.curves, self._pricer.world_size
        cost = StepCost()
        for kind, tables in self._by_type.items():
            group = [i for i in tables if i not in forms]
            uneven = self._uneven(kind, group)
            of_kind = sum_stock(tables[i] for i in group)
            cost = cost.plus(stock_cost(kind, of_kind, curves, world_size, uneven=uneven))
        return cost

    def _sum(self, forms: Forms) -> HotColdTotals:
        return HotColdTotals.sum_of(self._of(i, forms[i]) for i in sorted(forms))

    def _of(self, position: int, form: Form) -> tuple[float, ...]:
        found = self._totals.get((position, form))
        if found is None:
            hot = self._num_hot.get(position, 0)
            found = HotColdTotals.of(self._works[position], hot, form).values
            self._totals[position, form] = found
        return found

    def _num_packs(self, forms: Forms) -> int:
        return len({(self._works[i].load.dim, form) for i, form in forms.items()})

    def _num_bag_waves(self, forms: Forms) -> int:
        dims = {self._works[i].load.dim for i, form in forms.items() if form == "bags"}
        return max(1, min(len(dims), MOST_BAG_WAVES))

    def _uneven_bags(self, forms: Forms) -> float:
        return self._uneven("table_wise", [i for i in sorted(forms) if forms[i] == "bags"])

    def _uneven(self, kind: str, group: Sequence[int]) -> float:
        """Load of the busiest rank over the mean, of tables of one sharding type."""
        loads, world_size = [self._works[i].load for i in group], self._pricer.world_size
        if self._homes is None or kind != "table_wise":
            return max_over_mean(kind, loads, world_size)
        return placed_over_mean(loads, [self._homes[i] for i in group], world_size)
