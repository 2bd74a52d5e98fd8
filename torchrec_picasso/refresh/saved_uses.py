"""Access counts by table: a later run continues from them, under any plan and number of ranks.

Only the most used cold rows of each home rank are saved.

Shape letters: n rows, P packs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from torchrec_picasso.refresh.census import take_census, uses_of
from torchrec_picasso.rows.route import Route

__all__ = ["SavedUses", "collect_uses", "give_uses"]


@dataclass(frozen=True, kw_only=True)
class SavedUses:
    """Access counts over all ranks.

    Args:
        num_batches: Number of counted batches over all ranks, decayed like the counts.
        uses_by_table: Rows, int64, ascending, and counts, float32, both ``(n,)``, by table name.
    """

    num_batches: float
    uses_by_table: Mapping[str, tuple[Tensor, Tensor]]


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
    """Sets the counts of a route's packs from those of any tables, as by :func:`collect_uses`.

    Unknown tables and rows are left out.
    """
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
