"""What was counted of rows, by table: a later run goes on with it, under any plan and ranks.

Of cold rows only the most used of each home are kept.

Shape letters: n rows, P packs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from torchrec_picasso.refresh.census import take_census
from torchrec_picasso.rows.group import RowGroup

__all__ = ["SavedUses", "collect_uses", "give_uses"]


@dataclass(frozen=True, kw_only=True)
class SavedUses:
    """Counts that all ranks know.

    Args:
        num_batches: Batches of all ranks that were counted, fading as uses do.
        of_tables: By table, rows, ascending int64, and their uses, float32, both ``(n,)``.
    """

    num_batches: float
    of_tables: Mapping[str, tuple[Tensor, Tensor]]


def collect_uses(
    group: RowGroup, packs: Sequence[int], most_P: Sequence[int]
) -> dict[str, tuple[Tensor, Tensor]]:
    """Asks all ranks for the counts of one module, once they are settled. Collective.

    Args:
        group: Its tables.
        packs: Those that count.
        most_P: Cold rows that a rank names of each, at most.
    """
    hot_P = [group.hot.ids_H[start:end] for start, end in pairwise(group.hot.start_P1)]
    census_P = take_census(group, packs, most_P)
    ids_n = torch.cat(
        [ids for pack, of in zip(packs, census_P) for ids in (hot_P[pack], of.candidate_ids_C)]
    )
    uses_n = torch.cat([uses for of in census_P for uses in (of.hot_uses_H, of.candidate_uses_C)])
    ids_n, order_n = ids_n.cpu().sort()
    uses_n = uses_n.cpu()[order_n]
    found = {}
    for name, base, end, _ in _tables(group):
        low, high = torch.searchsorted(ids_n, torch.tensor([base, end])).tolist()
        if high > low:
            found[name] = ids_n[low:high] - base, uses_n[low:high].clone()
    return found


def give_uses(
    group: RowGroup, packs: Sequence[int], of_tables: Mapping[str, tuple[Tensor, Tensor]]
) -> None:
    """Counts on from what was counted; tables and rows that are not there are left out.

    Args:
        group: The tables of one module.
        packs: Those that count.
        of_tables: As :func:`collect_uses` gave them, of whatever tables.
    """
    rank = group.ranks.rank
    start_P1 = group.hot.start_P1
    for name, base, end, pack in _tables(group):
        if name not in of_tables or pack not in packs:
            continue
        uses = group.storages[pack].uses
        assert uses is not None, "counting has begun"
        rows_n, uses_n = (of.to(group.device) for of in of_tables[name])
        is_row_n = rows_n < end - base
        ids_n, uses_n = rows_n[is_row_n] + base, uses_n[is_row_n]
        hot_ids_H = group.hot.ids_H[start_P1[pack] : start_P1[pack + 1]]
        slot_n = torch.searchsorted(hot_ids_H, ids_n).clamp(max=len(hot_ids_H) - 1)
        is_hot_n = hot_ids_H[slot_n] == ids_n
        if rank == 0:  # they are summed over ranks
            uses.replicas_h[slot_n[is_hot_n]] = uses_n[is_hot_n]
        block_c, row_c = group.space.find_blocks(ids_n[~is_hot_n])
        is_here_c = group.space.block_rank_TW[block_c] == rank
        uses.homes_n[row_c[is_here_c]] = uses_n[~is_hot_n][is_here_c]


def _tables(group: RowGroup) -> Iterator[tuple[str, int, int, int]]:
    """Name, first packed id, end of the packed ids and pack of each table whose rows travel."""
    base = 0
    for table in group.tables:
        if not table.as_bags:
            yield table.name, base, base + table.num_embeddings, table.pack
            base += table.num_embeddings
