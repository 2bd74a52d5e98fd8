"""Cuts a stream of ids into windows of time, from memory or from Parquet files with a time column.

Time must not go backwards over a window's border: a window that is over is not opened again, so one
window at a time is in memory.

Shape letters: N lookups.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from torch import Tensor

from torchrec_picasso.errors import InputError
from torchrec_picasso.frequency.files import (
    Paths,
    Reading,
    check_columns,
    column_ids,
    list_paths,
    read_batches,
)
from torchrec_picasso.frequency.table import ModelTable

__all__ = ["TimedIds", "check_window", "cut_windows", "read_windows"]

_SECONDS_OF_UNIT = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}


@dataclass(frozen=True, kw_only=True)
class TimedIds:
    """Ids that were looked up in one window.

    Args:
        window: Windows since time 0.
        ids: Ids by table and feature, each ``(N,)``.
        num_samples: Samples they come from.
    """

    window: int
    ids: Mapping[tuple[str, str], Tensor]
    num_samples: int = 0


def cut_windows(
    chunks: Iterable[tuple[float, Mapping[str, Tensor]]], window: float
) -> Iterator[TimedIds]:
    """Numbers the windows of chunks ``(time, {table: ids})``.

    Args:
        chunks: In order of time.
        window: Length of a window, in the unit of the times.

    Raises:
        InputError: If time goes back to an earlier window.
    """
    newest = None
    for time, ids in chunks:
        number = int(np.floor(time / window))
        _check_order(newest, number, "the chunks")
        newest = number
        yield TimedIds(window=number, ids={(table, table): of for table, of in ids.items()})


def read_windows(
    paths: Paths,
    tables: Sequence[ModelTable],
    time_column: str,
    window_s: float,
    *,
    time_unit: str | None = None,
    reading: Reading | None = None,
    progress: Callable[[int], None] | None = None,
) -> Iterator[TimedIds]:
    """Reads files whose samples are in order of time.

    Args:
        paths: Parquet files, in order of time.
        tables: Tables; their features are columns.
        time_column: Integers, numbers or timestamps.
        window_s: Seconds of a window.
        time_unit: Unit of a column of numbers: ``s``, ``ms``, ``us`` or ``ns``; ``None`` = as the
            column's name ends (``ts_ms``).
        reading: How values become row ids.
        progress: Called with the samples of each chunk.

    Yields:
        A window's ids, in one piece or several.

    Raises:
        InputError: If a file cannot be used, the unit is not known, or time goes backwards.
    """
    reading = reading or Reading()
    check_window(window_s)
    files = list_paths(paths)
    features = list(dict.fromkeys(name for table in tables for name in table.feature_names))
    columns = list(dict.fromkeys([time_column, *features]))
    for path in files:
        check_columns(path, features, also=[time_column])
    newest = None
    for path in files:
        for batch in read_batches(path, columns, reading.chunk_rows):
            seconds_B = _seconds(batch.column(time_column), path, time_column, time_unit)
            number_B = np.floor(seconds_B / window_s).astype(np.int64)
            edges = [0, *(np.flatnonzero(np.diff(number_B)) + 1).tolist(), number_B.size]
            for start, stop in pairwise(edges):
                if start == stop:
                    continue
                number = int(number_B[start])
                _check_order(newest, number, f"{path}, column {time_column}")
                newest = number
                piece = batch.slice(start, stop - start)
                yield TimedIds(
                    window=number,
                    ids={
                        (table.name, name): column_ids(
                            piece.column(name), path, name, reading, table, files
                        )
                        for table in tables
                        for name in table.feature_names
                    },
                    num_samples=stop - start,
                )
            if progress is not None:
                progress(batch.num_rows)


def check_window(window: float) -> None:
    """Refuses a window without length.

    Raises:
        InputError: If it is not above 0.
    """
    if not window > 0:
        raise InputError(f"window is {window!r}, expected a length of time above 0")


def _check_order(newest: int | None, number: int, where: str) -> None:
    if newest is not None and number < newest:
        raise InputError(
            f"{where}: time goes back by {newest - number} windows; sort the samples by time, and "
            "give files in order of time"
        )


def _seconds(column: pa.Array, path: Path, name: str, time_unit: str | None) -> NDArray[np.float64]:
    if column.null_count:
        raise InputError(f"{path}: column {name} has nulls; every sample needs its time")
    if pa.types.is_timestamp(column.type):
        time_unit = column.type.unit
        column = column.cast(pa.int64())
    elif not (pa.types.is_integer(column.type) or pa.types.is_floating(column.type)):
        raise InputError(f"{path}: column {name} holds {column.type}, expected numbers or times")
    unit = time_unit or name.rpartition("_")[2]
    if unit not in _SECONDS_OF_UNIT:
        raise InputError(
            f"{path}: column {name} holds numbers of an unknown unit of time; say which, one of "
            f"{', '.join(_SECONDS_OF_UNIT)}"
        )
    seconds: NDArray[np.float64] = column.to_numpy().astype(np.float64) * _SECONDS_OF_UNIT[unit]
    return seconds
