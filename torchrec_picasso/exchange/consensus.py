"""Agreement of all ranks on one optional text."""

from __future__ import annotations

import torch
import torch.distributed as dist

__all__ = ["agree_on"]


def agree_on(pg: dist.ProcessGroup, device: torch.device, text: str | None) -> str | None:
    """Returns, on all ranks, the text of the lowest rank that has one. Collective.

    Args:
        pg: Process group.
        device: Device on which the collectives of ``pg`` run.
        text: Text of this rank; ``None`` = no text.

    Returns:
        The text, or ``None`` if no rank has one.

    Cost:
        A blocking all-reduce of 8 bytes; if any rank has a text, also its broadcast.
    """
    if pg.size() == 1:
        return text
    # Minimum over the ranks that have a text; W = no rank has one.
    candidate = pg.rank() if text is not None else pg.size()
    first = torch.tensor([candidate], device=device)
    dist.all_reduce(first, op=dist.ReduceOp.MIN, group=pg)
    source = int(first.item())
    if source == pg.size():
        return None
    payload = [text]
    dist.broadcast_object_list(payload, group=pg, group_src=source, device=device)
    return payload[0]
