"""Which tables travel together where an interleaved pipeline staggers their exchanges.

A group of tables that can share a pack is cut only when it is larger than a wave should be: every
pack more is one update and some copies more, a group kept whole costs nothing.

Source: PICASSO (arXiv 2204.04903), K-Interleaving: packs in groups of balanced volume.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

__all__ = ["TableVolume", "balance_waves"]


@dataclass(frozen=True, kw_only=True)
class TableVolume:
    """One table as a load on the wire.

    Args:
        group: What tables of one pack have in common.
        elements: Elements of its rows that travel, expected per rank and step.
    """

    group: Hashable
    elements: float


def balance_waves(tables: Sequence[TableVolume], num_waves: int) -> list[int]:
    """Spreads tables over waves of about equal volume.

    Args:
        tables: Tables of one exchange.
        num_waves: Waves to fill, at least 1.

    Returns:
        The wave of each table, in their order; some waves may stay empty.

    Cost:
        Groups that fit and tables of those that do not, longest first into the emptiest wave: at
        most 4/3 of the best balance that keeps the former whole (Graham 1969).
    """
    fair = sum(table.elements for table in tables) / num_waves
    members: dict[Hashable, list[int]] = {}
    for position, table in enumerate(tables):
        members.setdefault(table.group, []).append(position)
    units: list[list[int]] = []
    for positions in members.values():
        is_large = sum(tables[i].elements for i in positions) > fair
        units += [[i] for i in positions] if is_large and num_waves > 1 else [positions]
    volume = [sum(tables[i].elements for i in unit) for unit in units]
    filled = [0.0] * num_waves
    waves = [0] * len(tables)
    for unit in sorted(range(len(units)), key=lambda unit: (-volume[unit], unit)):
        wave = min(range(num_waves), key=lambda wave: (filled[wave], wave))
        filled[wave] += volume[unit]
        for position in units[unit]:
            waves[position] = wave
    return waves
