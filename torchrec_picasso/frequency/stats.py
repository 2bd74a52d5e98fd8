"""Frequency statistics: how often each row of each table was looked up in a sample of batches.

The sample decides nothing about correctness, only about speed: a hot set chosen from poor
statistics trains exactly the same model. A plain value: no process group, picklable, and two of
them merge, so each rank may count its own batches.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from numbers import Integral
from os import PathLike
from typing import TYPE_CHECKING

import torch
from torch import nn

from torchrec_picasso.errors import PicassoError, PlanError
from torchrec_picasso.frequency import parquet
from torchrec_picasso.frequency.collect import count_lookups, model_tables
from torchrec_picasso.frequency.counts import TableCounts, sum_counts

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["FrequencyStats"]


@dataclass(frozen=True)
class FrequencyStats:
    """Exact lookup counts of a model's tables over a sample of batches.

    Args:
        tables: Counts by table name, in model order.
        num_batches: Batches the sample held.
        num_samples: Samples those batches held.
    """

    tables: Mapping[str, TableCounts]
    num_batches: int = 0
    num_samples: int = 0

    @classmethod
    def collect(
        cls, batches: Iterable[object], model: nn.Module, num_batches: int | None = None
    ) -> FrequencyStats:
        """Counts every lookup that a stream of batches makes in a model's tables.

        A feature that two tables share counts in both; features that no table uses are ignored.

        Args:
            batches: Yields KeyedJaggedTensors or objects with a ``sparse_features`` attribute.
            model: The model before sharding; meta device is fine.
            num_batches: How many batches to read, at least 1; ``None`` reads to the end.

        Returns:
            The statistics; a table without lookups is part of them.

        Raises:
            InputError: If a batch lacks a feature or holds an id outside its table.
            PlanError: If the model has no table, or two of one name.
            PicassoError: If ``num_batches`` is not a positive integer.

        Cost:
            O(N log N) time for N lookups; 16 bytes per distinct row and 8 per pending lookup.
        """
        if num_batches is not None:
            _check_count("num_batches", num_batches, at_least=1)
        tables, batches_read, samples_read = count_lookups(
            batches, model_tables(model), num_batches
        )
        return cls(tables=tables, num_batches=batches_read, num_samples=samples_read)

    def merge(self, other: FrequencyStats) -> FrequencyStats:
        """Adds the counts of two samples, for instance of two ranks or of two days.

        Args:
            other: Statistics of the same model, or of other tables of it.

        Returns:
            Statistics over the union of the tables, these tables first.

        Raises:
            PlanError: If a table differs in its rows or features.
        """
        merged = dict(self.tables)
        for name, theirs in other.tables.items():
            ours = self.tables.get(name)
            merged[name] = theirs if ours is None else _merge_table(name, ours, theirs)
        return FrequencyStats(
            tables=merged,
            num_batches=self.num_batches + other.num_batches,
            num_samples=self.num_samples + other.num_samples,
        )

    def to_parquet(self, path: str | PathLike[str]) -> None:
        """Writes columns ``table, row, count``; facts per table ride in the schema metadata.

        The file appears under its name only when it is whole.

        Args:
            path: File to write or to replace; its folder exists.

        Raises:
            PicassoError: If the folder does not exist.
        """
        parquet.write_tables(path, self.tables, self.num_batches, self.num_samples)

    @classmethod
    def from_parquet(cls, path: str | PathLike[str]) -> FrequencyStats:
        """Reads what :meth:`to_parquet` wrote.

        Args:
            path: The file.

        Returns:
            Statistics equal to those written.

        Raises:
            PicassoError: If the file is missing, empty, not Parquet, or not such statistics.
        """
        tables, num_batches, num_samples = parquet.read_tables(path)
        return cls(tables=tables, num_batches=num_batches, num_samples=num_samples)

    def to_frame(self) -> pd.DataFrame:
        """A pandas DataFrame with columns ``table, row, count``.

        Returns:
            One line per row seen: tables in model order, count descending, then row ascending.
        """
        import numpy as np
        import pandas as pd

        ranked = [counts.most_frequent_first() for counts in self.tables.values()]
        empty = torch.empty(0, dtype=torch.int64)
        names = np.array(list(self.tables), dtype=object)
        return pd.DataFrame(
            {
                "table": np.repeat(names, [rows_U.numel() for rows_U, _ in ranked]),
                "row": torch.cat([empty, *(rows_U for rows_U, _ in ranked)]).numpy(),
                "count": torch.cat([empty, *(counts_U for _, counts_U in ranked)]).numpy(),
            }
        )

    def coverage(self, table: str, num_rows: int) -> float:
        """Share of a table's lookups that its most frequent rows take.

        Args:
            table: Table name.
            num_rows: How many of its most frequent rows.

        Returns:
            Between 0 and 1; 0 for a table without lookups.

        Raises:
            PlanError: If the statistics do not know the table.
            PicassoError: If ``num_rows`` is not an integer of at least 0.
        """
        counts = self._table(table)
        _check_count("num_rows", num_rows, at_least=0)
        if not counts.num_lookups:
            return 0.0
        largest = counts.counts_U.topk(min(int(num_rows), counts.num_rows_seen)).values
        return int(largest.sum()) / counts.num_lookups

    def expected_unique(self, table: str, num_lookups: int) -> float:
        """Expected distinct rows among lookups drawn independently from the counted distribution.

        ``sum over rows of 1 - (1 - p)^n`` with ``p`` the row's share of the lookups. Two biases,
        opposite in sign: rows that the sample never saw count as impossible, so the answer never
        exceeds the rows seen and is low where ``num_lookups`` nears the size of the sample; ids
        that come in bursts repeat more than independent draws do, so it is high for them.

        Args:
            table: Table name.
            num_lookups: Lookups of the table in a batch.

        Returns:
            Rows, between 0 and ``num_lookups``; 0 for a table without lookups.

        Raises:
            PlanError: If the statistics do not know the table.
            PicassoError: If ``num_lookups`` is not an integer of at least 0.
        """
        counts = self._table(table)
        _check_count("num_lookups", num_lookups, at_least=0)
        share_U = counts.counts_U.double() / counts.num_lookups
        return float((1 - (1 - share_U) ** int(num_lookups)).sum())

    def check_model(self, tables: Mapping[str, int]) -> None:
        """Refuses statistics of another model.

        Args:
            tables: Number of rows by table name, of the model at hand or part of it.

        Raises:
            PlanError: If the statistics lack a table or know it with another number of rows.
        """
        for name, num_embeddings in tables.items():
            counts = self._table(name)
            if counts.num_embeddings != num_embeddings:
                raise PlanError(
                    f"table {name!r} has {num_embeddings} rows in the model, but "
                    f"{counts.num_embeddings} in the statistics; they are of another model: "
                    "collect statistics for this one"
                )

    def _table(self, name: str) -> TableCounts:
        if name not in self.tables:
            raise PlanError(
                f"the statistics have no table {name!r}; they know {list(self.tables)}. Check the "
                "name, or collect statistics for this model"
            )
        return self.tables[name]


def _merge_table(name: str, ours: TableCounts, theirs: TableCounts) -> TableCounts:
    for what, mine, other in (
        ("rows", ours.num_embeddings, theirs.num_embeddings),
        ("features", ours.feature_names, theirs.feature_names),
    ):
        if mine != other:
            raise PlanError(
                f"cannot merge statistics of different models: table {name!r} has {what} {mine} "
                f"here and {other} there; merge only statistics collected with one model"
            )
    rows_U, counts_U = sum_counts(ours.rows_U, ours.counts_U, theirs.rows_U, theirs.counts_U)
    return TableCounts(
        num_embeddings=ours.num_embeddings,
        feature_names=ours.feature_names,
        rows_U=rows_U,
        counts_U=counts_U,
    )


def _check_count(name: str, value: object, *, at_least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, Integral) or int(value) < at_least:
        raise PicassoError(f"{name} is {value!r}, expected an integer of at least {at_least}")
