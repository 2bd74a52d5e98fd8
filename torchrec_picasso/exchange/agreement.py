"""Agreement of all ranks on flags or on a text, before a collective that only some states require.

A rank that decides alone whether a collective follows, for example from its own tensors' version
counters, leaves the other ranks waiting. So every rank contributes its flags, and each rank
receives the maximum over all ranks.

Flags have their own gloo group, so they do not wait behind rows in flight. On an accelerator the
result reaches the host without a device sync.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from torchrec_picasso.exchange.all_to_all import new_gloo_group
from torchrec_picasso.exchange.waiting import Pending, note_bytes, wait_for

_groups: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = WeakKeyDictionary()
"""The gloo group for the flags of a process group, with equal ranks and timeout."""


class Flags(NamedTuple):
    """The flags of one rank, or the maximum over all ranks."""

    homes_written: bool = False
    """Whether home rows were written from outside, so that copies of these rows are outdated."""
    model_changed: bool = False
    """Whether the model differs from the model proved to give equal results in micro-batches."""
    refused: bool = False
    """Whether a batch in flight cannot be trained."""
    parts_fail: bool = False
    """Whether the next batch is to be trained whole, because the model would raise in a part."""

    @staticmethod
    def largest(by_rank: Sequence[Sequence[int]]) -> Flags:
        """Returns the maximum of each flag over all ranks."""
        return Flags(*map(any, zip(*by_rank)))


class Agreement:
    """Tells every rank a few integers, or flags, of all ranks; starts at construction.

    Collective: every rank of ``pg`` creates the object and waits for it in the same order; the
    first object of a process group also creates the group that carries the integers. ``device`` is
    the one on which the collectives of ``pg`` run. Costs an all-to-all of 8 bytes per integer over
    gloo, a third of the CPU time of an all-reduce; nothing with one rank.
    """

    def __init__(self, pg: dist.ProcessGroup, device: torch.device, own: Sequence[int]) -> None:
        self._by_rank = [list(own)]
        self._work: Pending | None = None
        if pg.size() == 1:
            return
        # (W, n) on the CPU: gloo sends host memory.
        sent_Wn = torch.tensor([list(own)] * pg.size(), dtype=torch.int64, device="cpu")
        num_bytes = sent_Wn[0].nbytes * (pg.size() - 1)
        note_bytes(num_bytes, num_bytes)
        if pg not in _groups:
            _groups[pg] = new_gloo_group(pg, device, "flags")
        self._received_Wn = torch.empty_like(sent_Wn)
        ends = self._received_Wn, sent_Wn
        self._work = dist.all_to_all_single(*ends, group=_groups[pg], async_op=True)

    def wait(self) -> list[list[int]]:
        """Returns the integers of each rank; equal on all ranks."""
        if self._work is not None:
            wait_for(self._work)
            self._by_rank, self._work = self._received_Wn.tolist(), None
        return self._by_rank


def agree_on(pg: dist.ProcessGroup, device: torch.device, text: str | None) -> str | None:
    """Returns, on all ranks, the text of the lowest rank that has one, else ``None``. Collective.

    Collectives of ``pg`` run on ``device``. Costs an :class:`Agreement`; if any rank has a text,
    also its broadcast.
    """
    has_text_W = [has_text for (has_text,) in Agreement(pg, device, [text is not None]).wait()]
    if not any(has_text_W):
        return None
    payload = [text]
    if pg.size() > 1:
        source = has_text_W.index(1)
        dist.broadcast_object_list(payload, group=pg, group_src=source, device=device)
    return payload[0]
