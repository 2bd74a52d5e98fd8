"""One pack's rows on one rank in training: home rows, replicas as their cache, one common update.

Home rows are never outdated: an update copies the hot rows that it touched to their home rows, if
this rank is their home rank. So a reader or writer of home rows always finds the trained values, at
any time and through any view.

An in-place write to home rows from outside shows in the tensors' version counters. The write is
recorded here and has no other effect on this rank alone: before a step the ranks agree whether any
of them was written, and then all of them refill their replicas; a pipeline that has fetched rows
already fetches them again.

Home rows and replicas are rows of one TBE, see ``row_tables.py``, which sums the gradients of a row
that several ranks send.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torchrec.distributed.embedding_types import GroupedEmbeddingConfig

from torchrec_picasso.errors import PicassoError
from torchrec_picasso.exchange.all_to_all import Ranks
from torchrec_picasso.exchange.packed import PackedAllToAll, Payload
from torchrec_picasso.ops.ids import HotSlots, IdSpace, PackedTable
from torchrec_picasso.ops.segment_reduction import gather_sum
from torchrec_picasso.ops.streams import WriteOrder
from torchrec_picasso.storage.exactness import check_exact, check_states
from torchrec_picasso.storage.row_tables import RowTables, choose_memory
from torchrec_picasso.storage.row_uses import RowUses

_MOST_SENT = 1 << 20
"""Rows that a rank sends at once, at most, to fill replicas."""


class UsedHot(NamedTuple):
    """Hot rows that this rank's batch uses."""

    slots_h: Tensor
    """Hot slots, ascending int64."""
    positions_h: Tensor
    """Position of each slot among those that any rank's batch uses, int64."""


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
    own_row_on_host_H: np.ndarray
    """A copy, so that no step asks the device for it."""

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
        on_host_H = own_row_H.cpu().numpy()
        # Hot slots of a pack are consecutive.
        packs = [slice(start, end) for start, end in pairwise(hot.start_P1)]
        return [HotHomes(rank_H[pack], own_row_H[pack], on_host_H[pack]) for pack in packs]

    @staticmethod
    def find_own(
        homes_P: Sequence[HotHomes], touched_P: Sequence[np.ndarray], used_P: Sequence[np.ndarray]
    ) -> list[tuple[UsedHot, TouchedHot]]:
        """Finds which of the touched slots of each pack have their home rank here, and where this
        rank's own are among them. Slots are int64 on the host; one copy to the device and no host
        sync."""
        if not any(map(len, touched_P)):
            nothing = homes_P[0].own_row_H
            nothing = nothing[:0] if nothing.numel() else nothing
            return [(UsedHot(*[nothing] * 2), TouchedHot(*[nothing] * 3)) for _ in homes_P]
        pieces: list[np.ndarray] = []
        for homes, touched_t, used_h in zip(homes_P, touched_P, used_P):
            row_t = homes.own_row_on_host_H[touched_t]  # -1 = another home rank
            is_own_t = row_t >= 0
            pieces += [used_h, np.searchsorted(touched_t, used_h)]
            pieces += [touched_t, touched_t[is_own_t], row_t[is_own_t]]
        joined = torch.from_numpy(np.concatenate(pieces))
        on_device = joined.to(homes_P[0].own_row_H.device, non_blocking=True)
        found = iter(on_device.split(list(map(len, pieces))))
        return [(UsedHot(*islice(found, 2)), TouchedHot(*islice(found, 3))) for _ in homes_P]

    def broadcast(
        self, homes: Tensor, replicas: Tensor, ranks: Ranks, slots_s: Tensor | None = None
    ) -> None:
        """Copies hot rows from their home ranks to the replicas of all ranks. Collective.

        ``homes`` has an entry per home row of this rank, ``replicas`` one per slot, weights or
        state. Every rank receives one row for each of ``slots_s``, ascending int64 and equal on all
        ranks; ``None`` = all slots. They travel in pieces, since a rank may send each of its rows
        to all ranks.
        """
        if slots_s is None:
            slots_s = torch.arange(self.num_hot_rows, device=self.rank_H.device)
        for piece_s in slots_s.split(max(1, _MOST_SENT // ranks.size)):
            self._broadcast_piece(homes, replicas, ranks, piece_s)

    def _broadcast_piece(
        self, homes: Tensor, replicas: Tensor, ranks: Ranks, slots_s: Tensor
    ) -> None:
        rank_s, own_row_s = self.rank_H[slots_s], self.own_row_H[slots_s]
        own = homes[own_row_s[own_row_s >= 0]]
        # An all-gather of uneven blocks: each rank sends its h rows to all W ranks. Received rows
        # are grouped by home rank; a stable sort keeps them ascending by slot there.
        slots_by_home_s = slots_s[torch.argsort(rank_s, stable=True)]
        counts_W = torch.bincount(rank_s, minlength=ranks.size).tolist()
        received = replicas.new_empty(len(slots_s), *replicas.shape[1:])
        to_all = torch.cat([own] * ranks.size)
        payload = Payload(to_all, [len(own)] * ranks.size, received, counts_W)
        PackedAllToAll(ranks, [payload], ranks.size * len(slots_s)).wait()
        replicas[slots_by_home_s] = received


class RowStorage(nn.Module):
    """Home rows and replicas of one pack on this rank: tables of one dim, compute kernel and
    optimizer setting. Raises CompatError if these cannot be trained exactly."""

    def __init__(
        self,
        config: GroupedEmbeddingConfig,
        hot_homes: HotHomes,
        ranks: Ranks,
        device: torch.device,
    ) -> None:
        super().__init__()
        self._ranks = ranks
        self.hot_homes = hot_homes
        """Home ranks of the pack's hot rows."""
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
        self.tables = RowTables(config, layout, device)
        """Weights and optimizer state of the pack."""
        self._homes, self._replicas = self.tables.weights.homes, self.tables.weights.replicas
        self._order = WriteOrder(device)
        self.homes_data = self._homes.data
        """Home rows with a separate version counter, for callers that take ``.data`` of them."""
        self._known_versions = self._versions()
        self._was_written = True  # replicas are not filled
        self.num_changes = 0
        """Number of updates, and of writes from outside that were taken over, by any driver."""
        self.uses: RowUses | None = None
        """Access counts; ``None`` if not requested."""

    @property
    def num_hot_rows(self) -> int:
        """Number of hot rows of the pack."""
        return self.hot_homes.num_hot_rows

    def gather(self, rows_n: Tensor) -> Tensor:
        """Reads home rows, integer, with repeats: float32, shape ``(n, D)``."""
        self._order.before_reading()
        return self._homes.index_select(0, rows_n).float()

    def pool(self, rows_N: Tensor, offsets_S1: Tensor, weights_N: Tensor | None) -> Tensor:
        """Sums the home rows of each bag, weighted: float32, ``(S, D)``, zero for an empty bag.
        Rows are those of each lookup, int64; offsets the first lookup of each bag, and N."""
        if self._homes.dtype != torch.float32:  # FP16 rows are summed in float32
            return gather_sum(self.gather(rows_N), None, offsets_S1, weights_N)
        self._order.before_reading()
        return gather_sum(self._homes, rows_N, offsets_S1, weights_N)

    def gather_hot(self, slots_h: Tensor, out_hD: Tensor) -> None:
        """Reads replicas, by int64 slots counted from 0 in the pack, into a float32 output."""
        self._order.before_reading()
        if self._replicas.dtype == torch.float32:
            torch.index_select(self._replicas, 0, slots_h, out=out_hD)
        else:
            out_hD.copy_(self._replicas.index_select(0, slots_h))

    def update(
        self,
        rows_n: Tensor,
        touched: TouchedHot,
        grads_mD: Tensor,
        bags: tuple[Tensor, Tensor | None] | None = None,
    ) -> None:
        """Applies the optimizer once to every given row, and counts one step.

        Arguments as for :meth:`.RowTables.update`; the touched hot rows are equal on all ranks.
        Raises PicassoError if home rows of a pack with hot rows were written from outside since
        the ranks last agreed.
        """
        with self._writing():
            if self._was_written and self.num_hot_rows:
                raise PicassoError(
                    f"table {', '.join(map(repr, self._names))} was written between a forward and "
                    "the update of its backward, and has hot rows, whose replicas would not have "
                    "the write; write between steps"
                )
            self.tables.update(rows_n, touched.slots_t, grads_mD, bags)
            self.num_changes += 1
            # All ranks updated their replicas; the home rank copies weights and states to its home
            # rows: 0.6 to 1.6 ms of CPU for 3,000 to 6,000 rows of D=128.
            for rows in self.tables.per_row() if self.num_hot_rows else ():
                updated = rows.replicas.index_select(0, touched.own_slots_o)
                rows.homes.index_copy_(0, touched.own_rows_o, updated)

    def start_counting(self) -> RowUses:
        """Returns the access counts; starts them if they are not kept yet."""
        if self.uses is None:
            self.uses = RowUses(len(self._homes), self.num_hot_rows, self._homes.device)
        return self.uses

    def change_hot_set(self, hot_homes: HotHomes, old_slot_H: Tensor) -> None:
        """Assigns the slots to other rows; the number of slots does not change. Collective.

        Rows that leave the hot set need no copy, because their home rows are up to date; rows that
        enter are copied from their home rows. ``old_slot_H`` is the slot in the old set of each row
        of the new set, -1 for a row that enters, int64, shape ``(H_p,)``.
        """
        stays = old_slot_H >= 0
        entering_s = stays.logical_not().nonzero().squeeze(1)
        with self._writing():
            for rows in self.tables.per_row():
                # The right side is gathered into new memory first, so slots may be permuted.
                rows.replicas[stays] = rows.replicas[old_slot_H[stays]]
                hot_homes.broadcast(rows.homes, rows.replicas, self._ranks, entering_s)
        self.hot_homes = hot_homes

    def differing_homes(self) -> Tensor:
        """Returns which replicas here differ from their home rows: bool by slot. Collective.
        Differences are expected if home rows were written since the replicas were filled."""
        is_unlike_H = torch.zeros(self.num_hot_rows, dtype=torch.bool, device=self._homes.device)
        self._order.before_reading()
        for rows in self.tables.per_row():
            # Receive all hot rows as a refill would, into separate memory, and compare bits.
            at_home = torch.empty_like(rows.replicas)
            self.hot_homes.broadcast(rows.homes, at_home, self._ranks)
            is_unlike_H |= (_bits(at_home) != _bits(rows.replicas)).any(dim=1)
        return is_unlike_H

    def was_written(self) -> bool:
        """Whether home rows were written from outside since :meth:`fill_replicas`.

        The result is also true before the first fill. It is this rank's own: a collective action
        requires an :class:`.Agreement` on it.
        """
        self._was_written |= self._versions() != self._known_versions
        return self._was_written

    def check_unwritten(self) -> None:
        """Raises PicassoError if home rows were written since the ranks last agreed on writes. The
        rows that a forward looks up were fetched before: they do not have the write."""
        if self.was_written():
            raise PicassoError(
                f"table {', '.join(map(repr, self._names))} was written in a forward, after the "
                "rows that it looks up were fetched; write between steps"
            )

    def fill_replicas(self) -> None:
        """Refills all replicas from the home rows and clears the written flag. Collective."""
        with self._writing():
            for rows in self.tables.per_row() if self.num_hot_rows else ():
                self.hot_homes.broadcast(rows.homes, rows.replicas, self._ranks)
        self._was_written = False
        self.num_changes += 1  # rows that were fetched before do not have the writes

    def before_reading(self) -> None:
        """Orders later reads of home rows on the current stream after the last update."""
        self._order.before_reading()

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Context of this storage's own writes, which must not count as writes from outside."""
        # Record earlier writes from outside before the version counters are reset below.
        self.was_written()
        self._order.before_reading()
        yield
        self._order.has_written()
        self._known_versions = self._versions()

    def _versions(self) -> tuple[int, ...]:
        versions = [version for rows in self.tables.per_row() for version in rows.versions()]
        return (*versions, self.homes_data._version)


def _bits(values_H: Tensor) -> Tensor:
    """Returns the bytes of each row, so that equal NaNs compare as equal: uint8, ``(H, bytes)``."""
    return values_H.reshape(len(values_H), -1).contiguous().view(torch.uint8)
