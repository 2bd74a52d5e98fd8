"""Reads clicks from a Parquet file of a kind that its columns tell, a window of them at a time."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from torchrec_picasso.errors import InputError
from torchrec_picasso.zoo.data import alimama, globo
from torchrec_picasso.zoo.data.clicks import Clicks

__all__ = ["MOST_SAMPLES", "ClickFile", "read_clicks"]

_KINDS = {"Alimama's rows": alimama.COLUMNS, "Globo's clicks": globo.COLUMNS}
MOST_SAMPLES = 1 << 18
"""Of a window, unless one row group of the file has more: some 200 MB with histories of 50."""


class ClickFile:
    """The clicks of a file. Rows that hold their own histories are read in windows of whole row
    groups; a log, whose histories are clicks long before, in one: some 100 bytes a click.

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
        self._groups = [range(len(rows))] if self.is_log else _windows(rows, most_samples)
        self._num_samples = [sum(rows[group] for group in window) for window in self._groups]

    @property
    def num_windows(self) -> int:
        """Parts that the file is read in."""
        return len(self._groups)

    def num_samples(self, number: int) -> int:
        """Samples of a part; of a log its clicks."""
        return self._num_samples[number]

    def num_rows(self, column: str) -> int:
        """Rows that a column's ids need, with those of its history."""
        if self.is_log:
            return self.window(0).num_rows(column)
        return alimama.largest_id(self._path, column) + 1

    def window(self, number: int) -> Clicks:
        """Reads one part of the file."""
        if self.is_log:
            return globo.read_globo(self._path)
        return alimama.read_alimama(self._path, self._groups[number])


def read_clicks(path: str | Path) -> Clicks:
    """Reads a whole file at once.

    Args:
        path: As for :class:`ClickFile`.

    Raises:
        InputError: If there is no such file, or a column is missing.
    """
    _kind_of(path)
    return ClickFile(path, most_samples=pq.read_metadata(path).num_rows).window(0)


def _windows(rows: Sequence[int], most_samples: int) -> list[range]:
    """Row groups side by side, as many as a window may have samples."""
    starts, held = [0], 0
    for group, num_rows in enumerate(rows):
        if held and held + num_rows > most_samples:
            starts.append(group)
            held = 0
        held += num_rows
    return [range(*window) for window in pairwise([*starts, len(rows)])]


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
