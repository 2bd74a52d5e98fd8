"""The usage all-gather: access counts of all ranks, summed for hot rows, largest of cold rows.

Shape letters: H hot rows, C candidates, P packs, W ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from torchrec_picasso.exchange.waiting import wait_for
from torchrec_picasso.ops.ids import IdSpace
from torchrec_picasso.rows.route import Route
from torchrec_picasso.storage.row_uses import RowUses

__all__ = ["Census", "take_census", "uses_of"]


@dataclass(frozen=True, kw_only=True)
class Census:
    """Access counts of the rows of one pack, equal on all ranks."""

    hot_uses_H: Tensor
    """Access counts of the hot rows by slot, float32."""
    candidate_ids_C: Tensor
    """Packed ids of the most used cold rows of each home rank, int64."""
    candidate_uses_C: Tensor
    """Access counts of the candidates, float32."""


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
    sent = torch.cat(named, dim=1)
    found_P = route.ranks.gather(sent).transpose(0, 1).split(list(most_P), dim=2)
    hot_P = sums.split([route.storages[pack].num_hot_rows for pack in packs])
    census = []
    # found: ids and counts of one pack; the last candidates of a rank may be padding (-1)
    for hot_H, found in zip(hot_P, found_P):
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
    """Selects this rank's most used home rows.

    Packed ids and access counts, float64, ``(2, most)``, padded with id -1.
    """
    named = torch.full((2, most), -1.0, dtype=torch.float64, device=uses_n.device)
    uses_c, rows_c = uses_n.topk(min(most, uses_n.numel()))
    rows_c = rows_c[uses_c > 0]
    named[0, : rows_c.numel()] = _ids_of_home_rows(route.space, pack, route.ranks.rank, rows_c)
    named[1, : rows_c.numel()] = uses_c[: rows_c.numel()]
    return named


def _ids_of_home_rows(space: IdSpace, pack: int, rank: int, rows_n: Tensor) -> Tensor:
    """Converts rows, int64, of a rank's storage of a pack to packed ids, float64, exact to 2^53."""
    here = (space.block_pack_TW == pack) & (space.block_rank_TW == rank)
    # a block is one table's rows on one rank; packed id + shift = row in the storage
    start_b, shift_b = space.block_start_TW[here], space.block_shift_TW[here]
    block_n = torch.searchsorted(start_b + shift_b, rows_n, right=True).sub_(1)
    return (rows_n - shift_b[block_n]).double()
