"""Writes the cost model's milliseconds into TorchRec's options, for its partitioner to balance.

TorchRec adds up the ``Perf`` of the shards on a rank and compares ranks. ``Perf.total`` leaves out
the input dist, so its cost goes with the forward exchange. A table whose bags travel loads its one
home as a table-wise table does; a table whose rows travel loads all ranks alike.
"""

from __future__ import annotations

from collections.abc import Sequence

from torchrec.distributed.planner.types import Perf, ShardingOption

from torchrec_picasso.cost.stock import STOCK_TYPES, marginal_stock_costs
from torchrec_picasso.decision.decision import Decision

__all__ = ["price_options"]


def price_options(options: Sequence[ShardingOption], decision: Decision) -> list[ShardingOption]:
    """Sets the times of options by what their table adds to a step of tables of that sharding type.

    Args:
        options: TorchRec's options, hot/cold ones among them.
        decision: The tables that have a price.

    Returns:
        The options without a price, whose times are TorchRec's to estimate.
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
