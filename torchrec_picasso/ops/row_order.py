"""Sorts of a batch's rows: unique rows by one sort, their request order and their fetch order.

One sort of a batch's ids gives the distinct ids, the row of every lookup (forward gather) and the
lookups of every row (backward reduction). ``torch.unique`` sorts too but discards the second map,
and backward then needs another sort or scattered adds: on one core, 106,496 Criteo lookups of D=128
took 24 ms by ``index_add_`` and 10 ms by the gather over this map.

In *request order* rows are requested from their home ranks and gradients are sent: by pack, hot
rows first, then cold rows by chunk and by home rank. Rows ascend within a (pack, chunk, home rank)
segment, so home ranks read their storage forward. Chunk k holds the rows that micro-batch k is the
first to use. Forward of micro-batch k therefore needs the chunks up to k. Backward runs from the
last micro-batch to the first, so the gradients of chunk k are complete right after micro-batch k.
Every row is still sent once.

In *fetch order* the cold rows of a pack are sent to the rank that requested them. Rows that the
batch before does not update are *clean* and may be fetched while that batch computes; the others
are *dirty* and wait for its update. All clean rows come first, by rank: one exchange sends them a
step ahead. The dirty rows follow by chunk, then by rank, an exchange per chunk, because the first
micro-batch waits for the first chunk only. So each exchange fills one slice of a matrix. The
requesting rank and the home rank compute the same order, because both have the same counts and the
same dirty mask.

Shape letters: E exchanges (in request order as many as chunks, in fetch order one more), H hot
rows, K micro-batches and chunks, N lookups, P packs, Q segments of a pack, R ranges of ids, U
unique rows, W ranks; n rows.

Source: PICASSO (arXiv 2204.04903), Unique&Partition.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, chain

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from torchrec_picasso.ops.ids import (
    HotSlots,
    IdSpace,
    bits_to_words,
    counting,
    flags_of,
    no_words,
    parts_to_unite,
    segment_of,
)
from torchrec_picasso.ops.sorts import (
    key_type,
    positions_of,
    small_keys,
    sort_by_segment,
    sort_with_tags,
)
from torchrec_picasso.ops.streams import kept_by_stream


@dataclass(frozen=True)
class UniqueRows:
    """Distinct ids of a batch and the maps between lookups and rows.

    On an accelerator the host does not know U before the header, so U is N there: behind the
    distinct ids, the largest integer stands for rows without lookups.
    """

    ids_U: Tensor
    """Distinct ids, ascending, in the input's type."""
    row_of_lookup_N: Tensor
    """Index into ``ids_U`` of each lookup, int64."""
    lookups_by_row_N: Tensor
    """Lookups grouped by row: a permutation of ``0..N-1``, int64."""
    counts: Tensor
    """Number of lookups of each row, int64."""
    edges_U1: Tensor | None = None
    """First entry of each row in ``lookups_by_row_N``, and N, int64; ``None`` = not computed."""


def unique_rows(ids_N: Tensor) -> UniqueRows:
    """Finds the distinct ids of a batch: int32 or int64, none below 0, possibly no ids at all.

    Costs one sort of N, no host sync.
    """
    sorted_N, lookups_by_row_N = sort_with_tags(ids_N)
    # row_N: index of the row for each lookup in sorted order, shape (N,). The scatter moves it back
    # to the input order of the lookups.
    edges_U1 = None
    if sorted_N.device.type == "cpu":
        ids_U, row_N, counts_U = torch.unique_consecutive(
            sorted_N, return_inverse=True, return_counts=True
        )
    else:
        row_N, edges_U1 = _runs(sorted_N)
        counts_U = torch.diff(edges_U1)
        ids_U = torch.full_like(sorted_N, torch.iinfo(sorted_N.dtype).max)
        ids_U.scatter_(0, row_N, sorted_N)
    row_of_lookup_N = torch.empty_like(row_N).scatter_(0, lookups_by_row_N, row_N)
    return UniqueRows(ids_U, row_of_lookup_N, lookups_by_row_N, counts_U, edges_U1)


def _runs(sorted_N: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the run of equal values of each entry, ``(N,)``, and the first entry of each run, and
    N, ``(N + 1,)``, both int64; entries behind the last run are N. No host sync."""
    run_N = torch.zeros_like(sorted_N, dtype=torch.int64)
    torch.ne(sorted_N[1:], sorted_N[:-1], out=run_N[1:])
    run_N.cumsum_(0)
    return run_N, torch.searchsorted(run_N, counting(run_N.device, run_N.numel() + 1))


CLEAN, FIRST_DIRTY = 0, 1
"""Index in fetch order of the exchange of all clean rows, and of that of chunk 0's dirty rows."""


@dataclass(frozen=True)
class RowRanges:
    """Where the row of every linear id is stored: replica or home row. Built by :meth:`build`.

    A hot row, and the cold rows of a block between two hot rows, are a *range* of linear ids with
    one offset to where they are stored, so one search among R ranges, at most T W + 2 H, finds it.
    A range takes 18 bytes, and one for each further chunk.
    """

    world_size: int
    num_packs: int
    num_hot_rows: int
    end_R: Tensor
    """End of the linear ids of each range, ascending, in the type of linear ids."""
    shift_R: Tensor
    """Offset from a linear id to its hot slot, or to its row in the home rank's storage of the
    pack, in the type of linear ids. Like the next two, it has one entry more, for rows without
    lookups (:class:`UniqueRows`)."""
    flag_R: Tensor
    """Hot slot, int64; ``num_flags`` for cold rows."""
    segment_R: Tensor
    """Segment of request order with one chunk, small integers."""

    @property
    def num_parts(self) -> int:
        """Number of parts of the flags of hot slots, as :func:`.parts_to_unite`."""
        return parts_to_unite(self.num_hot_rows, self.world_size)

    @property
    def num_flags(self) -> int:
        """Number of flags of hot slots, in whole words."""
        return flags_of(self.num_hot_rows, self.num_parts)

    @staticmethod
    def build(space: IdSpace, hot: HotSlots) -> RowRanges:
        """Splits the linear ids into ranges; syncs the host on CUDA."""
        end_R = torch.cat([space.block_end_TW, hot.ids_H, hot.ids_H + 1]).unique()
        # The first range is empty where it ends at 0.
        start_R = torch.cat([end_R.new_zeros(1), end_R[:-1]])
        block_R, stored_R = space.find_blocks(start_R)
        # Each pack has 1 + K W segments: the replicas, then the home ranks of chunk 0, of chunk 1,
        # ... So segment = pack * (1 + K W) + 1 + chunk * W + home rank, and pack * (1 + K W) alone
        # for a hot row.
        per_pack = 1 + space.world_size
        replicas_R = space.block_pack_TW[block_R] * per_pack
        segment_R = replicas_R + 1 + space.block_rank_TW[block_R]
        num_flags = flags_of(hot.num_rows, parts_to_unite(hot.num_rows, space.world_size))
        flag_R = torch.full_like(start_R, num_flags)
        if hot.num_rows:
            slot_R, is_hot_R = hot.find(start_R)
            stored_R, flag_R = (torch.where(is_hot_R, slot_R, cold) for cold in (stored_R, flag_R))
            segment_R = torch.where(is_hot_R, replicas_R, segment_R)
        num_segments = space.num_packs * per_pack
        return RowRanges(
            world_size=space.world_size,
            num_packs=space.num_packs,
            num_hot_rows=hot.num_rows,
            end_R=end_R.to(space.id_dtype),
            shift_R=pad(stored_R - start_R, (0, 1)).to(space.id_dtype),
            flag_R=pad(flag_R, (0, 1), value=num_flags),
            # behind all segments: not counted
            segment_R=small_keys(pad(segment_R, (0, 1), value=num_segments), num_segments),
        )

    @cached_property
    def segments(self) -> Callable[[torch.device, int], Tensor]:
        """The segment of request order of each range and chunk, ``(R K,)``, by device and K."""
        return kept_by_stream(self._segments)

    def _segments(self, device: torch.device, num_chunks: int) -> Tensor:
        segment_R1 = self.segment_R.to(torch.int64).unsqueeze(1)
        pack_R1 = segment_R1.div(1 + self.world_size, rounding_mode="floor")
        is_cold_R1 = segment_R1 % (1 + self.world_size) > 0
        # A count with one chunk misses K - 1 chunks of each earlier pack, and k of its own.
        chunk_K = torch.arange(num_chunks, device=device)
        chunks_RK = pack_R1 * (num_chunks - 1) + is_cold_R1 * chunk_K
        segment_RK = segment_R1 + chunks_RK * self.world_size
        return small_keys(segment_RK.flatten(), self.num_packs * (1 + num_chunks * self.world_size))


@dataclass(frozen=True)
class LocatedRows:
    """The unique rows of a batch in request order."""

    storage_row_U: Tensor
    """Where each row, in request order, is stored: hot slot, or row in the home rank's storage of
    the pack, in the type of linear ids."""
    counts_PQ: Tensor
    """Number of rows by pack and segment (replicas, then home ranks by chunk), Q = 1 + K W."""
    order_U: Tensor
    """Index among the ascending ids of each row in request order, int64."""
    used_bits_X: Tensor
    """Whether this rank's batch uses each hot slot, a bit each, as :func:`.bits_to_words`."""

    @cached_property
    def request_positions(self) -> Tensor:
        """Inverse of ``order_U``: request position of each ascending id, int64, ``(U,)``."""
        return positions_of(self.order_U)

    def first(self, num_rows: int) -> LocatedRows:
        """Drops rows without lookups (:class:`UniqueRows`)."""
        if num_rows == self.order_U.numel():
            return self
        stored_U, order_U = self.storage_row_U[:num_rows], self.order_U[:num_rows]
        return replace(self, storage_row_U=stored_U, order_U=order_U)


def first_use_chunks(rows: UniqueRows, micro_batch_N: Tensor, num_micro_batches: int) -> Tensor:
    """Computes the chunk of every row: the first micro-batch that looks the row up. Micro-batches
    and chunks are integers of one type."""
    # Minimum of the micro-batch over the lookups of each row, starting from the largest value.
    chunk_U = torch.full_like(rows.ids_U, num_micro_batches - 1, dtype=micro_batch_N.dtype)
    return chunk_U.scatter_reduce_(0, rows.row_of_lookup_N, micro_batch_N, "amin")


def locate_rows(
    ids_U: Tensor, ranges: RowRanges, chunk_U: Tensor | None = None, num_chunks: int = 1
) -> LocatedRows:
    """Puts distinct rows, ascending, in request order; without ``chunk_U`` all are in chunk 0.
    O(U log(T W + H)) time, no host sync."""
    range_U = torch.searchsorted(ranges.end_R, ids_U, right=True)
    storage_row_U = ranges.shift_R.index_select(0, range_U).add_(ids_U)
    # One flag more than words have bits: all cold rows write to it.
    num_flags = ranges.num_flags
    used_bits_X = no_words(ids_U.device)
    if num_flags:
        is_used = torch.zeros(num_flags + 1, dtype=torch.uint8, device=ids_U.device)
        is_used.index_fill_(0, ranges.flag_R.index_select(0, range_U), 1)
        used_bits_X = bits_to_words(is_used[:num_flags])
    # ranges by chunk: entry = range * K + chunk
    entry_U = range_U if chunk_U is None else torch.add(chunk_U, range_U, alpha=num_chunks)
    segment_U = ranges.segments(ids_U.device, num_chunks).index_select(0, entry_U)
    # Rows ascend within a segment because tables of one pack are side by side and ascend at each
    # home rank; the sort by segment must therefore be stable.
    per_pack = 1 + num_chunks * ranges.world_size
    order_U, counts = sort_by_segment(segment_U, ranges.num_packs * per_pack)
    return LocatedRows(
        storage_row_U=storage_row_U.index_select(0, order_U),
        counts_PQ=counts.view(ranges.num_packs, per_pack),
        order_U=order_U,
        used_bits_X=used_bits_X,
    )


@dataclass(frozen=True)
class ExchangeSplits:
    """The split of one pack's rows into consecutive exchanges, and of each exchange by rank."""

    counts_EW: list[list[int]]
    """Number of rows, on the host."""

    @property
    def sizes(self) -> list[int]:
        """Number of rows of each exchange."""
        return list(map(sum, self.counts_EW))

    @property
    def by_rank(self) -> list[int]:
        """Number of rows of each rank, exchange after exchange."""
        return list(chain.from_iterable(self.counts_EW))

    @cached_property
    def edges(self) -> list[int]:
        """First row of each exchange, and the number of rows."""
        return [0, *accumulate(self.sizes)]

    @property
    def num_rows(self) -> int:
        """Number of rows of all exchanges."""
        return self.edges[-1]

    def slice_of(self, exchange: int) -> slice:
        """Position of the rows of one exchange."""
        return slice(self.edges[exchange], self.edges[exchange + 1])


def all_dirty(counts_KW: list[list[int]]) -> ExchangeSplits:
    """The split in fetch order of rows that are all dirty: that of request order."""
    return ExchangeSplits([[0] * len(counts_KW[0]), *counts_KW])


def by_pack(values_n: Tensor, rows_P: Sequence[ExchangeSplits]) -> tuple[Tensor, ...]:
    """Splits one value per row of all packs into the packs; views."""
    if len(rows_P) == 1:
        return (values_n,)
    return values_n.split([rows.num_rows for rows in rows_P])


@dataclass(frozen=True, kw_only=True)
class FetchOrders:
    """Fetch orders of wanted and served rows; an order ``None`` = the request order."""

    wanted_P: Sequence[ExchangeSplits]
    wanted_order_n: Tensor | None
    """Position in request order of each wanted row in fetch order, over all packs, int64."""
    served_P: Sequence[ExchangeSplits]
    served_order_n: Tensor | None
    host_numbers: np.ndarray | None
    """The numbers that :meth:`find` copied to the host, int64."""

    @staticmethod
    def find(
        wanted_P: Sequence[ExchangeSplits],
        served_P: Sequence[ExchangeSplits],
        dirty_n: Tensor | None,
        host_numbers: Tensor | None,
    ) -> FetchOrders:
        """Computes the orders of wanted and of served rows from those of requests.

        ``dirty_n`` marks wanted rows, then served ones, uint8, 0 or 1; ``None`` = all are dirty.
        Costs one stable sort of small integers and a host sync on CUDA, in which the int64 numbers
        ``host_numbers`` come to the host too.
        """
        counts = [rows.counts_EW for rows in (*wanted_P, *served_P)]
        num_packs = len(wanted_P)
        wanted_order_n = served_order_n = None
        if dirty_n is not None:
            segment_n, shape = _fetch_segments(np.array(counts), dirty_n)
            order_n, found = sort_by_segment(segment_n, math.prod(shape))
            if host_numbers is not None:  # one copy syncs the host
                both = torch.cat([found, host_numbers]).cpu()
                found, host_numbers = both.tensor_split([found.numel()])
            by_fetch = [ExchangeSplits(each) for each in found.view(shape).tolist()]
            # Wanted rows are the first of the order, so served rows count from their number.
            num_wanted = sum(rows.num_rows for rows in wanted_P)
            wanted_order_n, served_order_n = order_n[:num_wanted], order_n[num_wanted:] - num_wanted
        else:
            by_fetch = [all_dirty(counts_KW) for counts_KW in counts]
        return FetchOrders(
            wanted_P=by_fetch[:num_packs],
            wanted_order_n=wanted_order_n,
            served_P=by_fetch[num_packs:],
            served_order_n=served_order_n,
            host_numbers=None if host_numbers is None else host_numbers.cpu().numpy(),
        )


def _fetch_segments(requested: np.ndarray, dirty_n: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """Finds the segment of fetch order (list, exchange, rank) of each row: a dirty row of chunk k
    belongs to exchange 1 + k, a clean row of any chunk to 0.

    ``requested`` are numbers of rows in segments of request order (list, chunk, rank). Returns the
    segments, and their numbers of lists, exchanges and ranks.
    """
    num_lists, num_chunks, world_size = requested.shape
    num_segments, shape = requested.size, (num_lists, 1 + num_chunks, world_size)
    fetched = np.arange(math.prod(shape)).reshape(shape)
    clean = np.broadcast_to(fetched[:, :1], requested.shape)
    if dirty_n.device.type == "cpu":
        dtype, counts = key_type(math.prod(shape)), requested.ravel()
        # the segment of each row, were it clean, and were it dirty
        both = (np.repeat(a.astype(dtype).ravel(), counts) for a in (clean, fetched[:, 1:]))
        return torch.from_numpy(np.where(dirty_n.numpy() == 0, *both)), shape
    # One copy to the device: the end of each segment of request order, then by segment that of its
    # clean rows in fetch order, then that of its dirty rows.
    numbers = np.concatenate([requested.cumsum(), clean.ravel(), fetched[:, 1:].ravel()])
    on_device = torch.from_numpy(numbers).to(dirty_n.device, non_blocking=True)
    segment_n = segment_of(on_device[:num_segments], dirty_n.numel())
    # The entry of a row in the two tables is its segment, plus their length if the row is dirty.
    entry_n = segment_n.add_(dirty_n, alpha=num_segments)
    return on_device[num_segments:].index_select(0, entry_n), shape


def fetch_positions(
    located: LocatedRows, order_n: Tensor | None, hot_cold_P: Sequence[tuple[int, int]]
) -> Tensor:
    """Computes the position of each unique row, by ascending id, among the fetched rows: int64.

    Positions are consecutive over packs, of which ``hot_cold_P`` are the numbers of hot and of cold
    rows. In each pack the hot rows, by slot, come first, then the cold rows in fetch order;
    ``order_n`` is that of the cold rows, pack after pack, as in :class:`FetchOrders`.
    """
    if order_n is None:
        return located.request_positions
    if any(hot for hot, _ in hot_cold_P):
        hot_P, cold_P = zip(*hot_cold_P)
        # Hot rows are read locally and keep their place, which moves the cold rows behind them.
        counting_U = counting(order_n.device, located.order_U.numel())
        kept_P = counting_U.split([num for both in hot_cold_P for num in both])[::2]
        moved_P = torch._foreach_add(order_n.split(cold_P), [*accumulate(hot_P)])
        order_n = torch.cat([part for both in zip(kept_P, moved_P) for part in both])
    # The ascending id of each row in fetch order, shape (U,), then the inverse.
    return positions_of(located.order_U.index_select(0, order_n))
