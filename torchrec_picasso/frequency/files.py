"""Reads ids from Parquet data files, some columns and a chunk at a time, and counts them.

Only the columns that tables look up are decoded, in the calling thread. A chunk is a few tens of
megabytes; compressed columns are read through small buffers, so files with huge row groups are read
in the same memory.

Shape letters: N lookups.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch
from torch import Tensor

from torchrec_picasso.errors import InputError
from torchrec_picasso.frequency.accumulate import MAX_ROWS_COUNTED, CountAccumulator
from torchrec_picasso.frequency.counts import TableCounts
from torchrec_picasso.frequency.table import ModelTable

__all__ = [
    "CHUNK_ROWS",
    "Paths",
    "Reading",
    "check_columns",
    "column_ids",
    "count_files",
    "list_paths",
    "num_samples_of",
    "read_batches",
]

Paths = str | PathLike[str] | Iterable[str | PathLike[str]]

CHUNK_ROWS = 1 << 18
"""Samples read at a time: 2 MiB per column of int64."""

_READ_BUFFER_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Reading:
    """How values of a column become row ids.

    Args:
        hash_ids: Whether ids are taken modulo the table's rows.
        missing_id: The id that a null stands for; ``None`` = no lookup.
        chunk_rows: Samples read at a time.
    """

    hash_ids: bool = False
    missing_id: int | None = None
    chunk_rows: int = CHUNK_ROWS


def count_files(
    paths: Paths,
    tables: Sequence[ModelTable],
    reading: Reading,
    max_rows_counted: int = MAX_ROWS_COUNTED,
    progress: Callable[[int], None] | None = None,
) -> tuple[dict[str, TableCounts], int]:
    """Counts the lookups in files.

    Args:
        paths: One Parquet file or several.
        tables: Tables to count; their features are columns.
        reading: How values become row ids.
        max_rows_counted: Rows of a table that are counted one by one, about.
        progress: Called with the samples of each chunk once they are counted.

    Returns:
        Counts per table name, samples read.

    Raises:
        InputError: If a file cannot be read, lacks a column or holds an id outside its table.
    """
    files = list_paths(paths)
    counters = [CountAccumulator(table, max_rows_counted) for table in tables]
    columns = list(dict.fromkeys(name for table in tables for name in table.feature_names))
    for path in files:  # before hours of counting, not after
        check_columns(path, columns)
    num_samples = 0
    for path in files:
        for batch in read_batches(path, columns, reading.chunk_rows):
            for table, counter in zip(tables, counters):
                for feature in table.feature_names:
                    ids_N = column_ids(batch.column(feature), path, feature, reading, table, files)
                    counter.add(feature, ids_N, batch.num_rows)
            num_samples += batch.num_rows
            if progress is not None:
                progress(batch.num_rows)
    return {table.name: counter.result() for table, counter in zip(tables, counters)}, num_samples


def list_paths(paths: Paths) -> list[Path]:
    """The files, at least one.

    Raises:
        InputError: If there is none.
    """
    files = [Path(paths)] if isinstance(paths, (str, PathLike)) else [Path(path) for path in paths]
    if not files:
        raise InputError("no data files were given; name at least one Parquet file")
    return files


def num_samples_of(paths: Paths) -> int:
    """Samples in files, from their footers alone.

    Raises:
        InputError: If a file cannot be read.
    """
    total = 0
    for path in list_paths(paths):
        with open_file(path) as file:
            total += file.metadata.num_rows
    return total


def open_file(path: Path) -> pq.ParquetFile:
    """Opens a Parquet file.

    Raises:
        InputError: If it is missing, empty or damaged.
    """
    if not path.is_file():
        raise InputError(f"{path}: no such file; name Parquet files, not folders")
    if path.stat().st_size == 0:
        raise InputError(f"{path}: the file is empty (0 bytes); expected Parquet")
    try:
        return pq.ParquetFile(path, buffer_size=_READ_BUFFER_BYTES, pre_buffer=False)
    except (pa.ArrowException, OSError) as error:
        raise InputError(f"{path}: not readable as Parquet ({_first_line(error)})") from error


def read_batches(path: Path, columns: Sequence[str], chunk_rows: int) -> Iterator[pa.RecordBatch]:
    """The columns of a file, a chunk of samples at a time.

    Raises:
        InputError: If the file is damaged.
    """
    with open_file(path) as file:
        try:
            yield from file.iter_batches(chunk_rows, columns=list(columns), use_threads=False)
        except (pa.ArrowException, OSError) as error:
            raise InputError(f"{path}: damaged Parquet file ({_first_line(error)})") from error


def column_ids(
    column: pa.Array,
    path: Path,
    feature: str,
    reading: Reading,
    table: ModelTable,
    files: Sequence[Path] = (),
) -> Tensor:
    """The row ids of a column, int32 or int64, shape ``(N,)``: those of all samples in a row.

    Args:
        column: Integers or lists of integers.
        path: For messages, as is ``feature``.
        feature: The column's name.
        reading: How values become row ids.
        table: The table that the feature looks up.
        files: All files, to say how many rows would do.

    Raises:
        InputError: If an id is outside the table.
    """
    if _is_list(column.type):
        column = column.flatten()
    if column.null_count:
        missing = reading.missing_id
        column = column.drop_null() if missing is None else _filled(column, missing)
    if column.type not in (pa.int32(), pa.int64()):
        column = _as_int64(column, path, feature)
    ids_N: np.ndarray = column.to_numpy()
    if reading.hash_ids and table.num_embeddings is not None:
        ids_N = np.mod(ids_N, np.int64(table.num_embeddings))
    elif ids_N.size:
        smallest, largest = int(ids_N.min()), int(ids_N.max())
        num_embeddings = table.num_embeddings
        if smallest < 0 or (num_embeddings is not None and largest >= num_embeddings):
            raise InputError(_outside(path, feature, table, smallest, largest, files or (path,)))
    return torch.from_numpy(np.array(ids_N))  # a copy: Arrow's memory is read-only


def check_columns(path: Path, columns: Sequence[str], also: Sequence[str] = ()) -> None:
    """Refuses a file that lacks a column, or whose ids are not integers.

    Args:
        path: A Parquet file.
        columns: Columns of ids.
        also: Further columns that must be there.

    Raises:
        InputError: Names the file and the column.
    """
    with open_file(path) as file:
        schema = file.schema_arrow
    missing = [name for name in (*columns, *also) if name not in schema.names]
    if missing:
        raise InputError(
            f"{path}: missing column {', '.join(missing)}; the file has "
            f"{', '.join(schema.names) or 'none'}; check the feature names"
        )
    for name in columns:
        found = schema.field(name).type
        of = found.value_type if _is_list(found) else found
        if not pa.types.is_integer(of):
            raise InputError(
                f"{path}: column {name} holds {found}, expected integers or lists of integers; map "
                "it to integer ids first"
            )


def _is_list(kind: pa.DataType) -> bool:
    return (
        pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    )


def _filled(column: pa.Array, missing_id: int) -> pa.Array:
    return column.cast(pa.int64()).fill_null(missing_id)


def _as_int64(column: pa.Array, path: Path, feature: str) -> pa.Array:
    try:
        return column.cast(pa.int64())
    except pa.ArrowInvalid as error:  # uint64 alone can hold more
        raise InputError(
            f"{path}: column {feature} holds an id of 2**63 or more ({_first_line(error)}); map "
            "its ids to int64 first"
        ) from error


def _outside(
    path: Path,
    feature: str,
    table: ModelTable,
    smallest: int,
    largest: int,
    files: Sequence[Path],
) -> str:
    """The message for an id outside its table, with the rows that all files ask for."""
    place = f"{path}: column {feature} holds id {smallest if smallest < 0 else largest}"
    rows = f"the rows of table {table.name!r} are {table.row_range}"
    if smallest < 0:
        return f"{place}, but {rows}; map ids to rows from 0 on, or take them modulo the rows"
    for file in files:
        for batch in read_batches(file, [feature], CHUNK_ROWS):
            column = batch.column(feature)
            top = pc.max(column.flatten() if _is_list(column.type) else column).as_py()
            largest = max(largest, -1 if top is None else top)
    return (
        f"{place}, but {rows}; the smallest num_embeddings that would do for this column is "
        f"{largest + 1}, or take ids modulo the rows"
    )


def _first_line(error: BaseException) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
