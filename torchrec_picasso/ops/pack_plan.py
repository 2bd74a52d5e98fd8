"""Which packs travel together and which are pooled together: waves and matrices.

A pack is what one FBGEMM table holds: tables of one dim, compute kernel and wave. Packs of a wave
share an exchange where a schedule staggers waves. Neighbouring packs of one module and dim share a
*matrix*: their rows are fetched into it, and one operator pools it, or gathers it where tables are
looked up as sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import Any

import torch
from torch import Tensor

from torchrec_picasso.ops.ids import PackedTable

__all__ = ["PackPlan"]


@dataclass(frozen=True)
class PackPlan:
    """How the packs of a sharded module are exchanged and pooled."""

    waves: tuple[slice, ...]
    """The packs of each wave."""
    matrices: tuple[slice, ...]
    """The packs of each matrix."""
    dim_M: tuple[int, ...]
    """Columns of each matrix."""
    features_M: tuple[int, ...]
    """Number of features of each matrix."""
    mean_MF: tuple[Tensor | None, ...]
    """Which features of each matrix are averaged, bool; ``None`` = none."""
    modules: tuple[slice, ...]
    """The matrices of each module."""
    is_sequence_M: tuple[bool, ...]
    """Matrices of which every lookup is an output of its own, instead of every bag."""

    @staticmethod
    def build(tables: Sequence[PackedTable], device: torch.device) -> PackPlan:
        """Finds waves and matrices.

        Args:
            tables: As for :meth:`IdSpace.build`, waves ascending.
            device: Where masks go.
        """
        waves = [table.wave for table in tables]
        assert waves == sorted(waves), "packs of one wave must be side by side"
        kinds = [(table.pack, (table.module, table.dim, table.is_sequence)) for table in tables]
        matrices = _runs(kinds)
        tables_M = [[t for t in tables if m.start <= t.pack < m.stop] for m in matrices]
        means_M = [[t.mean for t in tables for _ in t.feature_names] for tables in tables_M]
        return PackPlan(
            waves=_runs([(table.pack, table.wave) for table in tables]),
            matrices=matrices,
            dim_M=tuple(tables[0].dim for tables in tables_M),
            features_M=tuple(map(len, means_M)),
            mean_MF=tuple(
                torch.tensor(means, device=device) if any(means) else None for means in means_M
            ),
            is_sequence_M=tuple(tables[0].is_sequence for tables in tables_M),
            modules=_matrices_of_modules([tables[0].module for tables in tables_M]),
        )

    @property
    def has_bags(self) -> bool:
        """Whether anything is pooled; else per-sample weights mean nothing."""
        return not all(self.is_sequence_M)

    def packs_of(self, wave: int | None) -> slice:
        """The packs of a wave, none if there are fewer waves; ``None`` = all packs."""
        num_packs = self.matrices[-1].stop
        if wave is None:
            return slice(0, num_packs)
        return self.waves[wave] if wave < len(self.waves) else slice(num_packs, num_packs)


def _matrices_of_modules(module_M: Sequence[int]) -> tuple[slice, ...]:
    assert module_M == sorted(module_M), "matrices of one module must be side by side"
    ends = [*accumulate(len(list(run)) for _, run in groupby(module_M))]
    return tuple(map(slice, [0, *ends], ends))


def _runs(of_tables: Sequence[tuple[int, Any]]) -> tuple[slice, ...]:
    """Neighbouring packs with something in common, from (pack, what) of every table."""
    what_P = [what for _, what in sorted(set(of_tables))]
    assert len(what_P) == len({pack for pack, _ in of_tables}), "tables of a pack are alike"
    ends = [*accumulate(len(list(run)) for _, run in groupby(what_P))]
    return tuple(map(slice, [0, *ends], ends))
