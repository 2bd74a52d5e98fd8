"""One pack's rows on one rank in training: homes, replicas as a cache of them, one update for both.

Homes are never behind: an update brings the hot rows that it touched home, those that are at home
on this rank. So whoever reads a home, or writes into part of it, finds what training left there,
whenever and through whatever view.

Whoever writes into a home in place shows in the tensors' version counters. It is noted here, and
nothing follows from it on this rank alone: between two steps ranks ask each other whether any of
them was written, and then all fill their replicas and fetch again what they had fetched.

Both are rows of one TBE, see ``row_tables.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torchrec.distributed.embedding_types import GroupedEmbeddingConfig

from torchrec_picasso.errors import PicassoError
from torchrec_picasso.exchange.ranks import Ranks
from torchrec_picasso.ops.segment_reduction import gather_sum
from torchrec_picasso.storage.exactness import check_exact, check_states
from torchrec_picasso.storage.hot_homes import HotHomes, TouchedHot
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
        self._names = [table.name for table in config.embedding_tables]
        check_exact(
            config.fused_params or {},
            self._names,
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
        self.homes_data = self._homes.data
        """The homes with another count of writes, for whoever takes ``.data`` of them."""
        self._known_versions = self._versions()
        self._was_written = True  # replicas are not filled
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

    def touched(self, slots_t: Tensor) -> TouchedHot:
        """Finds which hot slots are at home here, as :meth:`HotHomes.touched` does."""
        return self._hot_homes.touched(slots_t)

    def own_row_by_slot(self) -> Tensor:
        """What :meth:`touched` reads."""
        return self._hot_homes.own_row_by_slot

    def update(self, rows_n: Tensor, hot_t: TouchedHot, grads_mD: Tensor) -> None:
        """Applies the optimizer once to every row given, and counts one step.

        Args:
            rows_n: Home rows, shape ``(n,)``; gradients of a repeated row are summed first.
            hot_t: Hot rows, the same on all ranks.
            grads_mD: Gradients of the home rows, then of the replicas, shape ``(n + t, D)``; may be
                overwritten.

        Raises:
            PicassoError: If somebody wrote into the homes of hot rows since ranks last agreed.
        """
        with self._writing():
            if self._was_written and self.num_hot_rows:
                raise PicassoError(
                    f"table {', '.join(map(repr, self._names))} was written between a forward and "
                    "the update of its backward, and has hot rows, whose replicas would not have "
                    "the write; write between steps"
                )
            self._tables.update(rows_n, hot_t.slots_t, grads_mD)
            for rows in self._tables.per_row():
                hot_t.copy_home(rows.homes, rows.replicas)

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
        with self._writing():
            self._tables.update_bags(rows_N, offsets_S1, weights_N, grads_SD)

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
        entering = hot_homes.of_slots(old_slot_H < 0)
        stays = old_slot_H >= 0
        with self._writing():
            for rows in self._tables.per_row():
                rows.replicas[stays] = rows.replicas[old_slot_H[stays]]
                entering.broadcast(rows.homes, rows.replicas, self._ranks)
        self._hot_homes = hot_homes

    def unlike_homes(self) -> Tensor:
        """Which replicas here are not what their homes are: bool by slot. Collective.

        Where a home was written since the replicas were filled, they may be.
        """
        is_unlike_H = torch.zeros(self.num_hot_rows, dtype=torch.bool, device=self._homes.device)
        self._order.before_reading()
        for rows in self._tables.per_row():
            at_home = torch.empty_like(rows.replicas)
            self._hot_homes.broadcast(rows.homes, at_home, self._ranks)
            is_unlike_H |= (_bits(at_home) != _bits(rows.replicas)).any(dim=1)
        return is_unlike_H

    # -- writes from outside ---------------------------------------------------------------------

    def was_written(self) -> bool:
        """Whether somebody else wrote here since :meth:`fill_replicas`, or it was never called.

        This rank's own opinion: what is collective waits for an :class:`.Agreement` on it.
        """
        self._was_written |= self._versions() != self._known_versions
        return self._was_written

    def fill_replicas(self) -> None:
        """Copies every hot row from its home to all ranks, and takes the writes. Collective."""
        with self._writing():
            for rows in self._tables.per_row() if self.num_hot_rows else ():
                self._hot_homes.broadcast(rows.homes, rows.replicas, self._ranks)
        self._was_written = False

    def before_reading(self) -> None:
        """Orders whoever reads homes next on the current stream after the last update."""
        self._order.before_reading()

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Around writes that are no writes from outside."""
        self.was_written()
        self._order.before_reading()
        yield
        self._order.has_written()
        self._known_versions = self._versions()

    def _versions(self) -> tuple[int, ...]:
        of_rows = [version for rows in self._tables.per_row() for version in rows.versions()]
        return (*of_rows, self.homes_data._version)


def _bits(values_H: Tensor) -> Tensor:
    """Bytes of each row, so that a NaN is like itself: uint8, ``(H, bytes)``."""
    return values_H.reshape(len(values_H), -1).contiguous().view(torch.uint8)
