"""Changes the hot rows of one module's tables, and moves their access counts.

Shape letters: H hot rows of a pack, T tables, s rows that change places.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from torchrec_picasso.refresh.census import Census
from torchrec_picasso.rows.routes.route import Route
from torchrec_picasso.storage.hot_homes import HotHomes
from torchrec_picasso.storage.row_uses import RowUses

__all__ = ["change_hot_rows"]

Swaps = tuple[Tensor, Tensor]


def change_hot_rows(
    route: Route, packs: Sequence[int], census: Sequence[Census], swaps: Sequence[Swaps]
) -> None:
    """Replaces hot rows. Collective.

    Args:
        route: The tables of one route of a module.
        packs: Packs whose hot rows change.
        census: Access counts of each of these packs.
        swaps: For each pack, slots that become free and positions of the candidates that enter.
    """
    old_P = [route.hot.ids_H[start:end] for start, end in pairwise(route.hot.start_P1)]
    new_P, old_slot_P = list(old_P), {}
    # Slots are in the order of packed ids, so most replicas of a changed pack move to other slots.
    for pack, pack_census, (leaving_s, entering_s) in zip(packs, census, swaps):
        ids_H = old_P[pack].clone()
        ids_H[leaving_s] = pack_census.candidate_ids_C[entering_s]
        new_P[pack], place_H = ids_H.sort()
        # old slot of each new slot; -1 = an entering row
        is_new_H = torch.zeros(len(ids_H), dtype=torch.bool, device=ids_H.device)
        is_new_H[leaving_s] = True
        old_slot_P[pack] = torch.where(is_new_H[place_H], -1, place_H)
        _hand_over_uses(route, pack, pack_census, leaving_s, old_P[pack])
    route.change_hot_rows(_by_table(route, torch.cat(new_P)))
    # the group now has the new hot set; weights, optimizer state and counts follow it
    homes_P = HotHomes.for_packs(route.tables, route.ranks.rank, route.device)
    for pack, old_slot_H in old_slot_P.items():
        storage = route.storages[pack]
        storage.change_hot_set(homes_P[pack], old_slot_H)
        assert storage.uses is not None
        _take_over_uses(storage.uses, homes_P[pack], old_slot_H)


def _hand_over_uses(
    route: Route, pack: int, census: Census, leaving_s: Tensor, ids_H: Tensor
) -> None:
    """Writes the counts of leaving rows to their home ranks."""
    uses = route.storages[pack].uses
    assert uses is not None
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
    bases = list(accumulate((table.num_embeddings for table in route.tables), initial=0))
    ids_H = ids_H.cpu()
    edges = torch.searchsorted(ids_H, torch.tensor(bases)).tolist()
    return [ids_H[low:high] - base for base, (low, high) in zip(bases, pairwise(edges))]
