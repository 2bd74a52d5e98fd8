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

_NUM_EARLY = len(EARLY_SHARES)


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
        dirty_elements: Elements of the cold rows that the batch before updates.
        updated: Home rows that the rank updates: distinct rows over all ranks' batches.
        touched: Hot rows in any rank's batch.
        touched_elements: Elements of the touched hot rows.
        hot: Hot rows of the tables.
        rows: Rows of the tables.
        bags: Bags of the rank's batch in owner-pooled tables.
        bag_elements: Elements of the bags.
        bag_lookups: Lookups of the bags.
        bag_lookup_elements: Elements of the lookups of the bags.
        cold_early: Elements of the cold rows in each of
            :data:`torchrec_picasso.cost.table_work.EARLY_SHARES` of the batch.
        dirty_early: Elements of the dirty rows in each of these shares.
    """

    features: float = 0.0
    lookups: float = 0.0
    lookup_elements: float = 0.0
    unique: float = 0.0
    unique_elements: float = 0.0
    cold: float = 0.0
    cold_elements: float = 0.0
    dirty_elements: float = 0.0
    updated: float = 0.0
    touched: float = 0.0
    touched_elements: float = 0.0
    hot: float = 0.0
    rows: float = 0.0
    bags: float = 0.0
    bag_elements: float = 0.0
    bag_lookups: float = 0.0
    bag_lookup_elements: float = 0.0
    cold_early: tuple[float, ...] = (0.0,) * _NUM_EARLY
    dirty_early: tuple[float, ...] = (0.0,) * _NUM_EARLY

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
        return HotColdTotals(
            features=load.num_features,
            lookups=load.lookups,
            lookup_elements=load.lookups * load.dim,
            unique=work.unique,
            unique_elements=work.unique * load.dim,
            cold=split.cold_used,
            cold_elements=split.cold_used * load.dim,
            dirty_elements=split.dirty * load.dim,
            updated=split.cold_touched / work.world_size,
            touched=split.hot_touched,
            touched_elements=split.hot_touched * load.dim,
            hot=num_hot,
            rows=load.num_embeddings,
            cold_early=tuple(rows * load.dim for rows in split.cold_early),
            dirty_early=tuple(rows * load.dim for rows in split.dirty_early),
        )


_SCALARS = tuple(field.name for field in dataclasses.fields(HotColdTotals))[:-2]
_scalars = attrgetter(*_SCALARS)


def sum_hot_cold(tables: Iterable[HotColdTotals]) -> HotColdTotals:
    """Sums the work of tables, field by field."""
    # one row of numbers per table: the scalar fields, then both tuples
    rows = [(*_scalars(table), *table.cold_early, *table.dirty_early) for table in tables]
    sums = sum_columns(rows, len(_SCALARS) + 2 * _NUM_EARLY)
    return HotColdTotals(
        **dict(zip(_SCALARS, sums)),
        cold_early=tuple(sums[-2 * _NUM_EARLY : -_NUM_EARLY]),
        dirty_early=tuple(sums[-_NUM_EARLY:]),
    )
