"""Frequency statistics: lookup counts of each row of each table in a sample of batches.

The statistics affect speed only: a hot set from poor statistics trains exactly the same model. They
are a picklable value without a process group, and can be merged, so each rank may count its own
batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from numbers import Integral
from os import PathLike
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn

from torchrec_picasso.errors import PicassoError, PlanError
from torchrec_picasso.frequency.collect import (
    batch_features,
    batch_ids,
    chunk_ids,
    model_tables,
    read_chunks,
)
from torchrec_picasso.frequency.counts import (
    MAX_ROWS_COUNTED,
    LookupCounter,
    ModelTable,
    TableCounts,
)
from torchrec_picasso.frequency.parquet import read_tables, write_tables

if TYPE_CHECKING:
    import pandas as pd

_MEASURED_BATCHES = 16
"""Number of first batches whose distinct rows are counted per batch."""


@dataclass(frozen=True)
class FrequencyStats:
    """Lookup counts of a model's tables over a sample of batches."""

    tables: Mapping[str, TableCounts]
    """Counts by table name, in model order."""
    num_batches: int = 0
    """Number of counted batches; 0 if counted in files."""
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
        """Counts every lookup of a stream of batches in a model's tables.

        A feature of two tables counts in both; features without a table are ignored. Counts are
        exact for tables with at most ``4 * max_rows_counted`` rows, and for tables with at most
        ``max_rows_counted`` seen rows; see :class:`TableCounts`.

        Takes 5 to 50 ns per lookup, and at most 32 bytes per table and row of ``max_rows_counted``.

        Args:
            batches: KeyedJaggedTensors, or objects with a KeyedJaggedTensor ``sparse_features``.
            model: The unsharded model; may be on the meta device.
            num_batches: Maximum number of batches to read, at least 1; ``None`` = all.
            max_rows_counted: Maximum number of sorted rows, see :class:`.LookupCounter`.

        Raises:
            InputError: If a batch lacks a feature or contains an id outside its table.
            PlanError: If the model has no table, or two tables with the same name.
            PicassoError: If a number is not a positive integer.
        """
        if num_batches is not None:
            _check_count("num_batches", num_batches, at_least=1)
        _check_count("max_rows_counted", max_rows_counted, at_least=1)
        tables = model_tables(model)
        counters = [LookupCounter(table, max_rows_counted) for table in tables]
        # lookups and distinct rows of each of the first batches, by table
        sizes: list[list[tuple[int, int]]] = [[] for _ in tables]
        batches_read = samples_read = 0
        for batch in islice(batches, num_batches):
            features = batch_features(batch)
            for table, counter, measured in zip(tables, counters, sizes):
                ids_N = batch_ids(features, table)
                counter.add(ids_N)
                if batches_read < _MEASURED_BATCHES:
                    measured.append((ids_N.size, np.unique(ids_N).size))
            batches_read += 1
            samples_read += features.stride()
        counts = {
            table.name: _with_share(counter.result(), measured)
            for table, counter, measured in zip(tables, counters, sizes)
        }
        return cls(tables=counts, num_batches=batches_read, num_samples=samples_read)

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
        """Counts the lookups in Parquet data files, in one pass and bounded memory; 100 million
        lookups take 3 to 32 seconds of one core.

        Args:
            paths: One file or several; each line is a sample.
            tables: Tables to count; each feature is a column of integers or of lists of integers.
                ``num_embeddings=None`` is replaced by the largest id plus 1.
            hash_ids: Whether ids are taken modulo the number of rows of the table.
            missing_id: Id that replaces a null; ``None`` = a null is no lookup.
            max_rows_counted: Maximum number of sorted rows, see :class:`.LookupCounter`.
            progress: Called with the number of samples of each counted chunk.

        Raises:
            InputError: If a file cannot be read, lacks a column, or contains values that are no ids
                of the table; names the file and the column.
            PicassoError: If ``max_rows_counted`` is not a positive integer.
        """
        _check_count("max_rows_counted", max_rows_counted, at_least=1)
        counters = {table.name: LookupCounter(table, max_rows_counted) for table in tables}
        num_samples = 0
        for path, chunk in read_chunks(paths, tables):
            for table in tables:
                ids_N = chunk_ids(path, chunk, table, hash_ids, missing_id)
                counters[table.name].add(ids_N)
            num_samples += chunk.num_rows
            if progress is not None:
                progress(chunk.num_rows)
        counts = {name: counter.result() for name, counter in counters.items()}
        return cls(tables=counts, num_samples=num_samples)

    def merge(self, other: FrequencyStats) -> FrequencyStats:
        """Adds the counts of two samples, for instance of two ranks or two days.

        Exact counts stay exact; the error bounds of other counts are added. ``other`` may have
        other tables of the same model, which follow the tables of ``self``. Raises PlanError if a
        table has different rows or features in both.
        """
        merged = dict(self.tables)
        for name, second in other.tables.items():
            first = merged.get(name, second)
            for what in ("num_embeddings", "feature_names"):
                expected, found = getattr(first, what), getattr(second, what)
                if expected != found:
                    raise PlanError(
                        f"cannot merge statistics of different models: table {name!r} has {what} "
                        f"{expected} and {found}; merge statistics of the same model only"
                    )
            merged[name] = first.merge(second) if name in merged else second
        num_batches = self.num_batches + other.num_batches
        return FrequencyStats(merged, num_batches, self.num_samples + other.num_samples)

    def to_parquet(self, path: str | PathLike[str]) -> None:
        """Writes columns ``table, row, count``, with metadata per table in the schema.

        The file gets its name only after it is complete; an existing file is replaced. Raises
        InputError if the folder does not exist.
        """
        write_tables(path, self.tables, self.num_batches, self.num_samples)

    @classmethod
    def from_parquet(cls, path: str | PathLike[str]) -> FrequencyStats:
        """Reads a file of :meth:`to_parquet`; the statistics are equal to the written ones. Raises
        InputError if the file is missing, is not Parquet, or contains no valid statistics."""
        tables, num_batches, num_samples = read_tables(path)
        return cls(tables=tables, num_batches=num_batches, num_samples=num_samples)

    def to_frame(self) -> pd.DataFrame:
        """Returns a pandas DataFrame with columns ``table, row, count``, one line per counted row:
        tables in model order, then by descending count, then by row."""
        import pandas as pd

        # (U,) rows and counts of each table, concatenated to three columns
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
        """Summarizes lookups, skew, and distinct rows of a batch of ``batch_size`` samples.

        Returns:
            A pandas DataFrame with one line per table: ``table``, ``rows`` of the table,
            ``features``, ``lookups``, ``pooling_factor`` (lookups per sample over all features; one
            per feature if samples were not counted), ``distinct`` seen rows, ``unseen_mass``
            (expected share of future lookups of unseen rows), ``unique_per_batch`` (expected
            distinct rows of a batch), ``rows_for_50``, ``_80``, ``_90`` (smallest number of rows
            with this percentage of the lookups), ``max_undercount``.

        Raises:
            PicassoError: If ``batch_size`` is not an integer of at least 0.
        """
        import pandas as pd

        _check_count("batch_size", batch_size, at_least=0)
        lines = []
        for name, counts in self.tables.items():
            spectrum = counts.spectrum
            # lookups per sample; without a number of samples, one per feature
            per_sample = float(len(counts.feature_names))
            if self.num_samples:
                per_sample = counts.num_lookups / self.num_samples
            lines.append(
                {
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
            )
        return pd.DataFrame(lines)

    def coverage(self, table: str, num_rows: int) -> float:
        """Returns the share of lookups of the ``num_rows`` most frequent rows of a table, 0 to 1; 0
        for a table without lookups. Raises PlanError if the statistics lack the table, PicassoError
        if ``num_rows`` is not an integer of at least 0."""
        counts = self.table(table)
        _check_count("num_rows", num_rows, at_least=0)
        return counts.spectrum.coverage(int(num_rows))

    def expected_unique(self, table: str, num_lookups: int) -> float:
        """Returns the expected number of distinct rows of a table in a batch with ``num_lookups``
        lookups of it; 0 for a table without lookups.

        The estimate is unbiased up to the size of the sample (rarefaction, Hurlbert 1971). Beyond
        it, unseen rows are extrapolated from the rows seen once and twice (Colwell et al. 2012,
        equations 4 and 9). Ids that come in bursts, such as histories, have fewer distinct rows
        than independent lookups: :meth:`collect` measures the difference; without it, as after
        :meth:`from_files`, the estimate is too high. Raises PlanError if the statistics lack the
        table, PicassoError if ``num_lookups`` is not an integer of at least 0.
        """
        counts = self.table(table)
        _check_count("num_lookups", num_lookups, at_least=0)
        return counts.spectrum.expected_unique(int(num_lookups))

    def check_model(self, tables: Mapping[str, int]) -> None:
        """Raises PlanError for statistics of another model: if they lack one of ``tables``, given
        as numbers of rows by table name, or have it with another number."""
        for name, num_embeddings in tables.items():
            counts = self.table(name)
            if counts.num_embeddings != num_embeddings:
                raise PlanError(
                    f"table {name!r} has {num_embeddings} rows in the model, but "
                    f"{counts.num_embeddings} in the statistics; collect statistics for this model"
                )

    def table(self, name: str) -> TableCounts:
        """Returns the counts of one table; ``PlanError`` if the statistics lack it."""
        if name not in self.tables:
            raise PlanError(
                f"the statistics have no table {name!r}, only {list(self.tables)}; check the name, "
                "or collect statistics for this model"
            )
        return self.tables[name]


def _with_share(counts: TableCounts, measured: Sequence[tuple[int, int]]) -> TableCounts:
    """Fits the effective share of counts to the lookups and distinct rows of some batches."""
    # a single batch is the whole sample: its distinct rows show nothing beyond the counts
    if len(measured) < 2:
        return counts
    num_lookups, num_distinct = np.mean(measured, axis=0)
    share = counts.spectrum.fit_share(num_lookups, num_distinct, len(measured))
    return replace(counts, effective_share=share)


def _check_count(name: str, value: object, *, at_least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, Integral) or int(value) < at_least:
        raise PicassoError(f"{name} is {value!r}, expected an integer of at least {at_least}")
