"""Reads clicks from a Parquet file of a kind that its columns tell, a window of them at a time."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import pairwise
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from torchrec_picasso.app.zoo.data import alimama, globo
from torchrec_picasso.app.zoo.data.clicks import Clicks
from torchrec_picasso.errors import InputError

__all__ = ["MOST_SAMPLES", "ClickFile", "largest_id", "read_clicks"]

_KINDS = {"Alimama's rows": alimama.COLUMNS, "Globo's clicks": globo.COLUMNS}
MOST_SAMPLES = 1 << 18
"""Of a window, unless one row group of the file has more: some 200 MB with histories of 50."""
_SAMPLES_OF_CLICK = 2


class ClickFile:
    """The clicks of a file. Rows that hold their own histories are read in windows of whole row
    groups. A log is in windows of rows, whose histories reach into the window before; where it is
    one, its clicks may have any order.

    Args:
        path: Of a Parquet file of Alimama's rows or Globo's clicks, whichever has more of its
            columns there.
        most_samples: Of a window.

    Raises:
        InputError: If there is no such file, or a column is missing.
    """

    def __init__(self, path: str | Path, most_samples: int = MOST_SAMPLES) -> None:
        self._path = path
        self.is_log = _kind_of(path) == "Globo's clicks"
        metadata = pq.read_metadata(path)
        rows = [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]
        if self.is_log:
            self._windows = _even_ranges(metadata.num_rows, most_samples // _SAMPLES_OF_CLICK)
            self._num_samples = [_SAMPLES_OF_CLICK * len(window) for window in self._windows]
        else:
            self._windows = _windows(rows, most_samples)
            self._num_samples = [sum(rows[group] for group in window) for window in self._windows]

    @property
    def num_windows(self) -> int:
        """Parts that the file is read in."""
        return len(self._windows)

    def num_samples(self, number: int) -> int:
        """Samples of a part; of a log at most."""
        return self._num_samples[number]

    def num_rows(self, column: str) -> int:
        """Rows that a column's ids need, with those of its history."""
        names = [column] if self.is_log else alimama.columns_beside(column)
        return largest_id(self._path, names) + 2  # ids count from 1, after a missing one

    def window(self, number: int) -> Clicks:
        """Reads one part of the file."""
        window = self._windows[number]
        if self.is_log:
            return globo.read_globo(self._path, window if self.num_windows > 1 else None)
        return alimama.read_alimama(self._path, window)


def read_clicks(path: str | Path) -> Clicks:
    """Reads a whole file at once.

    Args:
        path: As for :class:`ClickFile`.

    Raises:
        InputError: If there is no such file, or a column is missing.
    """
    _kind_of(path)
    return ClickFile(path, most_samples=_SAMPLES_OF_CLICK * pq.read_metadata(path).num_rows).window(
        0
    )


def _windows(rows: Sequence[int], most_samples: int) -> list[range]:
    """Row groups side by side, as many as a window may have samples."""
    starts, held = [0], 0
    for group, num_rows in enumerate(rows):
        if held and held + num_rows > most_samples:
            starts.append(group)
            held = 0
        held += num_rows
    return [range(*window) for window in pairwise([*starts, len(rows)])]


def _even_ranges(num_rows: int, most: int) -> list[range]:
    """Rows side by side, in as few ranges as may be, all about equally long."""
    num_ranges = max(1, -(-num_rows // max(1, most)))
    ends = [num_rows * (number + 1) // num_ranges for number in range(num_ranges)]
    return [range(*of) for of in pairwise([0, *ends])]


def largest_id(path: str | Path, names: Collection[str]) -> int:
    """The largest id of some columns; -1 where there is none.

    Read off the file's statistics; where it has none, off the columns, one row group at a time.

    Args:
        path: Of a Parquet file.
        names: Of its columns, of ids or of lists of ids.
    """
    file, largest = pq.ParquetFile(path), -1
    for group in range(file.num_row_groups):
        of_group = file.metadata.row_group(group)
        for part in map(of_group.column, range(of_group.num_columns)):
            if part.path_in_schema.split(".")[0] not in names:
                continue
            if part.statistics is not None and part.statistics.has_min_max:
                largest = max(largest, int(part.statistics.max))
                continue
            values = file.read_row_group(group, columns=[part.path_in_schema]).column(0)
            if pa.types.is_list(values.type) or pa.types.is_large_list(values.type):
                values = pc.list_flatten(values)
            found = pc.max(values).as_py()
            largest = largest if found is None else max(largest, int(found))
    return largest


def _kind_of(path: str | Path) -> str:
    try:
        found = set(pq.read_schema(path).names)
    except (OSError, pa.ArrowInvalid) as error:
        raise InputError(f"{path}: no Parquet file that can be read ({error})") from error
    kind = max(_KINDS, key=lambda of: len(found.intersection(_KINDS[of])))
    missing = [column for column in _KINDS[kind] if column not in found]
    if not missing:
        return kind
    expected = "; or ".join(f"{name}: {', '.join(of)}" for name, of in _KINDS.items())
    if len(missing) == len(_KINDS[kind]):
        raise InputError(
            f"{path}: neither of {' nor of '.join(_KINDS)} there is a column, got "
            f"{', '.join(sorted(found)) or 'none'}; expected {expected}"
        )
    raise InputError(
        f"{path}: looks like {kind}, but has no column {missing[0]!r}; expected {expected}"
    )
