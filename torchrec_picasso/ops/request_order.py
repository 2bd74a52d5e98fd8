"""The request order of a batch's unique rows, and the position of each among the fetched rows.

Rows are put in *request order*, the order in which rows are requested from their home ranks and
gradients are sent: by pack, hot rows first, then cold rows by chunk and by home rank. Rows ascend
within a (pack, chunk, home rank) segment, so home ranks read their storage forward. Chunk j holds
the rows that micro-batch ("part") j is the first to use. Forward of micro-batch j therefore needs
the chunks up to j. Backward runs from the last micro-batch to the first, so the gradients of chunk
j are complete right after micro-batch j. Every row is still sent once.

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

__all__ = ["LocatedRows", "fetch_positions", "first_use_chunks", "locate_rows"]


@dataclass(frozen=True)
class LocatedRows:
    """The unique rows of a batch in request order."""

    target_U: Tensor
    """Source of each row, int64: hot slot, or row in the home rank's storage of the pack."""
    counts_PQ: Tensor
    """Number of rows by pack and segment (replicas, then home ranks by chunk), Q = 1 + K W."""
    order_U: Tensor
    """Index among the ascending ids of each row in request order, int64."""
    position_U: Tensor
    """Inverse of ``order_U``: request position of each ascending id, int64."""
    touched_H: Tensor
    """Whether the batch uses a hot slot, bool."""


def first_use_chunks(rows: UniqueRows, part_N: Tensor, num_parts: int) -> Tensor:
    """Computes the chunk of every row, int64: the first micro-batch that looks the row up."""
    # Minimum of the micro-batch over the lookups of each row, starting from the largest value.
    chunk_U = torch.full_like(rows.ids_U, num_parts - 1, dtype=torch.int64)
    return chunk_U.scatter_reduce_(0, rows.row_of_lookup_N, part_N, "amin")


def locate_rows(
    ids_U: Tensor,
    space: IdSpace,
    hot: HotSlots,
    chunk_U: Tensor | None = None,
    num_chunks: int = 1,
) -> LocatedRows:
    """Puts distinct rows, ascending, in request order; without ``chunk_U`` all are in chunk 0.

    O(U log(T W) + U log H) time, no host sync.
    """
    ids_U = ids_U.to(torch.int64)
    block_U, target_U = space.find_blocks(ids_U)
    # A segment is a run of request order. Each pack has 1 + K W segments: the replicas, then the
    # home ranks of chunk 0, of chunk 1, ... So segment = pack * (1 + K W) + 1 + chunk * W + home
    # rank, and pack * (1 + K W) alone for a hot row.
    per_pack = 1 + num_chunks * space.world_size
    replicas_TW = space.block_pack_TW * per_pack
    segment_U = (space.block_rank_TW + 1).add_(replicas_TW).index_select(0, block_U)
    if chunk_U is not None:
        segment_U.add_(chunk_U, alpha=space.world_size)
    # One slot more than H: all cold rows write to it, so the scatter below needs no host sync.
    touched_H1 = torch.zeros(hot.num_rows + 1, dtype=torch.bool, device=ids_U.device)
    if hot.num_rows:
        slot_U, is_hot_U = hot.find(ids_U)
        segment_U = torch.where(is_hot_U, replicas_TW.index_select(0, block_U), segment_U)
        target_U = torch.where(is_hot_U, slot_U, target_U)
        touched_H1[torch.where(is_hot_U, slot_U, hot.num_rows)] = True
    # Rows ascend within a segment because tables of one pack are side by side and ascend at each
    # home rank; the sort by segment must therefore be stable.
    num_segments = space.num_packs * per_pack
    order_U = stable_order(segment_U, num_segments)
    edges = torch.arange(num_segments + 1, device=ids_U.device)
    # Rows per segment, shape (P (1 + K W),); bincount would sync the host.
    counts = torch.diff(torch.searchsorted(segment_U.index_select(0, order_U), edges))
    # Inverse permutation of order_U.
    position_U = torch.empty_like(order_U)
    position_U.scatter_(0, order_U, torch.arange(order_U.numel(), device=order_U.device))
    return LocatedRows(
        target_U=target_U.index_select(0, order_U),
        counts_PQ=counts.view(space.num_packs, per_pack),
        order_U=order_U,
        position_U=position_U,
        touched_H=touched_H1[:-1],
    )


def fetch_positions(
    located: LocatedRows, hot_P: Sequence[int], cold_P: Sequence[FetchOrder]
) -> Tensor:
    """Computes the position of each unique row, by ascending id, among the fetched rows: int64.

    Positions are consecutive over packs. In each pack, ``hot_P`` hot rows come first, then the cold
    rows in fetch order.
    """
    if all(order.order_n is None for order in cold_P):
        return located.position_U
    device = located.position_U.device
    # Fetch position of each row in request order, shape (U,). Hot rows are read locally and keep
    # their order.
    starts_P = [0, *accumulate(hot + cold.num_rows for hot, cold in zip(hot_P, cold_P))]
    positions = []
    for start, hot, cold in zip(starts_P, hot_P, cold_P):
        positions += [
            torch.arange(start, start + hot, device=device),
            cold.positions(device).add_(start + hot),
        ]
    # From request order to ascending id.
    return torch.cat(positions).index_select(0, located.position_U)
