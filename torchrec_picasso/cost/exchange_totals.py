"""What the tables of one packed exchange ask of a step: sums over tables, as they share it.

Every number is expected, per rank and step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from operator import attrgetter

from torchrec_picasso.cost.step_cost import sum_columns
from torchrec_picasso.cost.table_work import EARLY_SHARES, TableWork
from torchrec_picasso.placement import Form

__all__ = ["HotColdTotals", "sum_hot_cold"]


@dataclass(frozen=True)
class HotColdTotals:
    """What the tables of one exchange ask of a step, expected, per rank.

    Args:
        features: Features of the tables.
        lookups: Lookups of the rank's batch.
        lookup_elements: The same times dim.
        unique: Distinct rows of the rank's batch.
        unique_elements: The same times dim.
        cold: Those of them that travel.
        cold_elements: The same times dim.
        cold_early0: Elements of the cold rows that the first part of the batch uses, by
            :data:`torchrec_picasso.cost.table_work.EARLY_SHARES`.
        cold_early1: Likewise.
        cold_early2: Likewise.
        dirty_elements: Elements of the cold rows that the batch before updates.
        dirty_early0: Of these, those that the first part of the batch uses.
        dirty_early1: Likewise.
        dirty_early2: Likewise.
        updated: Cold rows that this rank updates: distinct ones over all ranks, at their homes.
        touched: Hot rows that any rank uses.
        touched_elements: The same times dim.
        hot: Hot rows, used or not.
        rows: Rows of the tables.
        bags: Bags of the tables that travel as bags; their lookups and rows count here only, and
            in ``features``, ``rows`` and ``updated``.
        bag_elements: The same times dim.
        bag_lookups: Lookups of their bags.
        bag_lookup_elements: The same times dim.
    """

    features: float = 0.0
    lookups: float = 0.0
    lookup_elements: float = 0.0
    unique: float = 0.0
    unique_elements: float = 0.0
    cold: float = 0.0
    cold_elements: float = 0.0
    cold_early0: float = 0.0
    cold_early1: float = 0.0
    cold_early2: float = 0.0
    dirty_elements: float = 0.0
    dirty_early0: float = 0.0
    dirty_early1: float = 0.0
    dirty_early2: float = 0.0
    updated: float = 0.0
    touched: float = 0.0
    touched_elements: float = 0.0
    hot: float = 0.0
    rows: float = 0.0
    bags: float = 0.0
    bag_elements: float = 0.0
    bag_lookups: float = 0.0
    bag_lookup_elements: float = 0.0

    @staticmethod
    def from_table(work: TableWork, num_hot: float, form: Form = "rows") -> HotColdTotals:
        """One table whose ``num_hot`` most frequent rows are hot, or whose bags travel."""
        load = work.load
        if form == "bags":
            return HotColdTotals(
                features=load.num_features,
                updated=work.unique_anywhere / work.world_size,
                rows=load.num_embeddings,
                bags=load.bags,
                bag_elements=load.bags * load.dim,
                bag_lookups=load.lookups,
                bag_lookup_elements=load.lookups * load.dim,
            )
        split = work.split(num_hot)
        cold_early = (rows * load.dim for rows in split.cold_early)
        dirty_early = (rows * load.dim for rows in split.dirty_early)
        return HotColdTotals(
            features=load.num_features,
            lookups=load.lookups,
            lookup_elements=load.lookups * load.dim,
            unique=work.unique,
            unique_elements=work.unique * load.dim,
            cold=split.cold_used,
            cold_elements=split.cold_used * load.dim,
            **dict(zip(_COLD_EARLY, cold_early)),
            dirty_elements=split.dirty * load.dim,
            **dict(zip(_DIRTY_EARLY, dirty_early)),
            updated=split.cold_touched / work.world_size,
            touched=split.hot_touched,
            touched_elements=split.hot_touched * load.dim,
            hot=num_hot,
            rows=load.num_embeddings,
        )

    @property
    def cold_early(self) -> tuple[float, ...]:
        """Elements of the cold rows of the first parts of a batch."""
        return self.cold_early0, self.cold_early1, self.cold_early2

    @property
    def dirty_early(self) -> tuple[float, ...]:
        """Elements of the dirty ones among them."""
        return self.dirty_early0, self.dirty_early1, self.dirty_early2


_COLD_EARLY = tuple(f"cold_early{place}" for place in range(len(EARLY_SHARES)))
_DIRTY_EARLY = tuple(f"dirty_early{place}" for place in range(len(EARLY_SHARES)))
_FIELDS = tuple(field.name for field in dataclasses.fields(HotColdTotals))
_values = attrgetter(*_FIELDS)


def sum_hot_cold(tables: Iterable[HotColdTotals]) -> HotColdTotals:
    """Sums what single tables ask for."""
    return HotColdTotals(*sum_columns(map(_values, tables), len(_FIELDS)))
