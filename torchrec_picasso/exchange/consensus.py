"""One text on all ranks, where any rank has one."""

from __future__ import annotations

import torch
import torch.distributed as dist

__all__ = ["agree_on"]


def agree_on(pg: dist.ProcessGroup, device: torch.device, text: str | None) -> str | None:
    """The text of the lowest rank that has one, on all ranks. Collective.

    Args:
        pg: Process group.
        device: Where collectives of ``pg`` run.
        text: Text of this rank; ``None`` = it has none.

    Cost:
        An all-reduce of 8 bytes that is waited for; where any rank has a text, a broadcast of it.
    """
    if pg.size() == 1:
        return text
    mine = pg.rank() if text is not None else pg.size()
    first = torch.tensor([mine], device=device)
    dist.all_reduce(first, op=dist.ReduceOp.MIN, group=pg)
    source = int(first.item())
    if source == pg.size():
        return None
    parcel = [text]
    dist.broadcast_object_list(parcel, group=pg, group_src=source, device=device)
    return parcel[0]
