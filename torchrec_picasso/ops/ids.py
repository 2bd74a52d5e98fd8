"""The packed id space: all tables of a sharded module as one range of integers.

``packed_id = table_base + row``, with the tables of one pack side by side. The pack of a row, its
home rank and its row number there follow from the packed id by one binary search over the ``T * W``
block starts, so no step contains a Python loop over tables. Home ranks may store different numbers
of rows; empty blocks (fewer rows than ranks) are valid.

Source: PICASSO (arXiv 2204.04903), D-Packing: one operator for many tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from torchrec_picasso.ops.shift_rows import shift_rows

__all__ = ["IdSpace", "PackedTable"]


@dataclass(frozen=True, kw_only=True)
class PackedTable:
    """A table in the packed id space.

    Args:
        name: Table name, for messages.
        pack: Index of the pack that holds the table among the packs of its route; ascending.
        dim: Columns, equal for all tables of a pack.
        wave: Index of the wave (pack group) that the pack is exchanged in; ascending with the
            packs, gaps allowed.
        block_rows_W: Rows of the table that each home rank stores, ``W`` numbers that sum to the
            rows of the table.
        hot_rows_H: Rows with a replica on every rank, ascending int64, shape ``(H_t,)``.
        feature_names: Features that look up this table, in lookup order.
        mean: Whether bags are averaged instead of summed.
        is_sequence: Whether every lookup is a separate output, without pooling.
        module: Index of the module that has the table, where several modules share an exchange;
            ascending.
        route: Name of the route that the table travels by.
    """

    name: str
    pack: int
    dim: int
    block_rows_W: tuple[int, ...]
    hot_rows_H: Tensor
    feature_names: tuple[str, ...]
    mean: bool = False
    is_sequence: bool = False
    module: int = 0
    wave: int = 0
    route: str = "rows"

    @property
    def num_embeddings(self) -> int:
        """Number of rows of the whole table."""
        return sum(self.block_rows_W)


@dataclass(frozen=True)
class IdSpace:
    """Home rank and row number of every packed id; built by :meth:`build` and immutable."""

    world_size: int
    num_packs: int
    num_rows: int
    """Rows of all tables together: packed ids are ``0 .. num_rows - 1``."""
    home_rows_PW: tuple[tuple[int, ...], ...]
    """Rows of each pack that each home rank stores."""
    feature_base_F: Tensor
    """First packed id of each feature's table, int64, shape ``(F,)``."""
    feature_rows_F: Tensor
    """Rows of each feature's table, int64, shape ``(F,)``."""
    block_start_TW: Tensor
    """First packed id of every (table, rank) block, ascending, int64, shape ``(T * W,)``."""
    block_pack_TW: Tensor
    """Pack of each block, int64."""
    block_rank_TW: Tensor
    """Home rank of each block, int64."""
    block_shift_TW: Tensor
    """Offset from a packed id to the row in the home rank's storage of the pack, int64."""

    @staticmethod
    def build(tables: Sequence[PackedTable], device: torch.device) -> IdSpace:
        """Assigns packed ids to tables in the given order.

        Args:
            tables: At least one table, all of one route and world size, packs ascending.
            device: Device of the lookup tensors.
        """
        world_size = len(tables[0].block_rows_W)
        packs = [table.pack for table in tables]
        assert packs == sorted(packs), "tables of one pack must be side by side"
        assert all(len(table.block_rows_W) == world_size for table in tables)
        bases = [0, *accumulate(table.num_embeddings for table in tables)]
        starts, shifts = [], []
        home_rows = [[0] * world_size for _ in range(packs[-1] + 1)]
        # A table is W consecutive blocks of packed ids, one per home rank. A home rank stores its
        # blocks of one pack one after the other, so a block's first row there is the number of rows
        # that the rank stored before; shift = first row - first packed id.
        for table, base in zip(tables, bases):
            start = base
            for rank, rows in enumerate(table.block_rows_W):
                starts.append(start)
                shifts.append(home_rows[table.pack][rank] - start)
                home_rows[table.pack][rank] += rows
                start += rows

        def ids(values: Sequence[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int64, device=device)

        per_feature = [(t, base) for t, base in zip(tables, bases) for _ in t.feature_names]
        return IdSpace(
            world_size=world_size,
            num_packs=len(home_rows),
            num_rows=bases[-1],
            home_rows_PW=tuple(map(tuple, home_rows)),
            feature_base_F=ids([base for _, base in per_feature]),
            feature_rows_F=ids([table.num_embeddings for table, _ in per_feature]),
            block_start_TW=ids(starts),
            block_pack_TW=ids([pack for pack in packs for _ in range(world_size)]),
            block_rank_TW=ids([*range(world_size)] * len(tables)),
            block_shift_TW=ids(shifts),
        )

    def pack_ids(self, rows_N: Tensor, lookups_F: Tensor) -> tuple[Tensor, Tensor]:
        """Converts rows of tables to packed ids.

        Args:
            rows_N: Row of each lookup in its table, any integer type, shape ``(N,)``, by feature.
            lookups_F: Number of lookups of each feature, int64, shape ``(F,)``, summing to N.

        Returns:
            Packed ids, shape ``(N,)`` (int32 when the space allows, which halves the cost of
            sorting), and the number of lookups whose row lies outside its table; these are packed
            as 0.

        Cost:
            O(N) time, no host sync.
        """
        base_F, limit_F = self.feature_base_F, self.feature_rows_F
        return shift_rows(rows_N, lookups_F, base_F, limit_F, self.id_dtype)

    def find_blocks(self, ids_n: Tensor) -> tuple[Tensor, Tensor]:
        """Finds the (table, home rank) block and the home row of packed ids.

        Args:
            ids_n: Packed ids, int64, shape ``(n,)``.

        Returns:
            The block of each id and the row in the home rank's storage of the pack, both int64,
            shape ``(n,)``.

        Cost:
            O(n log(T W)) time, no host sync.
        """
        # right=True skips empty blocks: the last block that starts at or below the id contains it.
        block_n = torch.searchsorted(self.block_start_TW, ids_n, right=True).sub_(1)
        return block_n, self.block_shift_TW.index_select(0, block_n).add_(ids_n)

    @property
    def home_row_dtype(self) -> torch.dtype:
        """The smallest integer type that holds every row number of every home rank."""
        largest = max(rows for rows_W in self.home_rows_PW for rows in rows_W)
        return torch.int32 if largest < 2**31 else torch.int64

    @property
    def id_dtype(self) -> torch.dtype:
        """The smallest integer type that holds every packed id."""
        return torch.int32 if self.num_rows < 2**31 else torch.int64
