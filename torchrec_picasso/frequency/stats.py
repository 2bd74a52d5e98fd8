"""Frequency statistics: how often each row of each table was looked up in a sample of batches.

The sample decides nothing about correctness, only about speed: a hot set chosen from poor
statistics trains exactly the same model. A plain value: no process group, picklable, and two of
them merge, so each rank may count its own batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from os import PathLike
from typing import TYPE_CHECKING

import torch
from torch import nn

from torchrec_picasso.errors import PicassoError, PlanError
from torchrec_picasso.frequency.accumulate import MAX_ROWS_COUNTED
from torchrec_picasso.frequency.collect import count_lookups, model_tables
from torchrec_picasso.frequency.counts import ModelTable, TableCounts
from torchrec_picasso.frequency.files import count_files
from torchrec_picasso.frequency.parquet import read_tables, write_tables

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["FrequencyStats"]


@dataclass(frozen=True)
class FrequencyStats:
    """Lookup counts of a model's tables over a sample of batches.

    Args:
        tables: Counts by table name, in model order.
        num_batches: Batches of the sample; 0 where it was read from files.
        num_samples: Samples of the sample.
    """

    tables: Mapping[str, TableCounts]
    num_batches: int = 0
    num_samples: int = 0

    @classmethod
    def collect(
        cls,
        batches: Iterable[object],
        model: nn.Module,
        num_batches: int | None = None,
        *,
        max_rows_counted: int = MAX_ROWS_COUNTED,
    ) -> FrequencyStats:
        """Counts every lookup that a stream of batches makes in a model's tables.

        A feature that two tables share counts in both; features that no table uses are ignored.
        Tables of at most ``4 * max_rows_counted`` rows, and those of which at most
        ``max_rows_counted`` rows are seen, are counted exactly; see :class:`TableCounts`.

        Args:
            batches: Yields KeyedJaggedTensors or objects with a ``sparse_features`` attribute.
            model: The model before sharding; meta device is fine.
            num_batches: How many batches to read, at least 1; ``None`` reads to the end.
            max_rows_counted: Most rows of a large table that are counted one by one.

        Returns:
            The statistics; a table without lookups is part of them.

        Raises:
            InputError: If a batch lacks a feature or holds an id outside its table.
            PlanError: If the model has no table, or two of one name.
            PicassoError: If a number is not a positive integer.

        Cost:
            5 to 50 ns per lookup; at most 32 bytes per table and row of ``max_rows_counted``.
        """
        if num_batches is not None:
            _check_count("num_batches", num_batches, at_least=1)
        _check_count("max_rows_counted", max_rows_counted, at_least=1)
        tables, batches_read, samples_read = count_lookups(
            batches, model_tables(model), num_batches, max_rows_counted
        )
        return cls(tables=tables, num_batches=batches_read, num_samples=samples_read)

    @classmethod
    def from_files(
        cls,
        paths: str | PathLike[str] | Iterable[str | PathLike[str]],
        tables: Sequence[ModelTable],
        *,
        hash_ids: bool = False,
        missing_id: int | None = None,
        max_rows_counted: int = MAX_ROWS_COUNTED,
        progress: Callable[[int], None] | None = None,
    ) -> FrequencyStats:
        """Counts the lookups in Parquet data files, in one pass and bounded memory.

        Args:
            paths: One file or several; each line is a sample.
            tables: Tables to count; each feature is a column of integers or of lists of integers.
            hash_ids: Whether ids are taken modulo the table's rows.
            missing_id: Id that stands for a null; ``None`` = a null is no lookup.
            max_rows_counted: Most rows of a large table that are counted one by one.
            progress: Called with the number of samples of each chunk after it is counted.

        Returns:
            The statistics; a table whose ``num_embeddings`` is ``None`` has its largest id plus 1.

        Raises:
            InputError: If a file cannot be read, lacks a column, or holds something else than ids
                of the table; names the file and the column.
            PicassoError: If ``max_rows_counted`` is not a positive integer.

        Cost:
            One core, 100 million lookups of 26 tables: see ``benchmarks/stats_scale.py``.
        """
        _check_count("max_rows_counted", max_rows_counted, at_least=1)
        counts, num_samples = count_files(
            paths,
            tables,
            hash_ids=hash_ids,
            missing_id=missing_id,
            max_rows_counted=max_rows_counted,
            progress=progress,
        )
        return cls(tables=counts, num_samples=num_samples)

    def merge(self, other: FrequencyStats) -> FrequencyStats:
        """Adds the counts of two samples, for instance of two ranks or of two days.

        Exact counts stay exact; bounds on the lookups that other counts lack add up.

        Args:
            other: Statistics of the same model, or of other tables of it.

        Returns:
            Statistics over the union of the tables, the tables of ``self`` first.

        Raises:
            PlanError: If a table differs in its rows or features.
        """
        merged = dict(self.tables)
        for name, theirs in other.tables.items():
            ours = self.tables.get(name)
            if ours is not None:
                _check_same_table(name, ours, theirs)
            merged[name] = theirs if ours is None else ours.merge(theirs)
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
            InputError: If the folder does not exist.
        """
        write_tables(path, self.tables, self.num_batches, self.num_samples)

    @classmethod
    def from_parquet(cls, path: str | PathLike[str]) -> FrequencyStats:
        """Reads what :meth:`to_parquet` wrote.

        Args:
            path: The file.

        Returns:
            Statistics equal to those written.

        Raises:
            InputError: If the file is missing, not Parquet, or does not hold such statistics.
        """
        tables, num_batches, num_samples = read_tables(path)
        return cls(tables=tables, num_batches=num_batches, num_samples=num_samples)

    def to_frame(self) -> pd.DataFrame:
        """Returns a pandas DataFrame with columns ``table, row, count``.

        Returns:
            One line per row counted: tables in model order, count descending, then row ascending.
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

    def summary(self, batch_size: int) -> pd.DataFrame:
        """Summarizes each table: its lookups, its skew, and the distinct rows of a batch.

        Args:
            batch_size: Samples of a batch.

        Returns:
            A pandas DataFrame with one line per table: ``table``, ``rows`` of the table,
            ``features``, ``lookups``, ``pooling_factor`` (lookups per sample over all features; one
            per feature where the samples were not counted), ``distinct`` rows seen, ``unseen_mass``
            (share of future lookups that go to rows never seen), ``unique_per_batch`` (distinct
            rows of a batch), ``rows_for_50``, ``_80``, ``_90`` (fewest rows that take this
            percentage of the lookups), ``max_undercount``.

        Raises:
            PicassoError: If ``batch_size`` is not an integer of at least 0.
        """
        import pandas as pd

        _check_count("batch_size", batch_size, at_least=0)
        lines = []
        for name, counts in self.tables.items():
            spectrum = counts.spectrum()
            per_sample = float(len(counts.feature_names))
            if self.num_samples:
                per_sample = counts.num_lookups / self.num_samples
            line = {
                "table": name,
                "rows": counts.num_embeddings,
                "features": ", ".join(counts.feature_names),
                "lookups": counts.num_lookups,
                "pooling_factor": per_sample,
                "distinct": counts.num_rows_seen,
                "unseen_mass": spectrum.unseen_mass,
                "unique_per_batch": spectrum.expected_unique(int(batch_size) * per_sample),
                **{f"rows_for_{p}": spectrum.rows_for_coverage(p / 100) for p in (50, 80, 90)},
                "max_undercount": counts.max_undercount,
            }
            lines.append(line)
        return pd.DataFrame(lines)

    def coverage(self, table: str, num_rows: int) -> float:
        """Returns the share of a table's lookups that its most frequent rows take.

        Args:
            table: Table name.
            num_rows: Number of most frequent rows.

        Returns:
            Between 0 and 1; 0 for a table without lookups.

        Raises:
            PlanError: If the statistics do not know the table.
            PicassoError: If ``num_rows`` is not an integer of at least 0.
        """
        counts = self._table(table)
        _check_count("num_rows", num_rows, at_least=0)
        return counts.spectrum().coverage(int(num_rows))

    def expected_unique(self, table: str, num_lookups: int) -> float:
        """Returns the expected distinct rows among lookups drawn like the counted ones.

        Unbiased up to the size of the sample (rarefaction). Beyond the sample, rows never seen are
        extrapolated from the rows seen once and twice. Ids that come in bursts, such as histories,
        have fewer distinct rows than independent lookups; how many fewer is known where batches
        were counted (:meth:`collect`), else the estimate is high.

        Args:
            table: Table name.
            num_lookups: Lookups of the table in a batch.

        Returns:
            Rows, between 0 and ``num_lookups``; 0 for a table without lookups.

        Raises:
            PlanError: If the statistics do not know the table.
            PicassoError: If ``num_lookups`` is not an integer of at least 0.

        Source:
            Hurlbert 1971; Colwell et al. 2012, equations 4 and 9.
        """
        counts = self._table(table)
        _check_count("num_lookups", num_lookups, at_least=0)
        return counts.spectrum().expected_unique(int(num_lookups))

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


def _check_same_table(name: str, ours: TableCounts, theirs: TableCounts) -> None:
    for what, mine, other in (
        ("rows", ours.num_embeddings, theirs.num_embeddings),
        ("features", ours.feature_names, theirs.feature_names),
    ):
        if mine != other:
            raise PlanError(
                f"cannot merge statistics of different models: table {name!r} has {what} {mine} "
                f"here and {other} there; merge only statistics collected with one model"
            )


def _check_count(name: str, value: object, *, at_least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, Integral) or int(value) < at_least:
        raise PicassoError(f"{name} is {value!r}, expected an integer of at least {at_least}")
