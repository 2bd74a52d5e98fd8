"""Who serves each unique row: its home rank, or the replica at hand.

Rows are put in *request order*, the order in which homes are asked for them and gradients travel:
pack by pack, first hot rows, then cold rows, chunk by chunk and in a chunk by home rank. Within a
(pack, chunk, home) segment they ascend, so homes read their storage forward. A batch that is not
interleaved is one chunk, and its rows are fetched in this order too; else see
``ops/fetch_order.py``.

Source: PICASSO (arXiv 2204.04903), Unique&Partition.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from torchrec_picasso.ops.order import stable_order
from torchrec_picasso.ops.packed_ids import PackedIdSpace
from torchrec_picasso.ops.unique import UniqueRows

__all__ = ["LocatedRows", "RowPartition", "locate_rows", "partition_rows"]


@dataclass(frozen=True)
class LocatedRows:
    """The unique rows of a batch in request order."""

    target_U: Tensor
    """Where to read each row: its hot slot, or its row in the home's storage of the pack."""
    counts_PB: Tensor
    """Rows of each pack at the replicas, then by chunk and home: int64, ``(P, 1 + C W)``."""
    order_U: Tensor
    """Index among the ascending ids of each row in request order, int64, shape ``(U,)``."""
    position_U: Tensor
    """The inverse: place in request order of each ascending id, int64, shape ``(U,)``."""
    touched_H: Tensor
    """Which hot slots the batch uses, bool, shape ``(H,)``."""


@dataclass(frozen=True)
class RowPartition:
    """The unique rows of a batch in request order, and the lookups that use them."""

    located: LocatedRows
    row_of_lookup_N: Tensor
    """Position in request order of each lookup's row, int64, shape ``(N,)``."""
    lookups_by_row_N: Tensor
    """Lookups grouped by row in request order, int64, shape ``(N,)``."""
    lookup_end_U: Tensor
    """End of each row's group in ``lookups_by_row_N``, int64, shape ``(U,)``."""


def locate_rows(
    ids_U: Tensor, space: PackedIdSpace, chunk_U: Tensor | None = None, num_chunks: int = 1
) -> LocatedRows:
    """Puts distinct rows in request order.

    Args:
        ids_U: Distinct packed ids, ascending, integer, shape ``(U,)``.
        space: Where packed ids live.
        chunk_U: Chunk of each row, int64, shape ``(U,)``; ``None`` = all in the first.
        num_chunks: Chunks C.

    Cost:
        O(U log(T W) + U log H) time, no host sync.
    """
    ids_U = ids_U.to(torch.int64)
    block_U = torch.searchsorted(space.block_start_TW, ids_U, right=True).sub_(1)
    bucket_U = space.block_bucket_TW.index_select(0, block_U)
    target_U = space.block_shift_TW.index_select(0, block_U).add_(ids_U)
    world_size = space.world_size
    per_pack = 1 + num_chunks * world_size
    if num_chunks > 1:
        pack_U = bucket_U.div(1 + world_size, rounding_mode="floor")
        bucket_U = bucket_U + pack_U * (per_pack - 1 - world_size)
        if chunk_U is not None:
            bucket_U += chunk_U * world_size
    touched_H1 = torch.zeros(space.num_hot_rows + 1, dtype=torch.bool, device=ids_U.device)
    if space.num_hot_rows:
        slot_U = torch.searchsorted(space.hot_ids_H, ids_U)
        candidate_U = slot_U.clamp(max=space.num_hot_rows - 1)
        is_hot_U = space.hot_ids_H.index_select(0, candidate_U) == ids_U
        hot_bucket_U = bucket_U.div(per_pack, rounding_mode="floor").mul_(per_pack)
        bucket_U = torch.where(is_hot_U, hot_bucket_U, bucket_U)
        target_U = torch.where(is_hot_U, slot_U, target_U)
        touched_H1[torch.where(is_hot_U, slot_U, space.num_hot_rows)] = True
    # Tables of one pack are side by side and, for one home, ascend: a stable sort is enough.
    num_buckets = space.num_packs * per_pack
    order_U = stable_order(bucket_U, num_buckets)
    edges = torch.arange(num_buckets + 1, device=ids_U.device)
    # bincount would sync the host
    counts_B = torch.diff(torch.searchsorted(bucket_U.index_select(0, order_U), edges))
    position_U = torch.empty_like(order_U)
    position_U.scatter_(0, order_U, torch.arange(order_U.numel(), device=order_U.device))
    return LocatedRows(
        target_U=target_U.index_select(0, order_U),
        counts_PB=counts_B.view(space.num_packs, -1),
        order_U=order_U,
        position_U=position_U,
        touched_H=touched_H1[:-1],
    )


def partition_rows(rows: UniqueRows, space: PackedIdSpace) -> RowPartition:
    """Puts the unique rows of a batch in request order, as one chunk.

    Args:
        rows: Unique packed ids of the batch.
        space: Where packed ids live.

    Cost:
        That of :func:`locate_rows` and O(N) time, no host sync.
    """
    located = locate_rows(rows.ids_U, space)
    lookups_by_row_N = rows.lookups_by_row_N
    lookups_U, lookups_by_row_N, _ = torch.ops.fbgemm.permute_1D_sparse_data(
        located.order_U.to(torch.int32),
        rows.lookups_U,
        lookups_by_row_N,
        None,
        lookups_by_row_N.numel(),
    )
    return RowPartition(
        located=located,
        row_of_lookup_N=located.position_U.index_select(0, rows.row_of_lookup_N),
        lookups_by_row_N=lookups_by_row_N,
        lookup_end_U=lookups_U.cumsum(0),
    )
