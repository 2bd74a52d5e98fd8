"""Reads clicks from a Parquet file, a window at a time; the columns determine the kind of file."""

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

_KINDS = {"Alimama's rows": alimama.COLUMNS, "Globo's clicks": globo.COLUMNS}
MOST_SAMPLES = 1 << 18
"""Samples of a window, unless one row group has more: some 200 MB with histories of 50."""
_SAMPLES_PER_CLICK = 2


class ClickFile:
    """The clicks of a file, in windows.

    Rows with their own histories (Alimama) are read in windows of whole row groups. A log (Globo)
    is read in windows of rows, with the window before as history; in one window it is sorted.

    Args:
        path: Parquet file of Alimama's rows or Globo's clicks.
        most_samples: Most samples of a window.
        num_candidates: Candidates of a sample of a stream; ``None`` = clicks.

    Raises:
        InputError: If the file cannot be read, or a column is missing, or rows with their own
            histories, of one candidate each, are to have several.
    """

    def __init__(
        self,
        path: str | Path,
        most_samples: int = MOST_SAMPLES,
        num_candidates: int | None = None,
    ) -> None:
        self._path, self._num_candidates = path, num_candidates
        self.is_log = is_log(path)
        if not self.is_log and (num_candidates or 1) > 1:
            raise InputError(
                f"{path}: rows with their own histories have one candidate, not {num_candidates}; "
                "set data.num_candidates to 1"
            )
        per_click = _SAMPLES_PER_CLICK if (num_candidates or 1) == 1 else 1
        metadata = pq.read_metadata(path)
        rows = [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]
        if self.is_log:
            self._windows = _even_ranges(metadata.num_rows, most_samples // per_click)
            self._num_samples = [per_click * len(window) for window in self._windows]
        else:
            self._windows = _windows(rows, most_samples)
            self._num_samples = [sum(rows[group] for group in window) for window in self._windows]

        self.num_windows = len(self._windows)

    def num_samples(self, number: int) -> int:
        """Samples of a window; for a log an upper bound."""
        return self._num_samples[number]

    def num_rows(self, column: str) -> int:
        """Rows that the ids of a column and of its history need."""
        names = [column] if self.is_log else alimama.columns_beside(column)
        return largest_id(self._path, names) + 2  # row 0 is a missing id, id 0 is row 1

    def window(self, number: int) -> Clicks:
        """Reads a window."""
        window = self._windows[number]
        if self.is_log:
            rows = window if self.num_windows > 1 else None
            return globo.read_globo(self._path, rows, self._num_candidates)
        return alimama.read_alimama(self._path, window, self._num_candidates is not None)


def is_log(path: str | Path) -> bool:
    """Whether a file is a log of clicks, not rows with their own histories."""
    return _kind_of(path) == "Globo's clicks"


def read_clicks(path: str | Path) -> Clicks:
    """Reads a whole file as one window; errors are those of :class:`ClickFile`."""
    _kind_of(path)
    return ClickFile(path, _SAMPLES_PER_CLICK * pq.read_metadata(path).num_rows).window(0)


def _windows(rows: Sequence[int], most_samples: int) -> list[range]:
    """Groups adjacent row groups into windows of at most ``most_samples`` samples."""
    starts, held = [0], 0
    for group, num_rows in enumerate(rows):
        if held and held + num_rows > most_samples:
            starts.append(group)
            held = 0
        held += num_rows
    return [range(*window) for window in pairwise([*starts, len(rows)])]


def _even_ranges(num_rows: int, most: int) -> list[range]:
    """Cuts rows into as few ranges as possible, of about equal length."""
    num_ranges = max(1, -(-num_rows // max(1, most)))
    ends = [num_rows * (number + 1) // num_ranges for number in range(num_ranges)]
    return [range(*bounds) for bounds in pairwise([0, *ends])]


def largest_id(path: str | Path, names: Collection[str]) -> int:
    """The largest id in columns of ids or of lists of ids, -1 without ids.

    Taken from the file's statistics if present, else from the columns, one row group at a time.
    """
    file, largest = pq.ParquetFile(path), -1
    for group in range(file.num_row_groups):
        metadata = file.metadata.row_group(group)
        for chunk in map(metadata.column, range(metadata.num_columns)):
            if chunk.path_in_schema.split(".")[0] not in names:
                continue
            if chunk.statistics is not None and chunk.statistics.has_min_max:
                largest = max(largest, int(chunk.statistics.max))
                continue
            values = file.read_row_group(group, columns=[chunk.path_in_schema]).column(0)
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
    kind = max(_KINDS, key=lambda name: len(found.intersection(_KINDS[name])))
    missing = [column for column in _KINDS[kind] if column not in found]
    if not missing:
        return kind
    expected = "; or ".join(f"{name}: {', '.join(names)}" for name, names in _KINDS.items())
    if len(missing) == len(_KINDS[kind]):
        raise InputError(
            f"{path}: no column of {' or of '.join(_KINDS)}, got "
            f"{', '.join(sorted(found)) or 'none'}; expected {expected}"
        )
    raise InputError(
        f"{path}: looks like {kind}, but has no column {missing[0]!r}; expected {expected}"
    )
