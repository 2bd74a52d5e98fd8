"""Agreement of all ranks on flags or on a text, before a collective that only some states require.

A rank that decides alone whether a collective follows, for example from its own tensors' version
counters, leaves the other ranks waiting. So every rank contributes its flags, and each rank
receives the maximum over all ranks.

Flags have their own gloo group, so they do not wait behind rows in flight. On an accelerator the
result reaches the host without a device sync.
"""

from __future__ import annotations

from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from torchrec_picasso.exchange.all_to_all import new_gloo_group
from torchrec_picasso.exchange.waiting import note_sent, wait_for

__all__ = ["Agreement", "Flags", "agree_on"]

_groups: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = WeakKeyDictionary()
"""The gloo group for the flags of a process group, with equal ranks and timeout."""


@dataclass(frozen=True)
class Flags:
    """The flags of one rank, or the maximum over all ranks."""

    homes_written: bool = False
    """Whether home rows were written from outside, so that copies of these rows are outdated."""
    model_changed: bool = False
    """Whether the model differs from the model proved to give equal results in micro-batches."""
    refused: bool = False
    """Whether a batch in flight cannot be trained."""


class Agreement:
    """Computes the maximum of all ranks' flags; starts at construction.

    Collective: every rank of ``pg`` creates the object and waits for it in the same order; the
    first object of a process group also creates the group of the flags. ``device`` is the one on
    which the collectives of ``pg`` run. Costs an all-to-all of 8 bytes per flag over gloo, a third
    of the CPU time of an all-reduce; nothing with one rank.
    """

    def __init__(self, pg: dist.ProcessGroup, device: torch.device, flags: Flags) -> None:
        self._agreed = flags if pg.size() == 1 else None
        if self._agreed is not None:
            return
        # One int64 per flag and rank, (W, flags), on the CPU: gloo sends host memory.
        own = torch.tensor(list(vars(flags).values()), dtype=torch.int64, device="cpu")
        sent = own.repeat(pg.size(), 1)
        note_sent(own.nbytes * (pg.size() - 1))
        if pg not in _groups:
            _groups[pg] = new_gloo_group(pg, device)
        self._flags_W = torch.empty_like(sent)
        self._work = dist.all_to_all_single(self._flags_W, sent, group=_groups[pg], async_op=True)

    def wait(self) -> Flags:
        """Returns the maximum of each flag over all ranks; equal on all ranks."""
        if self._agreed is None:
            wait_for(self._work)
            self._agreed = Flags(*map(any, zip(*self._flags_W.tolist())))
        return self._agreed


def agree_on(pg: dist.ProcessGroup, device: torch.device, text: str | None) -> str | None:
    """Returns, on all ranks, the text of the lowest rank that has one, else ``None``. Collective.

    Collectives of ``pg`` run on ``device``. Costs a blocking all-reduce of 8 bytes; if any rank has
    a text, also its broadcast.
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
