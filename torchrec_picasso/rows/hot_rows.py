"""Access counts of all ranks: which rows become hot by them, and what a later run goes on from.

A refresh sums the counts of hot rows over ranks, and gathers the most used cold rows of each home
rank. These rows are also what is saved: a later run continues from their counts, under any plan and
number of ranks.

Shape letters: H hot rows, C candidates, P packs, T tables, W ranks; n rows, s rows that change
places.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from torchrec_picasso.exchange.waiting import wait_for
from torchrec_picasso.rows.route import Route
from torchrec_picasso.storage.hot_homes import HotHomes
from torchrec_picasso.storage.row_uses import RowUses

__all__ = [
    "Census",
    "SavedUses",
    "change_hot_rows",
    "choose_swaps",
    "collect_uses",
    "give_uses",
    "take_census",
    "uses_of",
]

_LEAST_USES = 1.0
"""Smallest access count of a candidate: rarer rows would enter by noise."""

Swaps = tuple[Tensor, Tensor]
"""Slots that become free, and positions of the candidates that enter, int64, both ``(s,)``."""


@dataclass(frozen=True, kw_only=True)
class Census:
    """Access counts of the rows of one pack, equal on all ranks."""

    hot_uses_H: Tensor
    """Access counts of the hot rows by slot, float32."""
    candidate_ids_C: Tensor
    """Packed ids of the most used cold rows of each home rank, int64."""
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


def uses_of(route: Route, pack: int) -> RowUses:
    """Returns the access counts of a pack that counts them."""
    uses = route.storages[pack].uses
    assert uses is not None, "counting has begun"
    return uses


def take_census(route: Route, packs: Sequence[int], most_P: Sequence[int]) -> list[Census]:
    """Collects access counts of packs from all ranks. Collective: one all-reduce, one all-gather.

    The packs of a route have hot rows and count accesses; ``most_P`` is the largest number of
    candidates of a rank for each.
    """
    uses_P = [uses_of(route, pack) for pack in packs]
    sums = torch.cat([uses.replicas_h for uses in uses_P])
    wait_for(route.ranks.start_sum(sums))
    named = [
        _most_used(route, pack, uses.homes_n, most)
        for pack, uses, most in zip(packs, uses_P, most_P)
    ]
    # (2, C) of this rank for each pack, side by side: one gather for all packs of the module
    gathered = route.ranks.gather(torch.cat(named, dim=1)).transpose(0, 1)
    hot_P = sums.split([route.storages[pack].num_hot_rows for pack in packs])
    census = []
    # found: ids and counts of one pack; the last candidates of a rank may be padding (-1)
    for hot_H, found in zip(hot_P, gathered.split(list(most_P), dim=2)):
        ids_C, uses_C = found.reshape(2, -1).unbind()
        is_row_C = ids_C >= 0
        census.append(
            Census(
                hot_uses_H=hot_H,
                candidate_ids_C=ids_C[is_row_C].to(torch.int64),
                candidate_uses_C=uses_C[is_row_C].to(torch.float32),
            )
        )
    return census


def _most_used(route: Route, pack: int, uses_n: Tensor, most: int) -> Tensor:
    """Selects this rank's most used home rows: packed ids and access counts, float64, exact to
    2^53, ``(2, most)``, padded with id -1."""
    named = torch.full((2, most), -1.0, dtype=torch.float64, device=uses_n.device)
    uses_c, rows_c = uses_n.topk(min(most, uses_n.numel()))
    rows_c = rows_c[uses_c > 0]
    # a block is one table's rows on this rank; packed id + shift = row in the storage of the pack
    space = route.space
    here = (space.block_pack_TW == pack) & (space.block_rank_TW == route.ranks.rank)
    start_b, shift_b = space.block_start_TW[here], space.block_shift_TW[here]
    block_c = torch.searchsorted(start_b + shift_b, rows_c, right=True).sub_(1)
    named[0, : rows_c.numel()] = (rows_c - shift_b[block_c]).double()
    named[1, : rows_c.numel()] = uses_c[: rows_c.numel()]
    return named


def collect_uses(
    route: Route, packs: Sequence[int], most_P: Sequence[int]
) -> dict[str, tuple[Tensor, Tensor]]:
    """Collects the counts of a module's route from all ranks, by table. Collective.

    Counts must be rescaled. ``most_P`` is the largest number of cold rows of a rank for each pack.
    """
    hot_P = route.hot_ids_by_pack()
    census_P = take_census(route, packs, most_P)
    ids_n = torch.cat(
        [ids for pack, c in zip(packs, census_P) for ids in (hot_P[pack], c.candidate_ids_C)]
    )
    uses_n = torch.cat([uses for c in census_P for uses in (c.hot_uses_H, c.candidate_uses_C)])
    # packed ids ascend by table, so each table's rows are a range after one sort
    ids_n, order_n = ids_n.cpu().sort()
    uses_n = uses_n.cpu()[order_n]
    found = {}
    for table, base, end in route.id_ranges():
        low, high = torch.searchsorted(ids_n, torch.tensor([base, end])).tolist()
        if high > low:
            found[table.name] = ids_n[low:high] - base, uses_n[low:high].clone()
    return found


def give_uses(
    route: Route, packs: Sequence[int], uses_by_table: Mapping[str, tuple[Tensor, Tensor]]
) -> None:
    """Sets the counts of a route's packs from those of any tables, as by :func:`collect_uses`;
    unknown tables and rows are left out."""
    rank, hot_P = route.ranks.rank, route.hot_ids_by_pack()
    for table, base, end in route.id_ranges():
        if table.name not in uses_by_table or table.pack not in packs:
            continue
        uses = uses_of(route, table.pack)
        rows_n, uses_n = (tensor.to(route.device) for tensor in uses_by_table[table.name])
        is_row_n = rows_n < end - base
        ids_n, uses_n = rows_n[is_row_n] + base, uses_n[is_row_n]
        # hot rows by binary search: counts of slots go to rank 0, counts of cold rows to home ranks
        hot_ids_H = hot_P[table.pack]
        slot_n = torch.searchsorted(hot_ids_H, ids_n).clamp(max=len(hot_ids_H) - 1)
        is_hot_n = hot_ids_H[slot_n] == ids_n
        if rank == 0:  # counts of slots are summed over ranks
            uses.replicas_h[slot_n[is_hot_n]] = uses_n[is_hot_n]
        block_c, row_c = route.space.find_blocks(ids_n[~is_hot_n])
        is_here_c = route.space.block_rank_TW[block_c] == rank
        uses.homes_n[row_c[is_here_c]] = uses_n[~is_hot_n][is_here_c]


def choose_swaps(
    hot_uses_H: Tensor,
    candidate_ids_C: Tensor,
    candidate_uses_C: Tensor,
    *,
    num_batches: float,
    deviations: float,
    most: int,
) -> Swaps:
    """Replaces the least used hot rows by the most used candidates; no communication.

    Ranks with equal arguments make equal choices: among equal counts, the rows with the smallest
    ids enter, and those in the first slots leave. Counts are over all ranks; candidates are cold
    rows, each once, in any order.

    A candidate's count must exceed that of the row that leaves for it by ``deviations`` standard
    deviations, under the model that each of ``num_batches`` counted batches, over all ranks, uses a
    row or not by chance. At most ``most`` rows change.
    """
    # two stable sorts: by count, and by id among equal counts
    by_id = torch.argsort(candidate_ids_C)
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


def change_hot_rows(
    route: Route, packs: Sequence[int], census: Sequence[Census], swaps: Sequence[Swaps]
) -> None:
    """Replaces hot rows of the packs by their census and swaps. Collective."""
    old_P = route.hot_ids_by_pack()
    new_P, old_slot_P = list(old_P), {}
    # Slots are in the order of packed ids, so most replicas of a changed pack move to other slots.
    for pack, pack_census, (leaving_s, entering_s) in zip(packs, census, swaps):
        ids_H = old_P[pack].clone()
        ids_H[leaving_s] = pack_census.candidate_ids_C[entering_s]
        new_P[pack], order_H = ids_H.sort()
        # old slot of each new slot; -1 = an entering row
        is_new_H = torch.zeros(len(ids_H), dtype=torch.bool, device=ids_H.device)
        is_new_H[leaving_s] = True
        old_slot_P[pack] = torch.where(is_new_H[order_H], -1, order_H)
        _hand_over_uses(route, pack, pack_census, leaving_s, old_P[pack])
    route.change_hot_rows(_by_table(route, torch.cat(new_P)))
    # the group now has the new hot set; weights, optimizer state and counts follow it
    homes_P = HotHomes.for_packs(route.tables, route.ranks.rank, route.device)
    for pack, old_slot_H in old_slot_P.items():
        route.storages[pack].change_hot_set(homes_P[pack], old_slot_H)
        _take_over_uses(uses_of(route, pack), homes_P[pack], old_slot_H)


def _hand_over_uses(
    route: Route, pack: int, census: Census, leaving_s: Tensor, ids_H: Tensor
) -> None:
    """Writes the counts of leaving rows to their home ranks."""
    uses = uses_of(route, pack)
    block_s, row_s = route.space.find_blocks(ids_H[leaving_s])
    # the sum over ranks, equal on all ranks; the home rank continues counting from it
    is_here_s = route.space.block_rank_TW[block_s] == route.ranks.rank
    uses.homes_n[row_s[is_here_s]] = census.hot_uses_H[leaving_s][is_here_s]


def _take_over_uses(uses: RowUses, homes: HotHomes, old_slot_H: Tensor) -> None:
    """Reorders counts as the replicas; an entering row's count stays with its home rank."""
    uses.replicas_h = torch.where(
        old_slot_H >= 0, uses.replicas_h[old_slot_H.clamp(min=0)], uses.replicas_h.new_zeros(())
    )
    entering = homes.for_slots(old_slot_H < 0)
    # only the home rank sets the count of an entering row, since slots are summed over ranks
    uses.replicas_h[entering.own_slots()] = uses.homes_n[entering.own_rows_h]
    uses.homes_n[entering.own_rows_h] = 0.0


def _by_table(route: Route, ids_H: Tensor) -> list[Tensor]:
    """Splits packed ids, ascending, into the hot rows of each table of a route."""
    ids_H = ids_H.cpu()
    ranges = torch.tensor([(base, end) for _, base, end in route.id_ranges()])
    edges = torch.searchsorted(ids_H, ranges).tolist()
    return [ids_H[low:high] - base for (base, _), (low, high) in zip(ranges.tolist(), edges)]
