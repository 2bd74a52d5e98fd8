"""Hot rows and their slots: the part of the id space that a refresh may change.

A hot row has a replica on every rank. Its *slot* is its index among the packed ids of all hot rows,
so the slots of one pack are consecutive. A batch whose rows were located with one hot set must be
served by replicas of the same hot set; the *epoch* identifies the hot set.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
import torch
from torch import Tensor

from torchrec_picasso.ops.ids import PackedTable

__all__ = ["HotSlots", "pack_bits"]

_WORD_BYTES = 8


@dataclass(frozen=True)
class HotSlots:
    """The hot rows of the tables of one route."""

    ids_H: Tensor
    """Packed ids of the hot rows, ascending int64; the index is the hot slot."""
    start_P1: tuple[int, ...]
    """First hot slot of each pack; the last entry is the number of hot rows."""
    epoch: int = 0
    """Number of the module's hot set, counted from 0."""

    @staticmethod
    def build(tables: Sequence[PackedTable], device: torch.device, epoch: int = 0) -> HotSlots:
        """Collects the hot rows of tables, given as for :meth:`IdSpace.build`, by packed id."""
        bases = [0, *accumulate(table.num_embeddings for table in tables)]
        hot_P = [0] * (tables[-1].pack + 1)
        for table in tables:
            hot_P[table.pack] += table.hot_rows_H.numel()
        ids = [table.hot_rows_H + base for table, base in zip(tables, bases)]
        ids_H = torch.cat([torch.empty(0, dtype=torch.int64), *ids])
        return HotSlots(ids_H.to(device), (0, *accumulate(hot_P)), epoch)

    @property
    def num_rows(self) -> int:
        """Number of hot rows of all tables, H."""
        return self.start_P1[-1]

    def find(self, ids_U: Tensor) -> tuple[Tensor, Tensor]:
        """Finds which packed ids, int64, are hot. Requires at least one hot row in the module.

        Returns the slot of each hot row, int64, undefined for cold rows, and the mask of the hot
        rows, both of shape ``(U,)``, in O(U log H) time without a host sync.
        """
        slot_U = torch.searchsorted(self.ids_H, ids_U)
        # An id above all hot ids gets slot H; the clamp keeps the comparison below in bounds.
        candidate_U = slot_U.clamp(max=self.num_rows - 1)
        return slot_U, self.ids_H.index_select(0, candidate_U) == ids_U

    def touched(self, bits_WX: np.ndarray) -> list[Tensor]:
        """Finds the hot slots that any rank's batch uses, from its :func:`pack_bits` on the host.

        Slots of each pack ascend, are counted from 0 in the pack, and are on the device.
        """
        union_X = np.bitwise_or.reduce(bits_WX, axis=0)
        touched_t = np.unpackbits(union_X.view(np.uint8), bitorder="little").nonzero()[0]
        # touched_t ascends over all packs: find each pack's range, then count from 0 in the pack.
        edges_P1 = np.searchsorted(touched_t, self.start_P1).tolist()
        touched_t -= np.repeat(self.start_P1[:-1], np.diff(edges_P1))
        on_device = torch.from_numpy(touched_t).to(self.ids_H.device, non_blocking=True)
        return [on_device[first:end] for first, end in pairwise(edges_P1)]


def pack_bits(mask_H: Tensor) -> Tensor:
    """Packs a bool mask into int64 words of 64 bits each, little-endian."""
    num_words = -(-mask_H.numel() // (8 * _WORD_BYTES))
    # Padded to whole words as (bytes, 8 bits); a byte is the sum of its bits times their powers.
    padded = mask_H.new_zeros(num_words * _WORD_BYTES, 8)
    padded.view(-1)[: mask_H.numel()] = mask_H
    powers_of_two = 2 ** torch.arange(8, dtype=torch.uint8, device=mask_H.device)
    return (padded * powers_of_two).sum(1, dtype=torch.uint8).view(torch.int64)
