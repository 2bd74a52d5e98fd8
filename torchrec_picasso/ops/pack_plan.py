"""The packs that are exchanged together (waves) and the packs that are pooled together (matrices).

A pack corresponds to one FBGEMM table: tables of one dim, compute kernel, form and wave. Packs of
one *wave* share an exchange where a schedule staggers waves. The received vectors of a pack, rows
or owner-pooled bags, are stored in a *matrix* of its dim. Neighbouring row packs of one module and
dim share a matrix, and one operator pools it, or gathers from it where tables are looked up as
sequences.

Owner-pooled packs come after all row packs, in waves of their own. Pooled bags are never fetched
ahead, so at the boundary between two steps only the update of other packs can hide their exchange.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import Any

import torch
from torch import Tensor

from torchrec_picasso.ops.bag_pack import BagPack
from torchrec_picasso.ops.ids import PackedTable

__all__ = ["MOST_BAG_WAVES", "PackPlan"]

MOST_BAG_WAVES = 4
"""Upper bound of waves of owner-pooled packs: more waves send more messages and hide less."""


@dataclass(frozen=True)
class PackPlan:
    """How the packs of a sharded module, or of several modules, are exchanged and pooled."""

    waves: tuple[slice, ...]
    """The packs of each wave."""
    matrices: tuple[slice, ...]
    """The packs of each matrix."""
    dim_M: tuple[int, ...]
    """Columns of each matrix."""
    features_M: tuple[int, ...]
    """Number of features of each matrix."""
    mean_MF: tuple[Tensor | None, ...]
    """Whether a feature is averaged, bool, by matrix; ``None`` = none, or the home rank
    averages."""
    modules: tuple[tuple[int, ...], ...]
    """The matrices of each module, in the order of the module's columns."""
    is_sequence_M: tuple[bool, ...]
    """Whether every lookup of a matrix is a separate output, instead of every bag."""
    bag_packs: tuple[BagPack, ...]
    """The owner-pooled packs: the last packs, each with its own matrix."""

    @staticmethod
    def build(tables: Sequence[PackedTable], device: torch.device) -> PackPlan:
        """Groups packs into waves and matrices.

        Args:
            tables: Tables as for :meth:`IdSpace.build`, waves ascending.
            device: Device of the masks.
        """
        row_tables = [table for table in tables if not table.as_bags]
        assert row_tables == list(tables[: len(row_tables)]), "packs of bags come last"
        waves = [table.wave for table in row_tables]
        assert waves == sorted(waves), "packs of one wave must be side by side"
        # Row packs of one (module, dim, sequence or not) that are neighbours share a matrix.
        kinds = [(table.pack, (table.module, table.dim, table.is_sequence)) for table in row_tables]
        tables_A = [
            list(run) for _, run in groupby(tables[len(row_tables) :], lambda table: table.pack)
        ]
        matrices = _runs(kinds)
        tables_M = [[t for t in row_tables if m.start <= t.pack < m.stop] for m in matrices]
        # One flag per feature: means_M[m] has F_m entries, in feature order.
        means_M = [[t.mean for t in tables for _ in t.feature_names] for tables in tables_M]
        packs = [slice(tables[0].pack, tables[0].pack + 1) for tables in tables_A]
        bag_packs = tuple(BagPack.build(tables, device) for tables in tables_A)
        return PackPlan(
            waves=_waves(_runs([(table.pack, table.wave) for table in row_tables]), packs),
            matrices=(*matrices, *packs),
            dim_M=(*(tables[0].dim for tables in tables_M), *(pack.dim for pack in bag_packs)),
            features_M=(*map(len, means_M), *(pack.num_features for pack in bag_packs)),
            mean_MF=(
                *(torch.tensor(means, device=device) if any(means) else None for means in means_M),
                *[None] * len(packs),
            ),
            is_sequence_M=(*(tables[0].is_sequence for tables in tables_M), *[False] * len(packs)),
            modules=_matrices_of_modules([tables[0].module for tables in [*tables_M, *tables_A]]),
            bag_packs=bag_packs,
        )

    @property
    def num_packs(self) -> int:
        """Number of row packs and owner-pooled packs, P."""
        return self.matrices[-1].stop

    @property
    def num_row_waves(self) -> int:
        """Number of waves of rows, which come before the waves of pooled bags."""
        num_row_packs = self.num_packs - len(self.bag_packs)
        return sum(wave.start < num_row_packs for wave in self.waves)

    @property
    def num_row_matrices(self) -> int:
        """Number of matrices of rows, which come before the matrices of pooled bags."""
        return len(self.matrices) - len(self.bag_packs)

    @property
    def pools_rows(self) -> bool:
        """Whether this rank pools any rows; if not, per-sample weights of rows have no effect."""
        return not all(self.is_sequence_M[: self.num_row_matrices])

    @property
    def takes_weights(self) -> bool:
        """Whether per-sample weights have an effect."""
        return not all(self.is_sequence_M)

    def packs_of(self, wave: int | None) -> slice:
        """The packs of a wave, an empty slice if there are fewer waves; ``None`` = all packs."""
        if wave is None:
            return slice(0, self.num_packs)
        return self.waves[wave] if wave < len(self.waves) else slice(self.num_packs, self.num_packs)


def _matrices_of_modules(module_M: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    matrices_by_module: list[list[int]] = [[] for _ in range(max(module_M) + 1)]
    for matrix, module in enumerate(module_M):
        matrices_by_module[module].append(matrix)
    return tuple(map(tuple, matrices_by_module))


def _waves(waves: tuple[slice, ...], bag_packs: Sequence[slice]) -> tuple[slice, ...]:
    """Appends the waves of owner-pooled packs to the waves of rows."""
    # Distribute A packs over at most MOST_BAG_WAVES waves, sizes differing by at most one.
    num_waves = min(len(bag_packs), MOST_BAG_WAVES)
    edges = [len(bag_packs) * wave // num_waves for wave in range(num_waves)]
    ends = [*edges[1:], len(bag_packs)]
    bag_waves = (
        slice(bag_packs[start].start, bag_packs[end - 1].stop) for start, end in zip(edges, ends)
    )
    return (*waves, *bag_waves)


def _runs(properties: Sequence[tuple[int, Any]]) -> tuple[slice, ...]:
    """Finds runs of neighbouring packs with equal properties.

    Args:
        properties: Pack and property of each table.
    """
    # The set removes duplicates from tables of one pack; sorting restores pack order.
    value_P = [value for _, value in sorted(set(properties))]
    # Every pack has exactly one property.
    assert len(value_P) == len({pack for pack, _ in properties}), "tables of a pack are alike"
    ends = [*accumulate(len(list(run)) for _, run in groupby(value_P))]
    return tuple(map(slice, [0, *ends], ends))
