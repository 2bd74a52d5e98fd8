"""What all ranks must know of each other before a collective that only some states ask for.

A rank that decides by itself whether something collective follows, say from its own tensors'
version counters, leaves the others waiting. So every rank says its flags, and each gets the largest
of all ranks'.

The flags have a gloo group of their own. In the group of the rows they would wait behind all rows
on their way: 49 ms behind 5 MB on 1 Gbit/s between 2 ranks, where 11 ms are enough on connections
of their own. On an accelerator the answer comes to the host without a sync of the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from torchrec_picasso.exchange.gloo_threads import let_training_go_first
from torchrec_picasso.exchange.tally import is_watched, note_sent
from torchrec_picasso.exchange.waiting import wait_for

__all__ = ["Agreement", "Flags"]


@dataclass(frozen=True, kw_only=True)
class Flags:
    """What one rank says, and what comes of all ranks'."""

    homes_written: bool = False
    """Whether home rows were written from outside, so that copies of them are outdated."""
    model_changed: bool = False
    """Whether the model is another one than was proved to give the same in micro-batches."""


class Agreement:
    """Asks all ranks for their flags; starts at construction.

    Collective: every rank of ``pg`` makes and waits for it in the same order; the first one of a
    group also makes the group of the flags.

    Args:
        pg: Process group of W ranks.
        device: Where its collectives run.
        flags: Of this rank.

    Cost:
        An all-reduce of 8 bytes a flag over gloo; nothing with one rank.
    """

    def __init__(self, pg: dist.ProcessGroup, device: torch.device, flags: Flags) -> None:
        self.mine = flags
        self._agreed: Flags | None = flags
        if pg.size() == 1:
            return
        self._agreed = None
        self._largest = torch.tensor(list(vars(flags).values()), dtype=torch.int64, device="cpu")
        if is_watched():
            note_sent(2 * (pg.size() - 1) * self._largest.nbytes // pg.size())
        self._work = dist.all_reduce(
            self._largest, op=dist.ReduceOp.MAX, group=_group_of_flags(pg, device), async_op=True
        )

    def wait(self) -> Flags:
        """The largest of each flag over all ranks, the same on all of them."""
        if self._agreed is None:
            wait_for(self._work)
            found = zip(vars(self.mine).items(), self._largest.tolist())
            self._agreed = Flags(**{name: type(mine)(most) for (name, mine), most in found})
        return self._agreed


_groups: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = WeakKeyDictionary()


def _group_of_flags(pg: dist.ProcessGroup, device: torch.device) -> dist.ProcessGroup:
    """The gloo group of a group's flags, of the same ranks and timeout."""
    if pg not in _groups:
        _groups[pg] = dist.new_group(
            dist.get_process_group_ranks(pg),
            timeout=pg._get_backend(device).options._timeout,
            backend="gloo",
            use_local_synchronization=True,  # ranks of other groups are not here
        )
        let_training_go_first()
    return _groups[pg]
