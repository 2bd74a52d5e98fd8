"""Where each unique row of a batch lies: in the request, among the fetched rows, in its matrix.

Rows are put in *request order*, the order in which homes are asked for them and gradients travel:
pack by pack, first hot rows, then cold rows, chunk by chunk and in a chunk by home rank. Within a
(pack, chunk, home) segment they ascend, so homes read their storage forward. Chunk j holds the rows
that part j of the batch is the first to use: forward then needs chunks up to j before part j, and
with backward running from the last part to the first, the gradients of chunk j are complete right
after part j. Every row still travels once.

Source: PICASSO (arXiv 2204.04903), Unique&Partition.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from torchrec_picasso.ops.fetch_order import FetchOrder
from torchrec_picasso.ops.hot_slots import HotSlots
from torchrec_picasso.ops.ids import IdSpace
from torchrec_picasso.ops.order import stable_order
from torchrec_picasso.ops.unique import UniqueRows

__all__ = ["LocatedRows", "fetch_places", "first_use_chunks", "locate_rows"]


@dataclass(frozen=True)
class LocatedRows:
    """The unique rows of a batch in request order."""

    target_U: Tensor
    """Where to read each row: its hot slot, or its row in the home's storage of the pack."""
    counts_PQ: Tensor
    """Rows of each pack at the replicas, then by chunk and home: int64, ``(P, 1 + K W)``."""
    order_U: Tensor
    """Index among the ascending ids of each row in request order, int64, shape ``(U,)``."""
    position_U: Tensor
    """The inverse: place in request order of each ascending id, int64, shape ``(U,)``."""
    touched_H: Tensor
    """Which hot slots the batch uses, bool, shape ``(H,)``."""


def first_use_chunks(rows: UniqueRows, part_N: Tensor, num_parts: int) -> Tensor:
    """Chunk of every row: the first part that looks it up.

    Args:
        rows: Unique rows of the whole batch.
        part_N: Part of each lookup, int64, shape ``(N,)``.
        num_parts: Parts K of the batch.

    Returns:
        int64, shape ``(U,)``.
    """
    chunk_U = torch.full_like(rows.ids_U, num_parts - 1, dtype=torch.int64)
    return chunk_U.scatter_reduce_(0, rows.row_of_lookup_N, part_N, "amin")


def locate_rows(
    ids_U: Tensor,
    space: IdSpace,
    hot: HotSlots,
    chunk_U: Tensor | None = None,
    num_chunks: int = 1,
) -> LocatedRows:
    """Puts distinct rows in request order.

    Args:
        ids_U: Distinct packed ids, ascending, integer, shape ``(U,)``.
        space: Where packed ids have their homes.
        hot: Which of them are hot.
        chunk_U: Chunk of each row, int64, shape ``(U,)``; ``None`` = all in the first.
        num_chunks: Chunks K.

    Cost:
        O(U log(T W) + U log H) time, no host sync.
    """
    ids_U = ids_U.to(torch.int64)
    block_U, target_U = space.find_blocks(ids_U)
    # a place is where a row is served from in a chunk: of each pack the replicas, then the homes
    per_pack = 1 + num_chunks * space.world_size
    replicas_TW = space.block_pack_TW * per_pack
    place_U = (space.block_rank_TW + 1).add_(replicas_TW).index_select(0, block_U)
    if chunk_U is not None:
        place_U.add_(chunk_U, alpha=space.world_size)
    touched_H1 = torch.zeros(hot.num_rows + 1, dtype=torch.bool, device=ids_U.device)
    if hot.num_rows:
        slot_U, is_hot_U = hot.find(ids_U)
        place_U = torch.where(is_hot_U, replicas_TW.index_select(0, block_U), place_U)
        target_U = torch.where(is_hot_U, slot_U, target_U)
        touched_H1[torch.where(is_hot_U, slot_U, hot.num_rows)] = True
    # Tables of one pack are side by side and, for one home, ascend: a stable sort is enough.
    num_places = space.num_packs * per_pack
    order_U = stable_order(place_U, num_places)
    edges = torch.arange(num_places + 1, device=ids_U.device)
    # bincount would sync the host
    counts_Q = torch.diff(torch.searchsorted(place_U.index_select(0, order_U), edges))
    position_U = torch.empty_like(order_U)
    position_U.scatter_(0, order_U, torch.arange(order_U.numel(), device=order_U.device))
    return LocatedRows(
        target_U=target_U.index_select(0, order_U),
        counts_PQ=counts_Q.view(space.num_packs, per_pack),
        order_U=order_U,
        position_U=position_U,
        touched_H=touched_H1[:-1],
    )


def fetch_places(
    located: LocatedRows, hot_P: Sequence[int], cold_P: Sequence[FetchOrder]
) -> Tensor:
    """Where each unique row is among the fetched rows: of a pack hot ones, then cold ones.

    Args:
        located: Rows in request order.
        hot_P: Hot rows of each pack.
        cold_P: Fetch order of the cold rows of each pack.

    Returns:
        Places by ascending id, packs following each other, int64, shape ``(U,)``.
    """
    if all(order.order_n is None for order in cold_P):
        return located.position_U
    device = located.position_U.device
    starts_P = [0, *accumulate(hot + cold.num_rows for hot, cold in zip(hot_P, cold_P))]
    places = []
    for start, hot, cold in zip(starts_P, hot_P, cold_P):
        places += [
            torch.arange(start, start + hot, device=device),
            cold.places(device).add_(start + hot),
        ]
    return torch.cat(places).index_select(0, located.position_U)
