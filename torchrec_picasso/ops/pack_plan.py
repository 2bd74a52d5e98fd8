"""Which packs travel together and which are pooled together: waves and matrices.

A pack is what one FBGEMM table holds: tables of one dim, compute kernel, form and wave. Packs of a
wave share an exchange where a schedule staggers waves. What of a pack travels comes into a *matrix*
of its dim: rows, or bags that were pooled at home. Neighbouring packs of rows of one module and dim
share one, and one operator pools it, or gathers it where tables are looked up as sequences.

Packs of bags come after all packs of rows, in waves of their own: bags are never fetched ahead, so
that where one step meets the next there is only the update of other packs to hide them under.
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
"""More would start messages for less and less to hide."""


@dataclass(frozen=True)
class PackPlan:
    """How the packs of a sharded module, or of several, are exchanged and pooled."""

    waves: tuple[slice, ...]
    """The packs of each wave."""
    matrices: tuple[slice, ...]
    """The packs of each matrix."""
    dim_M: tuple[int, ...]
    """Columns of each matrix."""
    features_M: tuple[int, ...]
    """Number of features of each matrix."""
    mean_MF: tuple[Tensor | None, ...]
    """Which features of each matrix are averaged, bool; ``None`` = none, or elsewhere."""
    modules: tuple[tuple[int, ...], ...]
    """The matrices of each module, in the order of its columns."""
    is_sequence_M: tuple[bool, ...]
    """Matrices of which every lookup is an output of its own, instead of every bag."""
    bag_packs: tuple[BagPack, ...]
    """The packs whose bags travel: the last ones, each with a matrix of its own."""

    @staticmethod
    def build(tables: Sequence[PackedTable], device: torch.device) -> PackPlan:
        """Finds waves and matrices.

        Args:
            tables: As for :meth:`IdSpace.build`, waves ascending.
            device: Where masks go.
        """
        of_rows = [table for table in tables if not table.as_bags]
        assert of_rows == list(tables[: len(of_rows)]), "packs of bags come last"
        waves = [table.wave for table in of_rows]
        assert waves == sorted(waves), "packs of one wave must be side by side"
        kinds = [(table.pack, (table.module, table.dim, table.is_sequence)) for table in of_rows]
        tables_A = [list(of) for _, of in groupby(tables[len(of_rows) :], lambda of: of.pack)]
        matrices = _runs(kinds)
        tables_M = [[t for t in of_rows if m.start <= t.pack < m.stop] for m in matrices]
        means_M = [[t.mean for t in tables for _ in t.feature_names] for tables in tables_M]
        packs = [slice(tables[0].pack, tables[0].pack + 1) for tables in tables_A]
        bag_packs = tuple(BagPack.build(tables, device) for tables in tables_A)
        return PackPlan(
            waves=_waves(_runs([(table.pack, table.wave) for table in of_rows]), packs),
            matrices=(*matrices, *packs),
            dim_M=(*(tables[0].dim for tables in tables_M), *(of.dim for of in bag_packs)),
            features_M=(*map(len, means_M), *(of.num_features for of in bag_packs)),
            mean_MF=(
                *(torch.tensor(of, device=device) if any(of) else None for of in means_M),
                *[None] * len(packs),
            ),
            is_sequence_M=(*(of[0].is_sequence for of in tables_M), *[False] * len(packs)),
            modules=_matrices_of_modules([of[0].module for of in [*tables_M, *tables_A]]),
            bag_packs=bag_packs,
        )

    @property
    def num_packs(self) -> int:
        """Packs P, of rows and of bags."""
        return self.matrices[-1].stop

    @property
    def num_row_waves(self) -> int:
        """Waves of rows, which come before those of bags."""
        num_row_packs = self.num_packs - len(self.bag_packs)
        return sum(wave.start < num_row_packs for wave in self.waves)

    @property
    def num_row_matrices(self) -> int:
        """Matrices of rows, which come before those of bags."""
        return len(self.matrices) - len(self.bag_packs)

    @property
    def pools_rows(self) -> bool:
        """Whether any rows are pooled; else their per-sample weights mean nothing."""
        return not all(self.is_sequence_M[: self.num_row_matrices])

    @property
    def takes_weights(self) -> bool:
        """Whether per-sample weights mean anything."""
        return not all(self.is_sequence_M)

    def packs_of(self, wave: int | None) -> slice:
        """The packs of a wave, none if there are fewer waves; ``None`` = all packs."""
        if wave is None:
            return slice(0, self.num_packs)
        return self.waves[wave] if wave < len(self.waves) else slice(self.num_packs, self.num_packs)


def _matrices_of_modules(module_M: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    of_module: list[list[int]] = [[] for _ in range(max(module_M) + 1)]
    for matrix, module in enumerate(module_M):
        of_module[module].append(matrix)
    return tuple(map(tuple, of_module))


def _waves(waves: tuple[slice, ...], bag_packs: Sequence[slice]) -> tuple[slice, ...]:
    """Waves of rows, then of bags."""
    num_waves = min(len(bag_packs), MOST_BAG_WAVES)
    edges = [len(bag_packs) * wave // num_waves for wave in range(num_waves)]
    ends = [*edges[1:], len(bag_packs)]
    of_bags = (
        slice(bag_packs[start].start, bag_packs[end - 1].stop) for start, end in zip(edges, ends)
    )
    return (*waves, *of_bags)


def _runs(of_tables: Sequence[tuple[int, Any]]) -> tuple[slice, ...]:
    """Neighbouring packs with something in common, from (pack, what) of every table."""
    what_P = [what for _, what in sorted(set(of_tables))]
    assert len(what_P) == len({pack for pack, _ in of_tables}), "tables of a pack are alike"
    ends = [*accumulate(len(list(run)) for _, run in groupby(what_P))]
    return tuple(map(slice, [0, *ends], ends))
