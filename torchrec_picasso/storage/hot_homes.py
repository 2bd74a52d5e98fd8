"""Home ranks of one pack's hot rows, and the copies between home rows and replicas."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from torchrec_picasso.exchange.packed import PackedAllToAll, Payload
from torchrec_picasso.exchange.ranks import Ranks
from torchrec_picasso.ops.ids import HotSlots, IdSpace, PackedTable


class TouchedHot(NamedTuple):
    """Hot rows that a step updates, and the subset whose home rank is this rank."""

    slots_t: Tensor
    """Hot slots, equal on all ranks, int64."""
    own_slots_o: Tensor
    """The slots whose home rank is this rank."""
    own_rows_o: Tensor
    """Home rows of these slots in this rank's storage, int64."""

    @staticmethod
    def joined(batches: Sequence[TouchedHot]) -> TouchedHot:
        """Concatenates the hot rows of several batches, in the order of the batches."""
        return TouchedHot(*map(torch.cat, zip(*batches)))


@dataclass(frozen=True)
class HotHomes:
    """Home ranks of one pack's hot rows by slot; slots count from 0 in the pack."""

    rank_H: Tensor
    """Home rank of each slot, int64, shape ``(H_p,)``."""
    own_row_H: Tensor
    """Home row of each slot on this rank, -1 if another rank is its home rank, int64."""

    @property
    def num_hot_rows(self) -> int:
        """Number of hot rows of the pack."""
        return self.rank_H.numel()

    @staticmethod
    def for_packs(
        tables: Sequence[PackedTable], rank: int, device: torch.device
    ) -> Sequence[HotHomes]:
        """Finds the home ranks of all packs' hot rows; tables as for :meth:`IdSpace.build`."""
        space, hot = IdSpace.build(tables, device), HotSlots.build(tables, device)
        block_H, row_H = space.find_blocks(hot.ids_H)
        rank_H = space.block_rank_TW[block_H]
        own_row_H = torch.where(rank_H == rank, row_H, -1)
        # Hot slots of a pack are consecutive.
        packs = [slice(start, end) for start, end in pairwise(hot.start_P1)]
        return [HotHomes(rank_H[pack], own_row_H[pack]) for pack in packs]

    def touched(self, slots_t: Tensor) -> TouchedHot:
        """Finds which slots, int64, have their home rank here; a host sync on an accelerator."""
        row_t = self.own_row_H[slots_t]
        is_own_t = row_t >= 0
        return TouchedHot(
            slots_t=slots_t, own_slots_o=slots_t[is_own_t], own_rows_o=row_t[is_own_t]
        )

    def broadcast(
        self, homes: Tensor, replicas: Tensor, ranks: Ranks, slots_s: Tensor | None = None
    ) -> None:
        """Copies hot rows from their home ranks to the replicas of all ranks. Collective.

        ``homes`` has an entry per home row of this rank, ``replicas`` one per slot, weights or
        state. Every rank receives one row for each of ``slots_s``, ascending int64 and equal on all
        ranks; ``None`` = all slots.
        """
        if slots_s is None:
            slots_s = torch.arange(self.num_hot_rows, device=self.rank_H.device)
        rank_s, own_row_s = self.rank_H[slots_s], self.own_row_H[slots_s]
        own = homes[own_row_s[own_row_s >= 0]]
        # An all-gather of uneven blocks: each rank sends its h rows to all W ranks. Received rows
        # are grouped by home rank; a stable sort keeps them ascending by slot there.
        slots_by_home_s = slots_s[torch.argsort(rank_s, stable=True)]
        counts_W = torch.bincount(rank_s, minlength=ranks.size).tolist()
        received = replicas.new_empty(len(slots_s), *replicas.shape[1:])
        payload = Payload(
            torch.cat([own] * ranks.size), [len(own)] * ranks.size, received, counts_W
        )
        PackedAllToAll(ranks, [payload], ranks.size * len(slots_s)).wait()
        replicas[slots_by_home_s] = received
