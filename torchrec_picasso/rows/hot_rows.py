"""Access counts of all ranks: which rows become hot by them, and what a later run goes on from.

A refresh sums the counts of hot rows over ranks, and gathers the most used cold rows of each home
rank. These rows are also what is saved: a later run continues from their counts, under any plan and
number of ranks.

Shape letters: H hot rows, C candidates, P packs, T tables, W ranks; n rows, s rows that change
places.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from torchrec_picasso.exchange.waiting import wait_for
from torchrec_picasso.ops.ids import PackedTable
from torchrec_picasso.rows.refresh_policy import Refresh
from torchrec_picasso.rows.route import Route
from torchrec_picasso.storage.row_storage import HotHomes

_LEAST_USES = 1.0
"""Smallest access count of a candidate: rarer rows would enter by noise."""

_SAVED_A_SLOT = 4
"""Cold rows of a home rank per replica when counts are saved; further rows rarely become hot."""

Swaps = tuple[Tensor, Tensor]
"""Slots that become free, and positions of the candidates that enter, int64, both ``(s,)``."""


@dataclass(frozen=True)
class PackUses:
    """Access counts of the rows of one pack, equal on all ranks."""

    hot_uses_H: Tensor
    """Access counts of the hot rows by slot, float32."""
    candidate_ids_C: Tensor
    """Linear ids of the most used cold rows of each home rank, int64."""
    candidate_uses_C: Tensor
    """Access counts of the candidates, float32."""


@dataclass(frozen=True, kw_only=True)
class SavedUses:
    """Access counts over all ranks.

    Args:
        num_batches: Number of counted batches over all ranks, decayed like the counts.
        uses_by_table: Rows, int64, ascending, and counts, float32, both ``(n,)``, by table name.
    """

    num_batches: float
    uses_by_table: Mapping[str, tuple[Tensor, Tensor]]


class CountedRoute:
    """The hot rows of one route, and the access counts that they are chosen by. ``uses_P`` are this
    rank's counts of its packs: those that have hot rows, and cold rows to choose from."""

    def __init__(self, route: Route) -> None:
        self.route = route
        sizes_P = zip(map(len, route.hot_ids_by_pack()), map(sum, route.space.home_rows_PW))
        self._packs = [pack for pack, (hot, rows) in enumerate(sizes_P) if 0 < hot < rows]
        self._storages = [route.storages[pack] for pack in self._packs]
        self.uses_P = [storage.start_counting() for storage in self._storages]

    def refresh(self, policy: Refresh, num_batches: float) -> tuple[int, int]:
        """Replaces hot rows where counts justify it. Collective.

        Counts must be rescaled; they are of ``num_batches`` batches of all ranks. Returns the
        number of rows that entered, and their bytes, weights and optimizer state.
        """
        # largest number of rows of each pack that one evaluation may replace
        most_P = [max(1, int(policy.most_moved * s.num_hot_rows)) for s in self._storages]
        counted_P = self._gather_uses(most_P)
        swaps_P = [
            choose_swaps(counted, num_batches=num_batches, deviations=policy.deviations, most=most)
            for counted, most in zip(counted_P, most_P)
        ]
        moved_P = [leaving_s.numel() for leaving_s, _ in swaps_P]
        if any(moved_P):
            self._change(counted_P, swaps_P)
        tensors_P = [storage.tables.per_row() for storage in self._storages]
        row_bytes_P = [sum(rows.replicas[:1].nbytes for rows in tensors) for tensors in tensors_P]
        return sum(moved_P), sum(moved * size for moved, size in zip(moved_P, row_bytes_P))

    def collect(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Collects the counts from all ranks, by table. Collective. Counts must be rescaled."""
        hot_P = self.route.hot_ids_by_pack()
        counted_P = self._gather_uses([_SAVED_A_SLOT * s.num_hot_rows for s in self._storages])
        pairs = zip(self._packs, counted_P)
        ids_n = torch.cat([ids for p, c in pairs for ids in (hot_P[p], c.candidate_ids_C)])
        uses_n = torch.cat([uses for c in counted_P for uses in (c.hot_uses_H, c.candidate_uses_C)])
        ids_n, order_n = ids_n.cpu().sort()
        uses_n = uses_n.cpu()[order_n]
        by_table = [found for found in self._by_table(ids_n) if len(found[2])]
        return {table.name: (rows_n, uses_n[at].clone()) for table, at, rows_n in by_table}

    def give(self, uses_by_table: Mapping[str, tuple[Tensor, Tensor]]) -> None:
        """Sets the counts from those of any tables, as by :meth:`collect`; unknown tables and rows
        are left out."""
        route, uses_by_pack = self.route, dict(zip(self._packs, self.uses_P))
        for table, base, end in route.id_ranges():
            if table.name not in uses_by_table or table.pack not in uses_by_pack:
                continue
            uses = uses_by_pack[table.pack]
            rows_n, uses_n = (tensor.to(route.device) for tensor in uses_by_table[table.name])
            is_row_n = rows_n < end - base
            ids_n, uses_n = rows_n[is_row_n] + base, uses_n[is_row_n]
            slot_n, is_hot_n = route.hot.find(ids_n)
            if route.ranks.rank == 0:  # counts of slots are summed over ranks
                slots_h = slot_n[is_hot_n] - route.hot.start_P1[table.pack]
                uses.replicas_H[slots_h] = uses_n[is_hot_n]
            block_c, row_c = route.space.find_blocks(ids_n[~is_hot_n])
            is_here_c = route.space.block_rank_TW[block_c] == route.ranks.rank
            uses.homes_n[row_c[is_here_c]] = uses_n[~is_hot_n][is_here_c]

    def _gather_uses(self, most_P: Sequence[int]) -> list[PackUses]:
        """Collects counts from all ranks. Collective: one all-reduce, one all-gather. ``most_P`` is
        the largest number of candidates of a rank for each pack."""
        sums = torch.cat([uses.replicas_H for uses in self.uses_P])
        wait_for(self.route.ranks.start_sum(sums))
        # (2, C) of this rank for each pack, side by side: one gather for all packs of the module
        each_pack = zip(self._packs, self.uses_P, most_P)
        named = [self._most_used(pack, uses.homes_n, most) for pack, uses, most in each_pack]
        gathered = self.route.ranks.gather(torch.cat(named, dim=1)).transpose(0, 1)
        hot_P = sums.split([storage.num_hot_rows for storage in self._storages])
        counted = []
        # found: ids and counts of one pack; the last candidates of a rank may be padding (-1)
        for hot_H, found in zip(hot_P, gathered.split(list(most_P), dim=2)):
            ids_C, uses_C = found.reshape(2, -1).unbind()
            ids_C, uses_C = ids_C[ids_C >= 0].to(torch.int64), uses_C[ids_C >= 0].float()
            counted.append(PackUses(hot_H, ids_C, uses_C))
        return counted

    def _most_used(self, pack: int, uses_n: Tensor, most: int) -> Tensor:
        """Selects this rank's most used home rows: linear ids and access counts, float64, exact to
        2^53, ``(2, most)``, padded with id -1."""
        space = self.route.space
        named = torch.full((2, most), -1.0, dtype=torch.float64, device=uses_n.device)
        uses_c, rows_c = uses_n.topk(min(most, uses_n.numel()))
        rows_c = rows_c[uses_c > 0]
        # a block is one table's rows on this rank; linear id + shift = row in the pack's storage
        here = (space.block_pack_TW == pack) & (space.block_rank_TW == self.route.ranks.rank)
        end_b, shift_b = space.block_end_TW[here], space.block_shift_TW[here]
        block_c = torch.searchsorted(end_b + shift_b, rows_c, right=True)
        named[0, : rows_c.numel()] = (rows_c - shift_b[block_c]).double()
        named[1, : rows_c.numel()] = uses_c[: rows_c.numel()]
        return named

    def _change(self, counted_P: Sequence[PackUses], swaps_P: Sequence[Swaps]) -> None:
        """Replaces hot rows of the packs by their access counts and swaps. Collective."""
        route, ids_P, old_slot_P = self.route, self.route.hot_ids_by_pack(), []
        each_pack = list(zip(self._packs, self._storages, self.uses_P))
        # Slots are in the order of linear ids, so most replicas of a changed pack move.
        for (pack, storage, uses), counted, swaps in zip(each_pack, counted_P, swaps_P):
            leaving_s, entering_s = swaps
            # the home rank of a leaving row continues from its count, which all ranks know
            row_s = storage.hot_homes.own_row_H[leaving_s]
            uses.homes_n[row_s[row_s >= 0]] = counted.hot_uses_H[leaving_s][row_s >= 0]
            ids_H = ids_P[pack].clone()
            ids_H[leaving_s] = counted.candidate_ids_C[entering_s]
            ids_P[pack], order_H = ids_H.sort()
            # old slot of each new slot; -1 = an entering row
            is_new_H = torch.zeros(len(ids_H), dtype=torch.bool, device=ids_H.device)
            is_new_H[leaving_s] = True
            old_slot_P.append(torch.where(is_new_H[order_H], -1, order_H))
        route.change_hot_rows([rows for *_, rows in self._by_table(torch.cat(ids_P).cpu())])
        # the group now has the new hot set; weights, optimizer state and counts follow it
        homes_P = HotHomes.for_packs(route.tables, route.ranks.rank, route.device)
        for (pack, storage, uses), old_slot_H in zip(each_pack, old_slot_P):
            storage.change_hot_set(homes_P[pack], old_slot_H)
            # counts of slots are summed over ranks: only the home rank sets an entering row's
            own_row_H = homes_P[pack].own_row_H
            from_home_H = (old_slot_H < 0) & (own_row_H >= 0)
            moved_H = uses.replicas_H[old_slot_H.clamp(min=0)].masked_fill_(old_slot_H < 0, 0.0)
            moved_H[from_home_H] = uses.homes_n[own_row_H[from_home_H]]
            uses.replicas_H = moved_H
            uses.homes_n[own_row_H[from_home_H]] = 0.0

    def _by_table(self, ids_n: Tensor) -> Iterator[tuple[PackedTable, slice, Tensor]]:
        """Yields each table, the position of its ids among ascending ones on the host, its rows."""
        for table, base, end in self.route.id_ranges():
            where = slice(*torch.searchsorted(ids_n, torch.tensor([base, end])).tolist())
            yield table, where, ids_n[where] - base


def choose_swaps(counted: PackUses, *, num_batches: float, deviations: float, most: int) -> Swaps:
    """Replaces the least used hot rows by the most used candidates; no communication.

    Ranks with equal arguments make equal choices: among equal counts, the rows with the smallest
    ids enter, and those in the first slots leave. Counts are over all ranks; candidates are cold
    rows, each once, in any order.

    A candidate's count must exceed that of the row that leaves for it by ``deviations`` standard
    deviations, under the model that each of ``num_batches`` counted batches, over all ranks, uses a
    row or not by chance. At most ``most`` rows change.
    """
    hot_uses_H, candidate_uses_C = counted.hot_uses_H, counted.candidate_uses_C
    # two stable sorts: by count, and by id among equal counts
    by_id = torch.argsort(counted.candidate_ids_C)
    most_used = by_id[torch.argsort(candidate_uses_C[by_id], descending=True, stable=True)]
    least_used = torch.argsort(hot_uses_H, stable=True)
    num_pairs = min(most, most_used.numel(), least_used.numel())
    entering, leaving = most_used[:num_pairs], least_used[:num_pairs]
    more_s, less_s = candidate_uses_C[entering], hot_uses_H[leaving]
    # binomial variance of a count c in n batches: n p (1 - p) with p = c / n
    variance_s = more_s * (1 - more_s / num_batches) + less_s * (1 - less_s / num_batches)
    enters_s = more_s - less_s > deviations * variance_s.clamp(min=0).sqrt()
    enters_s &= more_s >= _LEAST_USES
    # From pair to pair the entering counts fall and the leaving counts rise, so the pairs that
    # change are the first ones; cumprod ends them at the first pair that fails.
    num_swaps = int(enters_s.cumprod(0).sum())
    return leaving[:num_swaps], entering[:num_swaps]
