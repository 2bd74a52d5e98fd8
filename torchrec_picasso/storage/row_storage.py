"""One pack's rows on one rank in training: homes, replicas as a cache of them, one update for both.

Replicas have two states:

* *filled*: equal on all ranks; ahead of their homes after an update. ``flush`` copies a rank's own
  hot rows home (local, no communication).
* *stale*: before the first step, after a purge, or when somebody wrote into a home in place, which
  shows in the tensors' version counters. The next lookup fills them again (collective).

Both are rows of one TBE, see ``row_tables.py``.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torchrec.distributed.embedding_types import GroupedEmbeddingConfig

from torchrec_picasso.exchange.ranks import Ranks
from torchrec_picasso.ops.segment_reduction import gather_sum
from torchrec_picasso.storage.exactness import check_exact, check_states
from torchrec_picasso.storage.hot_homes import HotHomes
from torchrec_picasso.storage.memory_layout import choose_memory
from torchrec_picasso.storage.row_tables import RowTables
from torchrec_picasso.storage.row_uses import RowUses
from torchrec_picasso.storage.write_order import WriteOrder

__all__ = ["RowStorage"]


class RowStorage(nn.Module):
    """Homes and replicas of one pack on this rank.

    Args:
        config: The pack's tables on this rank, of one dim, compute kernel and optimizer setting.
        hot_homes: Where the hot rows of the pack are at home.
        ranks: Who has the other homes and replicas.
        device: Where the rows go.

    Raises:
        CompatError: If the kernel, the optimizer or the dim cannot be trained exactly.
    """

    def __init__(
        self,
        config: GroupedEmbeddingConfig,
        hot_homes: HotHomes,
        ranks: Ranks,
        device: torch.device,
    ) -> None:
        super().__init__()
        self._ranks = ranks
        self._hot_homes = hot_homes
        check_exact(
            config.fused_params or {},
            [table.name for table in config.embedding_tables],
            data_type=config.data_type,
            device=device,
            num_hot_rows=hot_homes.num_hot_rows,
        )
        check_states(config)
        layout = choose_memory(config, device, hot_homes.num_hot_rows)
        self._tables = RowTables(config, layout, device)
        self._homes, self._replicas = self._tables.weights.homes, self._tables.weights.replicas
        self._order = WriteOrder(device)
        self._marked: Tensor | None = None  # all False between calls of which_are_among
        self._filled_versions: tuple[int, ...] | None = None
        self._replicas_ahead = False
        self._own_versions = self._versions()
        self.uses: RowUses | None = None
        """Counts of uses, where somebody asked for them."""

    @property
    def tables(self) -> RowTables:
        """Weights and optimizer state."""
        return self._tables

    @property
    def num_hot_rows(self) -> int:
        """Hot rows of the pack."""
        return self._hot_homes.num_hot_rows

    # -- training ------------------------------------------------------------------------------

    def gather(self, rows_n: Tensor) -> Tensor:
        """Reads home rows.

        Args:
            rows_n: Home rows of this storage, integer, shape ``(n,)``, repeats allowed.

        Returns:
            Their weights, float32, shape ``(n, D)``.
        """
        self._order.before_reading()
        return self._homes.index_select(0, rows_n).float()

    def pool(self, rows_N: Tensor, offsets_S1: Tensor, weights_N: Tensor | None) -> Tensor:
        """Sums home rows of bags.

        Args:
            rows_N: Home row of each lookup, int64, shape ``(N,)``.
            offsets_S1: First lookup of each bag, and N, int64, shape ``(S + 1,)``.
            weights_N: Weight of each lookup, float32; ``None`` = ones.

        Returns:
            Sums, float32, shape ``(S, D)``; zero for an empty bag.
        """
        if self._homes.dtype != torch.float32:  # else sums would be of few bits too
            return gather_sum(self.gather(rows_N), None, offsets_S1, weights_N)
        self._order.before_reading()
        return gather_sum(self._homes, rows_N, offsets_S1, weights_N)

    def gather_hot(self, slots_h: Tensor, out_hD: Tensor) -> None:
        """Reads replicas of ``slots_h``, counted from 0 in the pack, into float32 ``out_hD``."""
        self._order.before_reading()
        if self._replicas.dtype == torch.float32:
            torch.index_select(self._replicas, 0, slots_h, out=out_hD)
        else:
            out_hD.copy_(self._replicas.index_select(0, slots_h))

    def own_hot_rows(self, slots_t: Tensor) -> Tensor:
        """Home rows, int64, of those of some hot slots that are at home here."""
        return self._hot_homes.own_rows_of(slots_t)

    def which_are_among(self, rows_n: Tensor, others_m: Tensor) -> Tensor:
        """Which of some home rows are among others too: bool, shape ``(n,)``; O(n + m) time."""
        if self._marked is None:
            self._marked = torch.zeros(
                len(self._homes), dtype=torch.bool, device=self._homes.device
            )
        others_m = others_m.to(torch.int64)
        self._marked.index_fill_(0, others_m, True)
        found_n = self._marked.index_select(0, rows_n)
        self._marked.index_fill_(0, others_m, False)
        return found_n

    def update(self, rows_n: Tensor, hot_slots_h: Tensor, grads_mD: Tensor) -> None:
        """Applies the optimizer once to every row given, and counts one step.

        Args:
            rows_n: Home rows, shape ``(n,)``; gradients of a repeated row are summed first.
            hot_slots_h: Replicas, the same on all ranks, shape ``(h,)``.
            grads_mD: Gradients of the home rows, then of the replicas, shape ``(n + h, D)``; may be
                overwritten.
        """
        self._order.before_reading()
        self._tables.update(rows_n, hot_slots_h, grads_mD)
        self._order.has_written()
        if not len(grads_mD):
            return
        self._replicas_ahead = self._replicas_ahead or hot_slots_h.numel() > 0
        self._own_versions = self._versions()
        if self._filled_versions is not None:
            self._filled_versions = self._own_versions

    def update_bags(
        self, rows_N: Tensor, offsets_S1: Tensor, weights_N: Tensor | None, grads_SD: Tensor
    ) -> None:
        """Applies the optimizer once to every home row in some bags, and counts one step.

        Args:
            rows_N: As for :meth:`pool`.
            offsets_S1: Likewise.
            weights_N: Likewise.
            grads_SD: Gradients of the sums; may be overwritten.
        """
        self._order.before_reading()
        self._tables.update_bags(rows_N, offsets_S1, weights_N, grads_SD)
        self._order.has_written()
        self._own_versions = self._versions()

    # -- a change of the hot set --------------------------------------------------------------

    def start_counting(self) -> None:
        """Counts uses from now on; goes on where it has begun."""
        if self.uses is None:
            self.uses = RowUses(len(self._homes), self.num_hot_rows, self._homes.device)

    def change_hot_set(self, hot_homes: HotHomes, old_slot_H: Tensor) -> None:
        """Gives the slots to other rows, as many as before. Collective.

        Rows that leave are at home with all that they learned; those that enter come from there.

        Args:
            hot_homes: Of the new hot set.
            old_slot_H: Slot in the old set of each row of the new one, -1 for one that enters,
                int64, shape ``(H_p,)``.
        """
        self.flush()
        was_stale, was_written = self.replicas_stale(), self.written_outside()
        entering = hot_homes.of_slots(old_slot_H < 0)
        stays = old_slot_H >= 0
        for rows in self._tables.per_row():
            rows.replicas[stays] = rows.replicas[old_slot_H[stays]]
            entering.broadcast(rows.homes, rows.replicas, self._ranks)
        self._order.has_written()
        self._hot_homes = hot_homes
        self._filled_versions = None if was_stale else self._versions()
        if not was_written:
            self._own_versions = self._versions()

    def unlike_homes(self) -> Tensor:
        """Which replicas here are not what their homes are: bool by slot. Collective.

        Where they are stale there is nothing to compare.
        """
        self.flush()
        is_unlike_H = torch.zeros(self.num_hot_rows, dtype=torch.bool, device=self._homes.device)
        for rows in self._tables.per_row():
            at_home = torch.empty_like(rows.replicas)
            self._hot_homes.broadcast(rows.homes, at_home, self._ranks)
            is_unlike_H |= (_bits(at_home) != _bits(rows.replicas)).any(dim=1)
        return is_unlike_H & (not self.replicas_stale())

    # -- replicas as a cache of the homes ------------------------------------------------------

    def replicas_stale(self) -> bool:
        """Whether the replicas may differ from homes that were written from outside."""
        return self._hot_homes.num_hot_rows > 0 and self._filled_versions != self._versions()

    def written_outside(self) -> bool:
        """Whether rows were written by anybody else since the last call of
        :meth:`accept_writes`, update or fill."""
        return self._own_versions != self._versions()

    def accept_writes(self) -> None:
        """Takes the rows as they are: whoever holds copies of them has them again."""
        self._own_versions = self._versions()

    def fill_replicas(self) -> None:
        """Copies every hot row from its home to all ranks. Collective."""
        self.flush()
        self._order.before_reading()
        for rows in self._tables.per_row():
            self._hot_homes.broadcast(rows.homes, rows.replicas, self._ranks)
        self._order.has_written()
        self._replicas_ahead = False
        self._filled_versions = self._own_versions = self._versions()

    def flush(self) -> None:
        """Copies this rank's own hot rows and their optimizer state home. Local."""
        self._order.before_reading()
        if not self._replicas_ahead or self._filled_versions is None:
            return
        was_stale, was_written = self.replicas_stale(), self.written_outside()
        for rows in self._tables.per_row():
            self._hot_homes.copy_home(rows.homes, rows.replicas)
        self._order.has_written()
        self._replicas_ahead = False
        if not was_stale:
            self._filled_versions = self._versions()
        if not was_written:
            self._own_versions = self._versions()

    def purge(self) -> None:
        """Forgets the replicas, after bringing home what they know. Local."""
        self.flush()
        self._filled_versions = None

    def _versions(self) -> tuple[int, ...]:
        return tuple(version for rows in self._tables.per_row() for version in rows.versions())


def _bits(values_H: Tensor) -> Tensor:
    """Bytes of each row, so that a NaN is like itself: uint8, ``(H, bytes)``."""
    return values_H.reshape(len(values_H), -1).contiguous().view(torch.uint8)
