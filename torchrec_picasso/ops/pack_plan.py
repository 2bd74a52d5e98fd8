"""The packs that are exchanged together (waves) and the packs that are pooled together (matrices).

A *pack* holds the tables of one FBGEMM table, see :func:`.pack_key`. Packs of one *wave* share an
exchange where a schedule staggers waves. The received vectors of a pack, rows or owner-pooled bags,
are stored in a *matrix* of its dim. Packs that share a matrix are pooled by one operator, or
gathered from by one where tables are looked up as sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, groupby
from typing import Any

import torch
from torch import Tensor

from torchrec_picasso.ops.ids import PackedTable

_BY_MATRIX = ("dim_M", "features_M", "mean_MF", "is_sequence_M", "module_M")


@dataclass(frozen=True)
class PackPlan:
    """How the packs of a route, or of all routes of a group, are exchanged and pooled."""

    waves: tuple[slice, ...]
    """The packs of each wave."""
    matrices: tuple[slice, ...]
    """The packs of each matrix."""
    dim_M: tuple[int, ...]
    """Columns of each matrix."""
    features_M: tuple[int, ...]
    """Number of features of each matrix."""
    mean_MF: tuple[Tensor | None, ...]
    """Whether a feature is averaged, bool, by matrix; ``None`` = none."""
    is_sequence_M: tuple[bool, ...]
    """Whether every lookup of a matrix is a separate output, instead of every bag."""
    module_M: tuple[int, ...]
    """The module of each matrix."""

    @staticmethod
    def build(
        tables: Sequence[PackedTable], device: torch.device, waves: Sequence[slice] | None = None
    ) -> PackPlan:
        """Groups the packs of tables, given as for :meth:`IdSpace.build`, into waves and matrices.

        Neighbouring packs of one module and dim share a matrix. With ``waves``, the packs of each
        wave, every pack has its own matrix; ``None`` = the waves of the tables, ascending.
        """
        kinds = [(0, t.module, t.dim, t.is_sequence) for t in tables]
        if waves is None:
            numbers = [table.wave for table in tables]
            assert numbers == sorted(numbers), "packs of one wave must be side by side"
            waves = _alike_neighbours([(table.pack, table.wave) for table in tables])
        else:
            kinds = [(t.pack, *kind[1:]) for t, kind in zip(tables, kinds)]
        matrices = _alike_neighbours([(table.pack, kind) for table, kind in zip(tables, kinds)])
        tables_M = [[t for t in tables if m.start <= t.pack < m.stop] for m in matrices]
        # One flag per feature: means_M[m] has F_m entries, in feature order.
        means_M = [[t.mean for t in tables for _ in t.feature_names] for tables in tables_M]
        return PackPlan(
            waves=tuple(waves),
            matrices=matrices,
            dim_M=tuple(tables[0].dim for tables in tables_M),
            features_M=tuple(map(len, means_M)),
            mean_MF=tuple(torch.tensor(m, device=device) if any(m) else None for m in means_M),
            is_sequence_M=tuple(tables[0].is_sequence for tables in tables_M),
            module_M=tuple(tables[0].module for tables in tables_M),
        )

    @staticmethod
    def joined(plans: Sequence[PackPlan]) -> PackPlan:
        """Joins the plans of several routes, whose packs and matrices follow each other."""
        first_pack = [0, *accumulate(plan.num_packs for plan in plans)]

        def shifted(name: str) -> tuple[slice, ...]:
            found = [(p, at) for plan, at in zip(plans, first_pack) for p in getattr(plan, name)]
            return tuple(slice(packs.start + first, packs.stop + first) for packs, first in found)

        by_matrix = {n: tuple(v for plan in plans for v in getattr(plan, n)) for n in _BY_MATRIX}
        return PackPlan(waves=shifted("waves"), matrices=shifted("matrices"), **by_matrix)

    @property
    def num_packs(self) -> int:
        """Number of packs, P."""
        return self.matrices[-1].stop

    @cached_property
    def modules(self) -> tuple[tuple[int, ...], ...]:
        """The matrices of each module, in the order of the module's columns."""
        found: list[list[int]] = [[] for _ in range(max(self.module_M) + 1)]
        for matrix, module in enumerate(self.module_M):
            found[module].append(matrix)
        return tuple(map(tuple, found))

    @property
    def has_pooling(self) -> bool:
        """Whether any table pools its rows; per-sample weights have no effect on sequences."""
        return not all(self.is_sequence_M)

    def packs_of(self, wave: int | None) -> range:
        """The packs of a wave, none if there are fewer waves; ``None`` = all packs."""
        if wave is None:
            return range(self.num_packs)
        return range(self.num_packs)[self.waves[wave]] if wave < len(self.waves) else range(0)


def _alike_neighbours(properties: Sequence[tuple[int, Any]]) -> tuple[slice, ...]:
    """Finds neighbouring packs with equal properties, from (pack, property) by table."""
    # The set removes duplicates from tables of one pack; sorting restores pack order.
    value_P = [value for _, value in sorted(set(properties))]
    # Every pack has exactly one property.
    assert len(value_P) == len({pack for pack, _ in properties}), "tables of a pack are alike"
    ends = [*accumulate(len(list(alike)) for _, alike in groupby(value_P))]
    return tuple(map(slice, [0, *ends], ends))
