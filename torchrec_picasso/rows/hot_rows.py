"""Chooses rows that become hot or cold by access counts, and changes a route's hot rows.

Shape letters: H hot rows of a pack, C candidates, T tables, s rows that change places.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torchrec_picasso.rows.route import Route
from torchrec_picasso.rows.saved_uses import Census, uses_of
from torchrec_picasso.storage.hot_homes import HotHomes
from torchrec_picasso.storage.row_uses import RowUses

__all__ = ["change_hot_rows", "choose_swaps"]

_LEAST_USES = 1.0
"""Smallest access count of a candidate: rarer rows would enter by noise."""

Swaps = tuple[Tensor, Tensor]
"""Slots that become free, and positions of the candidates that enter, int64, both ``(s,)``."""


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
