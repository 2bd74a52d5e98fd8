"""Writes the cost model's predictions into TorchRec's options, for TorchRec's partitioner.

TorchRec sums the ``Perf`` of the shards on a rank and compares ranks. ``Perf.total`` excludes the
input dist, so its cost is added to the forward exchange. An owner-pooled table has the cost of a
table-wise one, on its home rank; a row-exchanged table that of a row-wise one, on all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

from torchrec.distributed.planner.types import Perf, ShardingOption

from torchrec_picasso.cost.stock import STOCK_TYPES, marginal_stock_costs
from torchrec_picasso.planner.decision import Decision

__all__ = ["price_options"]


def price_options(options: Sequence[ShardingOption], decision: Decision) -> list[ShardingOption]:
    """Sets ``Perf`` of options to what the table adds to a step of tables of that sharding type.

    Args:
        options: All options, including hot/cold ones.
        decision: The tables with a predicted cost.

    Returns:
        The options without a predicted cost, which TorchRec estimates.
    """
    world_size, works = decision.world_size, decision.works
    costs = {
        (work.load.name, kind): cost
        for kind in STOCK_TYPES
        for work, cost in zip(works, marginal_stock_costs(kind, works, decision.curves, world_size))
    }
    unpriced = []
    for option in options:
        cost = costs.get((option.name, option.sharding_type))
        if cost is None:
            unpriced.append(option)
            continue
        # costs are means over ranks: a single shard has the work of all W ranks
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
