"""What one table adds to a step that many share: the difference of two costs, in O(1) per table."""

from __future__ import annotations

from collections.abc import Sequence

from torchrec_picasso.cost.curves import CommCurves
from torchrec_picasso.cost.exchange_totals import HotColdTotals, sum_hot_cold
from torchrec_picasso.cost.hot_cold import hot_cold_cost
from torchrec_picasso.cost.step_cost import StepCost
from torchrec_picasso.cost.stock import StockTotals, max_over_mean, stock_cost, stock_totals
from torchrec_picasso.cost.table_work import TableWork
from torchrec_picasso.placement import Form

__all__ = ["marginal_hot_cold_costs", "marginal_stock_costs", "num_packs"]


def num_packs(works: Sequence[TableWork]) -> int:
    """Distinct dims, each a pack of its own."""
    return len({work.load.dim for work in works})


def marginal_stock_costs(
    sharding_type: str, works: Sequence[TableWork], curves: CommCurves, world_size: int
) -> list[StepCost]:
    """What each table adds to a step in which all of them have one stock sharding type.

    Args:
        sharding_type: One of :data:`torchrec_picasso.cost.stock.STOCK_TYPES`.
        works: The tables.
        curves: Measured communication and local work.
        world_size: Ranks.
    """
    uneven = max_over_mean(sharding_type, [work.load for work in works], world_size)
    totals = stock_totals(sharding_type, works)

    def cost(of: StockTotals) -> StepCost:
        return stock_cost(sharding_type, of, curves, world_size, uneven=uneven)

    everything = cost(totals)
    return [
        everything.plus(cost(totals.plus(StockTotals.of(sharding_type, work), -1.0)), -1.0)
        for work in works
    ]


def marginal_hot_cold_costs(
    works: Sequence[TableWork],
    num_hot: Sequence[float],
    curves: CommCurves,
    world_size: int,
    forms: Sequence[Form | None] | None = None,
) -> list[StepCost]:
    """What each table adds to a step in which all of them share one packed exchange.

    Args:
        works: The tables.
        num_hot: Hot rows of each.
        curves: Measured communication and local work.
        world_size: Ranks.
        forms: What of each travels; rows where none is said.
    """
    as_said = [form or "rows" for form in forms or [None] * len(works)]
    packs = max(1, len({(work.load.dim, form) for work, form in zip(works, as_said)}))
    tables = [HotColdTotals.of(work, hot, form) for work, hot, form in zip(works, num_hot, as_said)]
    totals = sum_hot_cold(tables)

    def cost(of: HotColdTotals) -> StepCost:
        return hot_cold_cost(of, curves, world_size, num_packs=packs)

    everything = cost(totals)
    return [everything.plus(cost(totals.plus(table, -1.0)), -1.0) for table in tables]
