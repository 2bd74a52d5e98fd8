"""The packed id space: all tables of a sharded module behind one range of integers.

``packed_id = table_base + row``, with tables of one pack side by side. Everything a lookup needs
to know of its row - which pack, which home rank, which row there, hot or cold - follows from its
packed id by one binary search over the ``T * W`` block starts and one over the hot ids, so no step
grows with a Python loop over tables. Homes may be uneven; empty blocks (fewer rows than ranks) are
ordinary.

Source: PICASSO (arXiv 2204.04903), D-Packing: one operator for many tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby

import torch
from torch import Tensor

__all__ = ["PackedIdSpace", "PackedTable"]


@dataclass(frozen=True, kw_only=True)
class PackedTable:
    """One table as the packed id space sees it.

    Args:
        name: Table name, for messages.
        pack: Index of the pack that holds the table; tables come in ascending pack order.
        dim: Columns, the same for all tables of a pack.
        wave: Which wave the pack travels in; ascending with the packs, gaps allowed.
        block_rows_W: Rows of the table at home on each rank, ``W`` numbers that sum to the table's.
        hot_rows_H: Rows with a replica on every rank, ascending int64, shape ``(H_t,)``.
        feature_names: Features that look up this table, in lookup order.
        mean: Whether bags are averaged instead of summed.
    """

    name: str
    pack: int
    dim: int
    block_rows_W: tuple[int, ...]
    hot_rows_H: Tensor
    feature_names: tuple[str, ...]
    mean: bool = False
    wave: int = 0

    @property
    def num_embeddings(self) -> int:
        """Rows of the whole table."""
        return sum(self.block_rows_W)


@dataclass(frozen=True)
class PackedIdSpace:
    """Where every packed id lives; built once by :meth:`build`, then only read.

    ``bucket`` numbers the places a row can be served from, in request order: pack by pack, first
    the replicas (bucket ``pack * (1 + W)``), then home rank 0, 1, ...
    """

    tables: tuple[PackedTable, ...]
    world_size: int
    num_packs: int
    num_rows: int
    """Rows of all tables together: packed ids are ``0 .. num_rows - 1``."""
    home_rows_PW: tuple[tuple[int, ...], ...]
    """Home rows of each pack on each rank."""
    hot_start_P1: tuple[int, ...]
    """First hot slot of each pack, and the number of hot rows at the end."""
    waves: tuple[slice, ...]
    """The packs of each wave."""
    matrices: tuple[slice, ...]
    """The packs of each matrix: neighbours of one dim are fetched into one and pooled as one."""
    features_M: tuple[int, ...]
    """Number of features of each matrix."""
    mean_F: tuple[bool, ...]
    """Whether each feature's bags are averaged."""
    feature_base_F: Tensor
    feature_rows_F: Tensor
    block_start_TW: Tensor
    """First packed id of every (table, rank) block, ascending, int64, shape ``(T * W,)``."""
    block_bucket_TW: Tensor
    block_shift_TW: Tensor
    """What to add to a packed id to get its row in the home rank's storage of the pack."""
    hot_ids_H: Tensor
    """Packed ids of the hot rows, ascending, int64, shape ``(H,)``; its index is the hot slot."""

    @staticmethod
    def build(tables: Sequence[PackedTable], device: torch.device) -> PackedIdSpace:
        """Lays the tables out in the order given.

        Args:
            tables: Tables of one sharded module, packs ascending, all with the same world size.
            device: Where the lookup tensors go.
        """
        world_size = len(tables[0].block_rows_W)
        num_packs = tables[-1].pack + 1
        packs, waves = [t.pack for t in tables], [t.wave for t in tables]
        assert packs == sorted(packs), "tables of one pack must be side by side"
        assert waves == sorted(waves), "packs of one wave must be side by side"
        assert all(len(t.block_rows_W) == world_size for t in tables)
        bases = [0, *accumulate(t.num_embeddings for t in tables)]
        starts, buckets, shifts = [], [], []
        home_rows = [[0] * world_size for _ in range(num_packs)]
        for table, base in zip(tables, bases):
            start = base
            for rank, rows in enumerate(table.block_rows_W):
                starts.append(start)
                buckets.append(table.pack * (1 + world_size) + 1 + rank)
                shifts.append(home_rows[table.pack][rank] - start)
                home_rows[table.pack][rank] += rows
                start += rows
        hot_counts = [0] * num_packs
        for table in tables:
            hot_counts[table.pack] += table.hot_rows_H.numel()

        def ids(values: Sequence[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int64, device=device)

        matrices = _runs([(t.pack, t.dim) for t in tables])
        per_feature = [(t, base) for t, base in zip(tables, bases) for _ in t.feature_names]
        return PackedIdSpace(
            tables=tuple(tables),
            world_size=world_size,
            num_packs=num_packs,
            num_rows=bases[-1],
            home_rows_PW=tuple(map(tuple, home_rows)),
            hot_start_P1=(0, *accumulate(hot_counts)),
            waves=_runs([(t.pack, t.wave) for t in tables]),
            matrices=matrices,
            features_M=tuple(
                sum(len(t.feature_names) for t in tables if packs.start <= t.pack < packs.stop)
                for packs in matrices
            ),
            mean_F=tuple(table.mean for table, _ in per_feature),
            feature_base_F=ids([base for _, base in per_feature]),
            feature_rows_F=ids([t.num_embeddings for t, _ in per_feature]),
            block_start_TW=ids(starts),
            block_bucket_TW=ids(buckets),
            block_shift_TW=ids(shifts),
            hot_ids_H=torch.cat([t.hot_rows_H + base for t, base in zip(tables, bases)]).to(device),
        )

    @property
    def num_hot_rows(self) -> int:
        """Hot rows of all tables together."""
        return self.hot_start_P1[-1]

    def pack_ids(self, rows_N: Tensor, lookups_F: Tensor) -> tuple[Tensor, Tensor]:
        """Turns rows of tables into packed ids.

        Args:
            rows_N: Row of its table for each lookup, any integer type, shape ``(N,)``, feature by
                feature.
            lookups_F: Number of lookups of each feature, int64, shape ``(F,)``, summing to N.

        Returns:
            Packed ids ``(N,)`` (int32 when the space allows: sorting is half the work) and a mask
            ``(N,)`` of lookups whose row lies outside the table.

        Cost:
            O(N) time, no host sync.
        """
        num_lookups = rows_N.numel()
        base_N = torch.repeat_interleave(self.feature_base_F, lookups_F, output_size=num_lookups)
        limit_N = torch.repeat_interleave(self.feature_rows_F, lookups_F, output_size=num_lookups)
        outside_N = (rows_N < 0) | (rows_N >= limit_N)
        packed_N = base_N.add_(rows_N).masked_fill_(outside_N, 0)
        return packed_N.to(self.id_dtype), outside_N

    @property
    def home_row_dtype(self) -> torch.dtype:
        """The smallest integer type that holds every row of every home."""
        largest = max(rows for rows_W in self.home_rows_PW for rows in rows_W)
        return torch.int32 if largest < 2**31 else torch.int64

    @property
    def id_dtype(self) -> torch.dtype:
        """The smallest integer type that holds every packed id."""
        return torch.int32 if self.num_rows < 2**31 else torch.int64


def _runs(of_tables: Sequence[tuple[int, int]]) -> tuple[slice, ...]:
    """Neighbouring packs with something in common, from (pack, what) of every table."""
    what_P = [what for _, what in sorted(set(of_tables))]
    assert len(what_P) == len({pack for pack, _ in of_tables}), "a pack has one dim and one wave"
    ends = [*accumulate(len(list(run)) for _, run in groupby(what_P))]
    return tuple(map(slice, [0, *ends], ends))
