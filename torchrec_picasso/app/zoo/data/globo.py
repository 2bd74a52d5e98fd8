"""Globo.com's news clicks: predicts the next article that a user clicks.

Each click is a sample, followed by a negative of similar popularity (:func:`.samples_of_log`). The
history is the user's latest clicks over all sessions. A long log is read in ranges of rows, each
with as many rows before it as history.

Source: Globo.com / CHAMELEON, *News Portal User Interactions*; de Souza Pereira Moreira et al.,
CHAMELEON, DLRS 2018.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from torchrec_picasso.app.zoo.data.click_log import samples_of_log
from torchrec_picasso.app.zoo.data.clicks import Clicks
from torchrec_picasso.errors import InputError

_PROFILES = ("user", "environment", "device", "os", "country", "region", "referrer")
_TIME, _ARTICLE = "ts_ms", "article"
_ROWS_PER_BATCH = 1 << 16
_CROSSES = {"article_user": (_ARTICLE, "user"), "article_referrer": (_ARTICLE, "referrer")}
COLUMNS = (_TIME, _ARTICLE, *_PROFILES)


def read_globo(
    path: str | Path, rows: range | None = None, num_candidates: int | None = None
) -> Clicks:
    """Reads a Parquet file.

    Args:
        path: File with :data:`COLUMNS`; ids are shifted by 1.
        rows: Rows that become samples; ``None`` = all, sorted by time.
        num_candidates: Candidates of a sample of a stream; ``None`` = clicks.

    Raises:
        InputError: If the file has fewer than 2 clicks, or ``rows`` are not in time order.
    """
    first = 0
    if rows is None:
        frame = pd.read_parquet(path, columns=list(COLUMNS)).sort_values(_TIME, kind="stable")
    else:
        before = min(len(rows), rows.start)
        frame, first = _read_rows(path, range(rows.start - before, rows.stop)), before
        if not frame[_TIME].is_monotonic_increasing:
            raise InputError(
                f"{path}: rows {rows.start:,} to {rows.stop:,} are not in order of {_TIME}, and "
                "there are too many rows to sort them in memory; sort the file"
            )
    log = {column: frame[column].to_numpy(np.int64) + 1 for column in (_ARTICLE, *_PROFILES)}
    log["second"] = frame[_TIME].to_numpy(np.int64) // 1000
    try:
        return samples_of_log(
            log,
            user="user",
            targets=[_ARTICLE],
            profiles=_PROFILES,
            first=first,
            num_candidates=num_candidates,
            crosses=_CROSSES,
        )
    except InputError as error:
        raise InputError(f"{path}: {error}") from error


def _read_rows(path: str | Path, rows: range) -> pd.DataFrame:
    """Reads some rows of a file; other rows are not in memory."""
    with pq.ParquetFile(path) as file:
        found, place = [], 0
        for group in range(file.num_row_groups):
            num_rows = file.metadata.row_group(group).num_rows
            if place < rows.stop and place + num_rows > rows.start:
                batches = file.iter_batches(_ROWS_PER_BATCH, [group], columns=list(COLUMNS))
                for batch in batches:
                    overlap = range(max(rows.start, place), min(rows.stop, place + len(batch)))
                    if overlap:
                        found.append(batch.slice(overlap.start - place, len(overlap)))
                    place += len(batch)
            else:
                place += num_rows
    return pa.Table.from_batches(found).to_pandas()
