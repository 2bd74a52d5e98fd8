"""The two orders of a batch's rows: requested and fetched.

In *request order* rows are requested from their home ranks and gradients are sent: by pack, hot
rows first, then cold rows by chunk and by home rank. Rows ascend within a (pack, chunk, home rank)
segment, so home ranks read their storage forward. Chunk j holds the rows that micro-batch j is the
first to use. Forward of micro-batch j therefore needs the chunks up to j. Backward runs from the
last micro-batch to the first, so the gradients of chunk j are complete right after micro-batch j.
Every row is still sent once.

In *fetch order* the cold rows of a pack are sent to the rank that requested them. Rows that the
batch before does not update are *clean* and may be fetched while that batch computes; the others
are *dirty* and wait for its update. All clean rows come first, by rank: one exchange sends them a
step ahead. The dirty rows follow by chunk, then by rank, an exchange per chunk, because the first
micro-batch waits for the first chunk only. So each exchange fills one slice of a matrix. The
requesting rank and the home rank compute the same order, because both have the same counts and the
same dirty mask.

Shape letters: E exchanges (in request order as many as chunks, in fetch order one more), H hot
rows, K micro-batches and chunks, N lookups, P packs, Q segments of a pack, U unique rows, W ranks;
n rows.

Source: PICASSO (arXiv 2204.04903), Unique&Partition.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from torchrec_picasso.ops.ids import HotSlots, IdSpace
from torchrec_picasso.ops.order import UniqueRows, stable_order

CLEAN = 0
"""Number of the exchange of all clean rows in fetch order."""


def dirty_exchange(chunk: int) -> int:
    """Returns the number in fetch order of the exchange of a chunk's dirty rows."""
    return 1 + chunk


@dataclass(frozen=True)
class LocatedRows:
    """The unique rows of a batch in request order."""

    target_U: Tensor
    """Where each row is stored, int64: hot slot, or row in the home rank's storage of the pack."""
    counts_PQ: Tensor
    """Number of rows by pack and segment (replicas, then home ranks by chunk), Q = 1 + K W."""
    order_U: Tensor
    """Index among the ascending ids of each row in request order, int64."""
    position_U: Tensor
    """Inverse of ``order_U``: request position of each ascending id, int64."""
    is_used_H: Tensor
    """Whether this rank's batch uses a hot slot, bool."""


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
    is_used_H1 = torch.zeros(hot.num_rows + 1, dtype=torch.bool, device=ids_U.device)
    if hot.num_rows:
        slot_U, is_hot_U = hot.find(ids_U)
        segment_U = torch.where(is_hot_U, replicas_TW.index_select(0, block_U), segment_U)
        target_U = torch.where(is_hot_U, slot_U, target_U)
        is_used_H1[torch.where(is_hot_U, slot_U, hot.num_rows)] = True
    # Rows ascend within a segment because tables of one pack are side by side and ascend at each
    # home rank; the sort by segment must therefore be stable.
    order_U, counts = _sort_by_segment(segment_U, space.num_packs * per_pack)
    # Inverse permutation of order_U.
    position_U = torch.empty_like(order_U)
    position_U.scatter_(0, order_U, torch.arange(order_U.numel(), device=order_U.device))
    return LocatedRows(
        target_U=target_U.index_select(0, order_U),
        counts_PQ=counts.view(space.num_packs, per_pack),
        order_U=order_U,
        position_U=position_U,
        is_used_H=is_used_H1[:-1],
    )


@dataclass(frozen=True)
class ExchangeSplits:
    """The split of one pack's rows into consecutive exchanges, and of each exchange by rank."""

    counts_EW: list[list[int]]
    """Number of rows, on the host."""

    @cached_property
    def edges(self) -> list[int]:
        """First row of each exchange, and the number of rows."""
        return [0, *accumulate(map(sum, self.counts_EW))]

    @property
    def num_rows(self) -> int:
        """Number of rows of all exchanges."""
        return self.edges[-1]

    def rows(self, exchange: int) -> slice:
        """Position of the rows of one exchange."""
        return slice(self.edges[exchange], self.edges[exchange + 1])


@dataclass(frozen=True)
class FetchOrder(ExchangeSplits):
    """The fetch order of one pack's rows, and its split into exchanges."""

    order_n: Tensor | None
    """Position in request order of each row in fetch order, int64; ``None`` = equal orders."""

    def arrange(self, values_n: Tensor) -> Tensor:
        """Puts values from request order into fetch order."""
        return values_n if self.order_n is None else values_n.index_select(0, self.order_n)


def find_fetch_order(counts_KW: list[list[int]], dirty_n: Tensor | None) -> FetchOrder:
    """Computes the fetch order of rows from a dirty mask in request order; ``None`` = all dirty.

    Costs one stable sort of n small integers and a host sync on CUDA; nothing without a mask.
    """
    num_chunks, world_size = len(counts_KW), len(counts_KW[0])
    if dirty_n is None:
        return FetchOrder([[0] * world_size, *counts_KW], order_n=None)
    # pair_n, shape (n,): the number chunk * W + rank of each row in request order. output_size is
    # known, so repeat_interleave does not sync the host.
    requested = torch.tensor(counts_KW).view(-1).to(dirty_n.device, non_blocking=True)
    pairs = torch.arange(requested.numel(), device=dirty_n.device)  # (chunk, rank)
    pair_n = torch.repeat_interleave(pairs, requested, output_size=dirty_n.numel())
    # segment_n, shape (n,): the number exchange * W + rank. A dirty row of chunk k belongs to
    # exchange 1 + k. A clean row of any chunk belongs to exchange 0, hence "pair modulo W".
    segment_n = torch.where(dirty_n, pair_n + world_size, pair_n % world_size)  # (exchange, rank)
    order_n, counts = _sort_by_segment(segment_n, (1 + num_chunks) * world_size)
    return FetchOrder(counts.view(-1, world_size).tolist(), order_n)


def fetch_positions(located: LocatedRows, packs: Sequence[tuple[Tensor, FetchOrder]]) -> Tensor:
    """Computes the position of each unique row, by ascending id, among the fetched rows: int64.

    Positions are consecutive over packs. In each pack the hot rows, by slot, come first, then the
    cold rows in fetch order.
    """
    if all(cold.order_n is None for _, cold in packs):
        return located.position_U
    positions, start = [], 0
    # Fetch position of each row in request order, shape (U,). Hot rows are read locally and keep
    # their order.
    for slots_h, cold in packs:
        first_cold = start + slots_h.numel()
        positions.append(torch.arange(start, first_cold, device=slots_h.device))
        start = first_cold + cold.num_rows
        in_order = torch.arange(first_cold, start, device=slots_h.device)
        if cold.order_n is not None:
            # Inverse permutation: scatter the new position i to the old position order_n[i].
            in_order = torch.empty_like(in_order).scatter_(0, cold.order_n, in_order)
        positions.append(in_order)
    # From request order to ascending id.
    return torch.cat(positions).index_select(0, located.position_U)


def _sort_by_segment(segment_n: Tensor, num_segments: int) -> tuple[Tensor, Tensor]:
    """Sorts rows stably by segment; returns their order and the count of each segment, int64."""
    order_n = stable_order(segment_n, num_segments)
    # Differences of the segments' edges in the sorted segments; bincount would sync the host.
    edges = torch.arange(num_segments + 1, device=segment_n.device)
    return order_n, torch.diff(torch.searchsorted(segment_n.index_select(0, order_n), edges))
