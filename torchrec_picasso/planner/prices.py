"""Writes the cost model's milliseconds into TorchRec's options, so that its proposers weigh them.

TorchRec adds up the ``Perf`` of the shards on a rank and compares ranks. ``Perf.total`` leaves out
the input dist, so its cost goes with the forward exchange.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from torchrec.distributed.planner.types import Perf, ShardingOption

from torchrec_picasso.cost.marginal import marginal_hot_cold_costs, marginal_stock_costs
from torchrec_picasso.cost.step_cost import StepCost
from torchrec_picasso.cost.stock import STOCK_TYPES
from torchrec_picasso.decision.decision import Decision
from torchrec_picasso.placement import HotColdParams

__all__ = ["Prices", "make_prices", "price_options"]

Prices = Mapping[tuple[str, str], StepCost]
"""What a table adds to a step, by (table, kind); kind is ``"hot_cold"`` or a sharding type."""


def make_prices(
    decision: Decision, stock_types: Collection[str] = STOCK_TYPES
) -> dict[tuple[str, str], StepCost]:
    """Marginal costs of every table, hot/cold and under kinds of stock placement.

    Args:
        decision: The tables and where they go.
        stock_types: Those to price; others are TorchRec's to estimate.
    """
    names = [work.load.name for work in decision.works]
    curves, world_size, choice = decision.curves, decision.world_size, decision.choice
    ours = marginal_hot_cold_costs(decision.works, choice.num_hot, curves, world_size, choice.forms)
    prices = {(name, "hot_cold"): cost for name, cost in zip(names, ours)}
    for kind in stock_types:
        stock = marginal_stock_costs(kind, decision.works, curves, world_size)
        prices |= {(name, kind): cost for name, cost in zip(names, stock)}
    return prices


def price_options(
    options: Sequence[ShardingOption], prices: Prices, world_size: int
) -> list[ShardingOption]:
    """Sets the times of options that have a price.

    Args:
        options: TorchRec's options, hot/cold ones among them.
        prices: Cost of each table by kind, per rank when its work is spread over all ranks.
        world_size: Ranks.

    Returns:
        The options without one, whose times are TorchRec's to estimate.
    """
    unpriced = []
    for option in options:
        is_ours = isinstance(option.cache_params, HotColdParams)
        cost = prices.get((option.name, "hot_cold" if is_ours else option.sharding_type))
        if cost is None:
            unpriced.append(option)
            continue
        # a shard that serves all ranks alone does their shares too
        share = world_size / len(option.shards)
        perf = Perf(
            fwd_compute=cost.forward_compute_ms * share,
            fwd_comms=(cost.forward_comms_ms + cost.input_dist_ms) * share,
            bwd_compute=cost.backward_compute_ms * share,
            bwd_comms=cost.backward_comms_ms * share,
        )
        for shard in option.shards:
            shard.perf = perf
    return unpriced
