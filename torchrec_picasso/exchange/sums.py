"""Starts sums over ranks; the only place in this package that does."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from torchrec_picasso.exchange.all_to_all import Pending
from torchrec_picasso.exchange.tally import note_all_reduce

__all__ = ["start_sum"]


def start_sum(pg: dist.ProcessGroup, values: Tensor) -> Pending:
    """Starts summing values over ranks, in place. Collective.

    Args:
        pg: Process group of W ranks.
        values: Values of this rank.

    Cost:
        A ring sends ``2 (W - 1) / W`` of the values.
    """
    note_all_reduce(values.nbytes, pg.size())
    work: Pending = dist.all_reduce(values, group=pg, async_op=True)
    return work
