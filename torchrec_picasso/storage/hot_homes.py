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

    def copy_home(self, homes: Tensor, replicas: Tensor) -> None:
        """Copies replicas of this rank's own hot rows to their home rows. Local.

        Args:
            homes: Per-row tensor of this rank's homes, shape ``(num_home_rows, ...)``.
            replicas: The same of its replicas, shape ``(H_p, ...)``.
        """
        homes[self.own_rows_h] = replicas[self.own_slots()]

    def broadcast(self, homes: Tensor, replicas: Tensor, pg: dist.ProcessGroup) -> None:
        """Copies every hot row from its home to all ranks' replicas. Collective.

        Args:
            homes: Per-row tensor of this rank's homes, shape ``(num_home_rows, ...)``.
            replicas: The same of its replicas, shape ``(H_p, ...)``.
            pg: Process group of W ranks.

        Cost:
            Every rank receives ``H_p`` rows.
        """
        own = homes[self.own_rows_h]
        world_size = len(self.slots_W)
        received = replicas.new_empty(replicas.shape)
        PackedAllToAll(
            pg,
            [torch.cat([own] * world_size)],
            [[own.size(0)] * world_size],
            [received],
            [self.slots_W],
        ).wait()
        replicas[self.slots_by_home_H] = received
