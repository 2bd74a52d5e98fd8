"""Distributes tables over waves of about equal volume; an interleaved pipeline staggers waves.

Tables that can share a pack are split only if they exceed the mean volume of a wave, because each
additional pack costs an update and some copies.

Source: PICASSO (arXiv 2204.04903), K-Interleaving: packs in groups of balanced volume.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

__all__ = ["TableVolume", "balance_waves"]


@dataclass(frozen=True, kw_only=True)
class TableVolume:
    """Volume of one table.

    Args:
        group: Key that is equal for tables that can share a pack.
        elements: Expected elements that a rank sends per step.
    """

    group: Hashable
    elements: float


def balance_waves(tables: Sequence[TableVolume], num_waves: int) -> list[int]:
    """Distributes tables over waves of about equal volume.

    Whole groups, and tables of split groups, are assigned in descending order to the wave with the
    smallest volume. The largest wave is at most 4/3 of that of an optimal assignment of these units
    (Graham 1969).

    Args:
        tables: Tables of one exchange.
        num_waves: Number of waves, at least 1.

    Returns:
        The wave of each table; a wave may be empty.
    """
    mean = sum(table.elements for table in tables) / num_waves
    members: dict[Hashable, list[int]] = {}
    for position, table in enumerate(tables):
        members.setdefault(table.group, []).append(position)
    # a unit is assigned as a whole: a group, or one table of a large group
    units: list[list[int]] = []
    for positions in members.values():
        is_large = sum(tables[i].elements for i in positions) > mean
        units += [[i] for i in positions] if is_large else [positions]

    def volume(unit: list[int]) -> float:
        return sum(tables[i].elements for i in unit)

    filled = [0.0] * num_waves
    waves = [0] * len(tables)
    for unit in sorted(units, key=volume, reverse=True):
        wave = filled.index(min(filled))
        filled[wave] += volume(unit)
        for position in unit:
            waves[position] = wave
    return waves
