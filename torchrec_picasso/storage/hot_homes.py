"""Where the hot rows of one pack are at home, and the copies between homes and replicas."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from torchrec_picasso.exchange.packed_all_to_all import PackedAllToAll
from torchrec_picasso.ops.packed_ids import PackedIdSpace

__all__ = ["HotHomes"]


@dataclass(frozen=True)
class HotHomes:
    """Hot slots of one pack by home rank; slots count from 0 in the pack."""

    slots_by_home_H: Tensor
    """Hot slots grouped by home rank, ascending within a home, int64, shape ``(H_p,)``."""
    slots_W: tuple[int, ...]
    """How many hot rows each rank is home to."""
    own_rows_h: Tensor
    """Home rows, in this rank's storage, of the slots that are at home here, shape ``(h,)``."""
    rank: int

    @property
    def num_hot_rows(self) -> int:
        """Hot rows of the pack."""
        return self.slots_by_home_H.numel()

    @staticmethod
    def of_packs(space: PackedIdSpace, rank: int) -> Sequence[HotHomes]:
        """Finds the homes of every pack's hot rows, as seen from ``rank``."""
        block_H = torch.searchsorted(space.block_start_TW, space.hot_ids_H, right=True) - 1
        row_H = space.hot_ids_H + space.block_shift_TW[block_H]
        home_H = space.block_bucket_TW[block_H] % (1 + space.world_size) - 1
        homes = []
        for start, end in zip(space.hot_start_P1, space.hot_start_P1[1:]):
            home_h = home_H[start:end]
            homes.append(
                HotHomes(
                    slots_by_home_H=torch.argsort(home_h, stable=True),
                    slots_W=tuple(torch.bincount(home_h, minlength=space.world_size).tolist()),
                    own_rows_h=row_H[start:end][home_h == rank],
                    rank=rank,
                )
            )
        return homes

    def own_slots(self) -> Tensor:
        """Slots at home on this rank, in the order of ``own_rows_h``."""
        return self.slots_by_home_H.split(list(self.slots_W))[self.rank]

    def copy_home(self, tensor: Tensor, num_home_rows: int) -> None:
        """Copies replicas of this rank's own hot rows to their home rows. Local.

        Args:
            tensor: Per-row tensor of the pack's storage: homes, then replicas.
            num_home_rows: Where the replicas start.
        """
        tensor[self.own_rows_h] = tensor[self.own_slots() + num_home_rows]

    def broadcast(self, tensor: Tensor, num_home_rows: int, pg: dist.ProcessGroup) -> None:
        """Copies every hot row from its home to all ranks' replicas. Collective.

        Args:
            tensor: Per-row tensor of the pack's storage: homes, then replicas.
            num_home_rows: Where the replicas start.
            pg: Process group of W ranks.

        Cost:
            Every rank receives ``H_p`` rows.
        """
        own = tensor[self.own_rows_h]
        world_size = len(self.slots_W)
        received = tensor.new_empty(self.num_hot_rows, *tensor.shape[1:])
        PackedAllToAll(
            pg,
            [torch.cat([own] * world_size)],
            [[own.size(0)] * world_size],
            [received],
            [self.slots_W],
        ).wait()
        tensor[self.slots_by_home_H + num_home_rows] = received
