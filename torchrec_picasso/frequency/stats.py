"""Frequency statistics: how often each row of each table was looked up in a sample of batches.

The sample decides nothing about correctness, only about speed: a hot set chosen from poor
statistics trains exactly the same model. A plain value: no process group, picklable, and two of
them merge, so each rank may count its own batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from os import PathLike
from typing import TYPE_CHECKING

import torch
from torch import nn

from torchrec_picasso.errors import PicassoError, PlanError
from torchrec_picasso.frequency.accumulate import MAX_ROWS_COUNTED
from torchrec_picasso.frequency.collect import count_lookups, model_tables
from torchrec_picasso.frequency.counts import TableCounts
from torchrec_picasso.frequency.files import CHUNK_ROWS, Reading, count_files
from torchrec_picasso.frequency.parquet import read_tables, write_tables
from torchrec_picasso.frequency.spectrum import CountSpectrum
from torchrec_picasso.frequency.split import coverage, expected_unique_cold
from torchrec_picasso.frequency.summary import summarize
from torchrec_picasso.frequency.table import ModelTable

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["FrequencyStats"]


@dataclass(frozen=True)
class FrequencyStats:
    """Lookup counts of a model's tables over a sample of batches.

    Args:
        tables: Counts by table name, in model order.
        num_batches: Batches the sample held; 0 where it was read from files.
        num_samples: Samples it held; both are whole numbers unless decayed.
    """

    tables: Mapping[str, TableCounts]
    num_batches: float = 0
    num_samples: float = 0

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
            max_rows_counted: Rows of a table that are counted one by one, 16 bytes each.

        Returns:
            The statistics; a table without lookups is part of them.

        Raises:
            InputError: If a batch lacks a feature or holds an id outside its table.
            PlanError: If the model has no table, or two of one name.
            PicassoError: If a number is not a positive integer.

        Cost:
            5 to 50 ns per lookup; at most 16 bytes per table and row of ``max_rows_counted``.
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
        chunk_rows: int = CHUNK_ROWS,
        progress: Callable[[int], None] | None = None,
    ) -> FrequencyStats:
        """Counts the lookups in Parquet data files, in one pass and bounded memory.

        Args:
            paths: One file or several; each line is a sample.
            tables: Tables to count; each feature is a column of integers or of lists of integers.
            hash_ids: Whether ids are taken modulo the table's rows.
            missing_id: The id that a null stands for; ``None`` = no lookup.
            max_rows_counted: Rows of a table that are counted one by one, as in :meth:`collect`.
            chunk_rows: Samples read at a time.
            progress: Called with the samples of each chunk once they are counted.

        Returns:
            The statistics; tables whose ``num_embeddings`` is ``None`` get the fewest that do.

        Raises:
            InputError: If a file cannot be read, lacks a column, or holds something else than ids
                of the table; names the file and the column.
            PicassoError: If a number is not a positive integer.

        Cost:
            One core, 100 million lookups of 26 tables: see ``benchmarks/stats_scale.py``.
        """
        _check_count("max_rows_counted", max_rows_counted, at_least=1)
        _check_count("chunk_rows", chunk_rows, at_least=1)
        reading = Reading(hash_ids=hash_ids, missing_id=missing_id, chunk_rows=chunk_rows)
        counts, num_samples = count_files(paths, tables, reading, max_rows_counted, progress)
        return cls(tables=counts, num_samples=num_samples)

    def merge(
        self, other: FrequencyStats, *, max_rows_counted: int | None = None
    ) -> FrequencyStats:
        """Adds the counts of two samples, for instance of two ranks or of two days.

        Exact counts stay exact; bounds on what others may lack add up.

        Args:
            other: Statistics of the same model, or of other tables of it.
            max_rows_counted: Rows of a table that stay counted one by one; ``None`` = all of both.

        Returns:
            Statistics over the union of the tables, these tables first.

        Raises:
            PlanError: If a table differs in its rows or features.
            PicassoError: If ``max_rows_counted`` is not a positive integer.
        """
        if max_rows_counted is not None:
            _check_count("max_rows_counted", max_rows_counted, at_least=1)
        merged = dict(self.tables)
        for name, theirs in other.tables.items():
            ours = self.tables.get(name)
            if ours is not None:
                _check_same_table(name, ours, theirs)
                merged[name] = ours.merge(theirs, max_rows_counted)
            else:
                merged[name] = theirs
        return FrequencyStats(
            tables=merged,
            num_batches=self.num_batches + other.num_batches,
            num_samples=self.num_samples + other.num_samples,
        )

    def decayed(self, factor: float) -> FrequencyStats:
        """These statistics with every number scaled, to weigh them less than newer ones.

        ``stats.decayed(0.5).merge(newer)`` after every window halves what is one window old.

        Args:
            factor: Above 0, at most 1.

        Returns:
            Statistics whose counts are float64; the same for a factor of 1.

        Raises:
            PicassoError: If ``factor`` is out of range.
        """
        if not isinstance(factor, Real) or not 0 < float(factor) <= 1:
            raise PicassoError(f"factor is {factor!r}, expected a number above 0 and at most 1")
        if factor == 1:
            return self
        return FrequencyStats(
            tables={name: counts.decayed(float(factor)) for name, counts in self.tables.items()},
            num_batches=self.num_batches * float(factor),
            num_samples=self.num_samples * float(factor),
        )

    def to_parquet(self, path: str | PathLike[str]) -> None:
        """Writes columns ``table, row, count``; facts per table ride in the schema metadata.

        The file appears under its name only when it is whole.

        Args:
            path: File to write or to replace; its folder exists.

        Raises:
            PicassoError: If the folder does not exist.
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
            PicassoError: If the file is missing, empty, not Parquet, or not such statistics.
        """
        tables, num_batches, num_samples = read_tables(path)
        return cls(tables=tables, num_batches=num_batches, num_samples=num_samples)

    def to_frame(self) -> pd.DataFrame:
        """A pandas DataFrame with columns ``table, row, count``.

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
        """One line per table: how much it is looked up, how skewed, and what a batch makes of it.

        Args:
            batch_size: Samples of a batch.

        Returns:
            A pandas DataFrame; columns in :data:`torchrec_picasso.frequency.summary.COLUMNS`.

        Raises:
            PicassoError: If ``batch_size`` is not an integer of at least 0.
        """
        _check_count("batch_size", batch_size, at_least=0)
        return summarize(self.tables, self.num_samples, int(batch_size))

    def spectrum(self, table: str) -> CountSpectrum:
        """How many rows of a table were looked up how often.

        Args:
            table: Table name.

        Raises:
            PlanError: If the statistics do not know the table.
        """
        return self._table(table).spectrum()

    def pooling_factor(self, feature: str) -> float:
        """Lookups per sample of a feature, samples without lookups included.

        Args:
            feature: Feature name.

        Raises:
            PlanError: If no table has the feature, or the statistics hold only counts of rows.
        """
        for counts in self.tables.values():
            if feature in counts.feature_names:
                return counts.pooling_factor(feature)
        known = [name for counts in self.tables.values() for name in counts.feature_names]
        raise PlanError(
            f"no table of the statistics has feature {feature!r}; they know {known}. Check the name"
        )

    def num_distinct(self, table: str) -> int:
        """Distinct rows seen, an estimate where the table was too large to count each.

        Args:
            table: Table name.

        Raises:
            PlanError: If the statistics do not know the table.
        """
        return self._table(table).num_rows_seen

    def unseen_mass(self, table: str) -> float:
        """Share of future lookups that go to rows the sample never saw (Good-Turing).

        Args:
            table: Table name.

        Returns:
            Between 0 and 1; 1 for a table without lookups.

        Raises:
            PlanError: If the statistics do not know the table.
        """
        return self._table(table).spectrum().unseen_mass

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
        return coverage(counts.spectrum(), int(num_rows))

    def expected_unique(self, table: str, num_lookups: int) -> float:
        """Expected distinct rows among lookups drawn like the counted ones, by rarefaction.

        Unbiased up to the size of the sample; beyond it, rows never seen are extrapolated from
        those seen once and twice. Ids that come in bursts repeat more than independent lookups do;
        how much more is known where batches were counted (:meth:`collect`), else this is high.

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

    def expected_unique_cold(self, table: str, num_lookups: int, num_hot: int) -> float:
        """Expected distinct rows of a future batch outside the most frequent ones.

        Args:
            table: Table name.
            num_lookups: Lookups of the table in the batch.
            num_hot: Its most frequent rows by these statistics, which are hot.

        Returns:
            Rows; what :meth:`expected_unique` says where nothing is hot.

        Raises:
            PlanError: If the statistics do not know the table.
            PicassoError: If a number is not an integer of at least 0.

        Source:
            :mod:`torchrec_picasso.frequency.split`.
        """
        counts = self._table(table)
        _check_count("num_lookups", num_lookups, at_least=0)
        _check_count("num_hot", num_hot, at_least=0)
        return expected_unique_cold(counts.spectrum(), int(num_lookups), int(num_hot))

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
