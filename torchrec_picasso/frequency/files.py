"""Reads ids from Parquet data files in chunks, and counts them.

Only the columns of counted features are decoded, in the calling thread. Compressed columns are read
through small buffers, so memory does not depend on the size of row groups.

Shape letters: N lookups.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from os import PathLike
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from torchrec_picasso.errors import InputError
from torchrec_picasso.frequency.counts import ModelTable, TableCounts, lookup_counter

__all__ = ["CHUNK_ROWS", "count_files", "num_samples_of"]

CHUNK_ROWS = 1 << 18
"""Samples per chunk: 2 MiB per column of int64."""

_READ_BUFFER_BYTES = 1 << 20


def count_files(
    paths: str | PathLike[str] | Iterable[str | PathLike[str]],
    tables: Sequence[ModelTable],
    *,
    hash_ids: bool,
    missing_id: int | None,
    max_rows_counted: int,
    progress: Callable[[int], None] | None,
) -> tuple[dict[str, TableCounts], int]:
    """Counts the lookups in files; arguments and errors as for ``FrequencyStats.from_files``.

    Returns:
        Counts by table name, number of samples read.
    """
    files = [Path(paths)] if isinstance(paths, (str, PathLike)) else [Path(path) for path in paths]
    if not files:
        raise InputError("no data files were given; name at least one Parquet file")
    # a feature of several tables is read once
    columns = list(dict.fromkeys(name for table in tables for name in table.feature_names))
    for path in files:  # all files are checked before the first, possibly for hours, is counted
        _check_columns(path, columns)
    counters = [lookup_counter(table, max_rows_counted) for table in tables]
    num_samples = 0
    for path in files:
        for batch in _read_chunks(path, columns):
            for table, counter in zip(tables, counters):
                for feature in table.feature_names:
                    try:
                        ids_N = _row_ids(batch.column(feature), table, hash_ids, missing_id)
                    except InputError as error:
                        raise InputError(f"{path}: column {feature} {error}") from error
                    counter.add(ids_N)
            num_samples += batch.num_rows
            if progress is not None:
                progress(batch.num_rows)
    return {table.name: counter.result() for table, counter in zip(tables, counters)}, num_samples


def num_samples_of(path: str | PathLike[str]) -> int:
    """Reads the number of samples in a Parquet file from its footer.

    Raises:
        InputError: If the file cannot be read.
    """
    with _open(Path(path)) as file:
        num_rows: int = file.metadata.num_rows
    return num_rows


def _open(path: Path) -> pq.ParquetFile:
    if not path.is_file():
        raise InputError(f"{path}: no such file; name Parquet files, not folders")
    if path.stat().st_size == 0:
        raise InputError(f"{path}: the file is empty (0 bytes); expected Parquet")
    try:
        return pq.ParquetFile(path, buffer_size=_READ_BUFFER_BYTES, pre_buffer=False)
    except (pa.ArrowException, OSError) as error:
        raise InputError(f"{path}: not readable as Parquet ({_first_line(error)})") from error


def _read_chunks(path: Path, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
    with _open(path) as file:
        try:
            yield from file.iter_batches(CHUNK_ROWS, columns=list(columns), use_threads=False)
        except (pa.ArrowException, OSError) as error:
            raise InputError(f"{path}: damaged Parquet file ({_first_line(error)})") from error


def _check_columns(path: Path, columns: Sequence[str]) -> None:
    """Refuses a file that lacks a column, or whose ids are not integers."""
    with _open(path) as file:
        schema = file.schema_arrow
    missing = [name for name in columns if name not in schema.names]
    if missing:
        raise InputError(
            f"{path}: missing column {', '.join(missing)}; the file has "
            f"{', '.join(schema.names) or 'no columns'}; check the feature names"
        )
    for name in columns:
        kind = schema.field(name).type
        if not pa.types.is_integer(kind.value_type if _is_list(kind) else kind):
            raise InputError(
                f"{path}: column {name} holds {kind}, expected integers or lists of integers; "
                "convert it to integer ids first"
            )


def _row_ids(column: pa.Array, table: ModelTable, hash_ids: bool, missing_id: int | None) -> Tensor:
    """Converts a column to row ids, int64, shape ``(N,)``; the caller adds file and column to
    messages."""
    if _is_list(column.type):
        column = column.flatten()
    try:
        column = column.cast(pa.int64())
    except pa.ArrowInvalid as error:  # only uint64 has larger values
        raise InputError("holds an id of 2**63 or more; convert its ids to int64 first") from error
    column = column.drop_null() if missing_id is None else column.fill_null(missing_id)
    # copied, because Arrow's memory is read-only
    ids_N = torch.from_numpy(column.to_numpy(zero_copy_only=False).copy())
    if hash_ids and table.num_embeddings is not None:
        return ids_N.remainder_(table.num_embeddings)
    if (outside := table.id_outside(ids_N)) is not None:
        raise InputError(
            f"holds id {outside}, but the rows of table {table.name!r} are {table.row_range}; give "
            "the table more rows, or take ids modulo the rows"
        )
    return ids_N


def _is_list(kind: pa.DataType) -> bool:
    return (
        pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    )


def _first_line(error: BaseException) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
