"""What all ranks know of the uses of rows: sums for the hot ones, the most used of the cold ones.

Shape letters: H hot rows, C candidates, P packs, W ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from torchrec_picasso.exchange.waiting import wait_for
from torchrec_picasso.ops.ids import IdSpace
from torchrec_picasso.rows.group import RowGroup

__all__ = ["Census", "take_census"]


@dataclass(frozen=True, kw_only=True)
class Census:
    """Uses of the rows of one pack, the same on all ranks."""

    hot_uses_H: Tensor
    """Of the hot rows by slot, float32."""
    candidate_ids_C: Tensor
    """Packed ids of the cold rows that each home sees used most, int64."""
    candidate_uses_C: Tensor
    """Their uses, float32."""


def take_census(group: RowGroup, packs: Sequence[int], most_P: Sequence[int]) -> list[Census]:
    """Asks all ranks. Collective: one sum, one gathering.

    Args:
        group: The tables of one module.
        packs: Those that have hot rows and count uses.
        most_P: Candidates that a rank names of each, at most.
    """
    uses_P = [group.storages[pack].uses for pack in packs]
    sums = torch.cat([uses.replicas_h for uses in uses_P if uses is not None])
    wait_for(group.ranks.start_sum(sums))
    named = [
        _most_used(group, pack, uses.homes_n, most)
        for pack, uses, most in zip(packs, uses_P, most_P)
        if uses is not None
    ]
    sent = torch.cat(named, dim=1)
    found_P = group.ranks.gather(sent).transpose(0, 1).split(list(most_P), dim=2)
    hot_P = sums.split([group.storages[pack].num_hot_rows for pack in packs])
    census = []
    for hot_H, found_2WC in zip(hot_P, found_P):
        ids_C, uses_C = found_2WC.reshape(2, -1).unbind()
        is_row_C = ids_C >= 0
        census.append(
            Census(
                hot_uses_H=hot_H,
                candidate_ids_C=ids_C[is_row_C].to(torch.int64),
                candidate_uses_C=uses_C[is_row_C].to(torch.float32),
            )
        )
    return census


def _most_used(group: RowGroup, pack: int, uses_n: Tensor, most: int) -> Tensor:
    """Packed ids of this home's most used rows and their uses, float64, ``(2, most)``; id -1 where
    there are fewer."""
    named = torch.full((2, most), -1.0, dtype=torch.float64, device=uses_n.device)
    uses_c, rows_c = uses_n.topk(min(most, uses_n.numel()))
    rows_c = rows_c[uses_c > 0]
    named[0, : rows_c.numel()] = ids_of_home_rows(group.space, pack, group.ranks.rank, rows_c)
    named[1, : rows_c.numel()] = uses_c[: rows_c.numel()]
    return named


def ids_of_home_rows(space: IdSpace, pack: int, rank: int, rows_n: Tensor) -> Tensor:
    """Packed ids of rows that are at home on a rank.

    Args:
        space: Where packed ids have their homes.
        pack: Of the rows.
        rank: Their home.
        rows_n: Rows in its storage of the pack, int64.

    Returns:
        float64, exact up to 2^53.
    """
    here = (space.block_pack_TW == pack) & (space.block_rank_TW == rank)
    start_b, shift_b = space.block_start_TW[here], space.block_shift_TW[here]
    block_n = torch.searchsorted(start_b + shift_b, rows_n, right=True).sub_(1)
    return (rows_n - shift_b[block_n]).double()
