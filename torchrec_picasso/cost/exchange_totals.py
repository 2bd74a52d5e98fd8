"""Expected work of the hot/cold tables of one packed exchange, per rank and step."""

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
    """Expected work of one step on one rank, summed over the tables of one exchange.

    An owner-pooled table counts only in ``features``, ``updated``, ``rows`` and the fields of bags.
    Fields named ``*_elements`` are numbers of rows, lookups or bags times dim.

    Args:
        features: Number of features.
        lookups: Lookups of the rank's batch.
        lookup_elements: Elements of the lookups.
        unique: Distinct rows of the rank's batch.
        unique_elements: Elements of the distinct rows.
        cold: Distinct cold rows of the rank's batch.
        cold_elements: Elements of the cold rows.
        cold_early0: Elements of the cold rows in the first share of the batch, see
            :data:`torchrec_picasso.cost.table_work.EARLY_SHARES`.
        cold_early1: Elements of the cold rows in the second, larger share.
        cold_early2: Elements of the cold rows in the third share.
        dirty_elements: Elements of the cold rows that the batch before updates.
        dirty_early0: Elements of the dirty rows in the first share of the batch.
        dirty_early1: Elements of the dirty rows in the second share.
        dirty_early2: Elements of the dirty rows in the third share.
        updated: Home rows that the rank updates: distinct rows over all ranks' batches.
        touched: Hot rows in any rank's batch.
        touched_elements: Elements of the touched hot rows.
        hot: Hot rows of the tables.
        rows: Rows of the tables.
        bags: Bags of the rank's batch in owner-pooled tables.
        bag_elements: Elements of the bags.
        bag_lookups: Lookups of the bags.
        bag_lookup_elements: Elements of the lookups of the bags.
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
        """Computes the work of one table.

        Args:
            work: Expected rows of the table.
            num_hot: Number of hot rows, the most frequent rows; not used if owner-pooled.
            form: ``"rows"`` = row-exchanged, ``"bags"`` = owner-pooled.
        """
        load = work.load
        if form == "bags":
            # The lookups of all ranks spread over the home ranks: on average as many as one batch.
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
        """Elements of the cold rows in each of :data:`EARLY_SHARES`."""
        return self.cold_early0, self.cold_early1, self.cold_early2

    @property
    def dirty_early(self) -> tuple[float, ...]:
        """Elements of the dirty rows in each of :data:`EARLY_SHARES`."""
        return self.dirty_early0, self.dirty_early1, self.dirty_early2


_COLD_EARLY = tuple(f"cold_early{place}" for place in range(len(EARLY_SHARES)))
_DIRTY_EARLY = tuple(f"dirty_early{place}" for place in range(len(EARLY_SHARES)))
_FIELDS = tuple(field.name for field in dataclasses.fields(HotColdTotals))
_values = attrgetter(*_FIELDS)


def sum_hot_cold(tables: Iterable[HotColdTotals]) -> HotColdTotals:
    """Sums the work of tables, field by field."""
    return HotColdTotals(*sum_columns(map(_values, tables), len(_FIELDS)))
