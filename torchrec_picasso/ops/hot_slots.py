"""Which rows have a replica on every rank, and its slot: the part of the id space that may change.

Slots follow the packed ids of the hot rows, so those of a pack are side by side. A batch that was
located with one hot set must be served by replicas of the same, hence the epoch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from torchrec_picasso.ops.ids import PackedTable

__all__ = ["HotSlots"]


@dataclass(frozen=True)
class HotSlots:
    """The hot rows of all tables of a sharded module."""

    ids_H: Tensor
    """Packed ids of the hot rows, ascending, int64, shape ``(H,)``; its index is the hot slot."""
    start_P1: tuple[int, ...]
    """First hot slot of each pack, and the number of hot rows at the end."""
    epoch: int = 0
    """Which hot set of the module it is, counted from 0."""

    @staticmethod
    def build(tables: Sequence[PackedTable], device: torch.device, epoch: int = 0) -> HotSlots:
        """Collects the hot rows of tables in the order of their packed ids.

        Args:
            tables: As for :meth:`IdSpace.build`.
            device: Where the ids go.
            epoch: Which hot set of the module it is.
        """
        tables = [table for table in tables if not table.as_bags]
        bases = [0, *accumulate(table.num_embeddings for table in tables)]
        hot_P = [0] * (tables[-1].pack + 1 if tables else 0)
        for table in tables:
            hot_P[table.pack] += table.hot_rows_H.numel()
        ids = [table.hot_rows_H + base for table, base in zip(tables, bases)]
        ids_H = torch.cat([torch.empty(0, dtype=torch.int64), *ids])
        return HotSlots(ids_H.to(device), (0, *accumulate(hot_P)), epoch)

    @property
    def num_rows(self) -> int:
        """Hot rows of all tables together, H."""
        return self.start_P1[-1]

    def find(self, ids_U: Tensor) -> tuple[Tensor, Tensor]:
        """Which of some distinct rows are hot. Only where there are hot rows.

        Args:
            ids_U: Packed ids, int64, shape ``(U,)``.

        Returns:
            Slot of each hot row, anything for others, int64, and a mask of the hot ones, ``(U,)``.

        Cost:
            O(U log H) time, no host sync.
        """
        slot_U = torch.searchsorted(self.ids_H, ids_U)
        candidate_U = slot_U.clamp(max=self.num_rows - 1)
        return slot_U, self.ids_H.index_select(0, candidate_U) == ids_U
