"""The linear id space: all tables of a route as one range of integers.

``linear_id = table_base + row``, with the tables of one pack side by side. The pack of a row, its
home rank and its row number there follow from the linear id by one binary search over blocks and
hot rows, so no step contains a Python loop over tables. Home ranks may store different numbers of
rows; empty blocks (fewer rows than ranks) are valid.

The conversion of rows to linear ids uses numpy on the CPU. Features are long segments of lookups,
and numpy repeats a number and finds a maximum in those many times faster: on one core, 4.4 million
lookups of 460 features take 155 ms with torch's operators and 15 ms with numpy.

Hot rows are the part of the space that a refresh may change. A hot row has a replica on every rank.
Its *slot* is its index among the linear ids of all hot rows, so the slots of one pack are
consecutive. A batch whose rows were located with one hot set must be served by replicas of the same
hot set; the *epoch* identifies the hot set.

Source: PICASSO (arXiv 2204.04903), D-Packing: one operator for many tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchrec_picasso.ops.streams import kept_by_stream

_WORD_BITS = 64
_SIGNED = {torch.int32: np.int32, torch.int64: np.int64}
_UNSIGNED = {torch.int32: np.uint32, torch.int64: np.uint64}


@dataclass(frozen=True, kw_only=True)
class PackedTable:
    """A table of a pack; ``route`` is the name of the route that it travels by."""

    name: str
    pack: int
    """Index of the pack that holds the table among the packs of its route; ascending."""
    dim: int
    """Columns, equal for all tables of a pack."""
    block_rows_W: tuple[int, ...]
    """Number of rows of the table that each home rank stores."""
    hot_rows_H: Tensor
    """Rows with a replica on every rank, ascending int64, shape ``(H_t,)``."""
    feature_names: tuple[str, ...]
    """Features that look up this table, in lookup order."""
    mean: bool = False
    """Whether bags are averaged instead of summed."""
    is_sequence: bool = False
    """Whether every lookup is a separate output, without pooling."""
    module: int = 0
    """Index of the module of the table, where several modules share an exchange; ascending."""
    wave: int = 0
    """Index of the wave in which the pack is exchanged; ascending with the packs, gaps allowed."""
    route: str = "rows"

    @property
    def num_embeddings(self) -> int:
        """Number of rows of the whole table."""
        return sum(self.block_rows_W)


@dataclass(frozen=True)
class IdSpace:
    """Home rank and row number of every linear id; built by :meth:`build` and immutable."""

    world_size: int
    num_packs: int
    num_rows: int
    """Rows of all tables together: linear ids are ``0 .. num_rows - 1``."""
    home_rows_PW: tuple[tuple[int, ...], ...]
    """Rows of each pack that each home rank stores."""
    feature_ids_F2: Tensor
    """First and last linear id of each feature's table, int64, shape ``(F, 2)``."""
    block_end_TW: Tensor
    """End of the linear ids of every (table, rank) block, ascending, int64, shape ``(T * W,)``."""
    block_pack_TW: Tensor
    """Pack of each block, int64."""
    block_rank_TW: Tensor
    """Home rank of each block, int64."""
    block_shift_TW: Tensor
    """Offset from a linear id to the row in the home rank's storage of the pack, int64."""

    @staticmethod
    def build(tables: Sequence[PackedTable], device: torch.device) -> IdSpace:
        """Assigns linear ids to one or more tables of one route, packs ascending."""
        world_size = len(tables[0].block_rows_W)
        packs = [table.pack for table in tables]
        assert packs == sorted(packs), "tables of one pack must be side by side"
        assert all(len(table.block_rows_W) == world_size for table in tables)
        bases = table_bases(tables)
        ends, shifts = [], []
        home_rows = [[0] * world_size for _ in range(packs[-1] + 1)]
        # A table is W consecutive blocks of linear ids, one per home rank. A home rank stores its
        # blocks of one pack one after the other, so a block's first row there is the number of rows
        # that the rank stored before; shift = first row - first linear id.
        for table, base in zip(tables, bases):
            start = base
            for rank, rows in enumerate(table.block_rows_W):
                shifts.append(home_rows[table.pack][rank] - start)
                home_rows[table.pack][rank] += rows
                start += rows
                ends.append(start)

        def ids(values: Sequence[Any]) -> Tensor:
            return torch.tensor(values, dtype=torch.int64, device=device)

        first_and_last = zip(tables, bases, (end - 1 for end in bases[1:]))
        return IdSpace(
            world_size=world_size,
            num_packs=len(home_rows),
            num_rows=bases[-1],
            home_rows_PW=tuple(map(tuple, home_rows)),
            feature_ids_F2=ids([both for t, *both in first_and_last for _ in t.feature_names]),
            block_end_TW=ids(ends),
            block_pack_TW=ids([pack for pack in packs for _ in range(world_size)]),
            block_rank_TW=ids([*range(world_size)] * len(tables)),
            block_shift_TW=ids(shifts),
        )

    def linearize(self, rows_N: Tensor, end_F: Tensor) -> tuple[Tensor, Tensor]:
        """Converts rows of tables to linear ids, as :func:`shift_rows`. Ids are int32 when the
        space allows, which halves the cost of sorting."""
        return shift_rows(rows_N, end_F, self.feature_ids_F2, self.id_dtype)

    def find_blocks(self, ids_n: Tensor) -> tuple[Tensor, Tensor]:
        """Finds the (table, home rank) block and the home row of linear ids, all int64. A home row
        is counted in the home rank's storage of the pack. O(n log(T W)) time, no host sync."""
        # As many blocks end at or below the id, empty ones too, as the index of the block with it.
        block_n = torch.searchsorted(self.block_end_TW, ids_n, right=True)
        return block_n, self.block_shift_TW.index_select(0, block_n).add_(ids_n)

    @property
    def id_dtype(self) -> torch.dtype:
        """The smallest integer type that holds every linear id."""
        return torch.int32 if self.num_rows < 2**31 else torch.int64


@dataclass(frozen=True)
class HotSlots:
    """The hot rows of the tables of one route."""

    ids_H: Tensor
    """Linear ids of the hot rows, ascending int64; the index is the hot slot."""
    start_P1: tuple[int, ...]
    """First hot slot of each pack; the last entry is the number of hot rows."""
    epoch: int = 0
    """Number of changes of the route's hot set."""

    @staticmethod
    def build(tables: Sequence[PackedTable], device: torch.device, epoch: int = 0) -> HotSlots:
        """Collects the hot rows of tables, given as for :meth:`IdSpace.build`, by linear id."""
        bases = table_bases(tables)
        hot_P = [0] * (tables[-1].pack + 1)
        for table in tables:
            hot_P[table.pack] += table.hot_rows_H.numel()
        ids = [table.hot_rows_H + base for table, base in zip(tables, bases)]
        ids_H = torch.cat([torch.empty(0, dtype=torch.int64), *ids])
        return HotSlots(ids_H.to(device), (0, *accumulate(hot_P)), epoch)

    @property
    def num_rows(self) -> int:
        """Number of hot rows of all tables, H."""
        return self.start_P1[-1]

    def find(self, ids_U: Tensor) -> tuple[Tensor, Tensor]:
        """Finds which linear ids, int64, are hot. Requires at least one hot row.

        Returns the slot of each hot row, int64, undefined for cold rows, and the mask of the hot
        rows, both of shape ``(U,)``, in O(U log H) time without a host sync.
        """
        slot_U = torch.searchsorted(self.ids_H, ids_U)
        # An id above all hot ids gets slot H; the clamp keeps the comparison below in bounds.
        candidate_U = slot_U.clamp(max=self.num_rows - 1)
        return slot_U, self.ids_H.index_select(0, candidate_U) == ids_U

    def by_pack(self, bits_X: np.ndarray) -> list[np.ndarray]:
        """Lists the hot slots whose bit is set in words of :func:`bits_to_words`, on the host.
        Slots of each pack ascend and are counted from 0 in the pack."""
        if not bits_X.size:
            return [np.empty(0, np.int64)] * (len(self.start_P1) - 1)
        slot_s = np.unpackbits(bits_X.view(np.uint8), bitorder="little").nonzero()[0]
        # slot_s ascends over all packs: find each pack's range, then count from 0 in the pack.
        edges_P1 = np.searchsorted(slot_s, self.start_P1).tolist()
        slot_s -= np.repeat(self.start_P1[:-1], np.diff(edges_P1))
        return [slot_s[first:end] for first, end in pairwise(edges_P1)]


def table_bases(tables: Sequence[PackedTable]) -> list[int]:
    """First linear id of each table, and the end of the last one."""
    return [0, *accumulate(table.num_embeddings for table in tables)]


def shift_rows(
    rows_N: Tensor, end_F: Tensor, numbers_F2: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Adds the first number of each feature's table to the rows of its lookups. No host sync.

    Args:
        rows_N: Row of each lookup in its table, any integer type, by feature.
        end_F: End of the lookups of each feature, integer, ascending; the last one is N.
        numbers_F2: Numbers of the first and of the last row of each feature's table, int64.
        dtype: Type of the result.

    Returns:
        Numbers, shape ``(N,)``, the nearest in the table for rows outside it, and the count of
        such rows, 0-d, in memory that must not be written.
    """
    if rows_N.device.type == "cpu" and rows_N.dtype in _UNSIGNED:
        rows, counts = rows_N.contiguous().numpy(), np.diff(end_F.numpy(), prepend=0)
        # As unsigned integers, negative rows become the largest numbers. reduceat takes the maximum
        # from each start to the next, so features without lookups are removed first: an empty range
        # would yield a wrong value.
        is_used = counts > 0
        starts = (np.cumsum(counts) - counts)[is_used]
        first_F, last_F = numbers_F2.numpy().T
        unsigned, largest = rows.view(_UNSIGNED[rows_N.dtype]), (last_F - first_F)[is_used]
        if not len(starts) or (np.maximum.reduceat(unsigned, starts) <= largest).all():
            # All rows are inside. Start from the feature's first number, shape (N,), and add the
            # rows in place; the sum fits into dtype, so the cast is safe.
            shifted = np.repeat(first_F.astype(_SIGNED[dtype]), counts)
            np.add(shifted, rows, out=shifted, casting="unsafe")
            return torch.from_numpy(shifted), zero(rows_N.device)
    # Other devices, other types, or rows outside their table: expand (F, 2) to (N, 2) and clamp. A
    # sum that overflows is negative, hence outside too.
    feature_N = segment_of(end_F, rows_N.numel())
    first_N, last_N = numbers_F2.index_select(0, feature_N).unbind(1)
    shifted_N = first_N + rows_N
    inside_N = torch.empty_like(shifted_N, dtype=dtype)
    torch.clamp(shifted_N, first_N, last_N, out=inside_N)
    return inside_N, (inside_N != shifted_N).sum()


def segment_of(end_J: Tensor, num: int) -> Tensor:
    """Returns the segment of each of ``num`` entries, int64, by the end of each one, ascending. Few
    long segments: a GPU's ``repeat_interleave`` fills each of them with a single warp."""
    return torch.searchsorted(end_J, counting(end_J.device, num, end_J.dtype), right=True)


def counting(device: torch.device, num: int, dtype: torch.dtype = torch.int64) -> Tensor:
    """Returns the integers ``0 .. num - 1`` in memory that must not be written."""
    # As few tensors as numbers have bits; together they are less than twice the largest one.
    return _kept_counting(device, 1 << num.bit_length(), dtype)[:num]


@partial(kept_by_stream, maxsize=None)
def _kept_counting(device: torch.device, num: int, dtype: torch.dtype) -> Tensor:
    return torch.arange(num, dtype=dtype, device=device)


zero = kept_by_stream(lambda device: torch.zeros((), dtype=torch.int64, device=device))
"""Returns 0, 0-d int64, on a device, in memory that must not be written."""

_bit_of_byte = kept_by_stream(lambda device: torch.arange(8, dtype=torch.uint8, device=device))


def flags_of(num: int, num_parts: int) -> int:
    """Returns the number of flags that fill as many words as ``num`` flags need, in equal parts."""
    return words_of(num, num_parts) * num_parts * _WORD_BITS


def words_of(num: int, num_parts: int) -> int:
    """Returns the number of words of 64 bits in each of some equal parts of ``num`` flags."""
    return -(-num // (_WORD_BITS * num_parts))


def parts_to_unite(num: int, num_ranks: int) -> int:
    """Returns the number of parts of ``num`` flags whose union over ranks is computed by one rank
    each, which gives it to all: one a rank, if these are fewer words than all flags to each rank;
    else 1, and each rank computes the whole union."""
    return num_ranks if 2 * words_of(num, num_ranks) < words_of(num, 1) else 1


no_words = kept_by_stream(lambda device: torch.empty(0, dtype=torch.int64, device=device))
"""Returns the words of no flags on a device."""


def bits_to_words(flags: Tensor) -> Tensor:
    """Packs flags, 0 or 1, uint8, into int64 words of 64 bits each, little-endian. Flags fill whole
    words."""
    if flags.device.type == "cpu":
        return torch.from_numpy(np.packbits(flags.numpy(), bitorder="little").view(np.int64))
    # As (bytes, 8 bits); a byte is the sum of its shifted bits.
    by_byte = flags.view(-1, 8) << _bit_of_byte(flags.device)
    return by_byte.sum(1, dtype=torch.uint8).view(torch.int64)
