"""The Parquet file of frequency statistics: columns ``table, row, count``, and metadata per table.

The file has one line per counted row, readable by any tool. Table sizes, feature names and error
bounds, also of tables without lookups, are JSON under one key of the schema metadata.

Shape letters: U counted rows.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch

from torchrec_picasso.errors import InputError, first_line
from torchrec_picasso.frequency.counts import NUM_RANGES, TableCounts

_METADATA_KEY = b"torchrec_picasso.frequency_stats"
_SCHEMA = pa.schema([("table", pa.string()), ("row", pa.int64()), ("count", pa.int64())])
_MAX_TOTAL = 1 << 53  # lookups that a float64 holds exactly
_MAX_ROWS = 1 << 62
_DAMAGE = (
    *(pa.ArrowException, OSError, RecursionError),
    *(AttributeError, KeyError, OverflowError, TypeError, ValueError),
)


def write_tables(
    path: str | os.PathLike[str],
    tables: Mapping[str, TableCounts],
    num_batches: int,
    num_samples: int,
) -> None:
    """Writes the file under a temporary name, then renames it."""
    target = Path(path)
    if not target.parent.is_dir():
        raise InputError(
            f"cannot write statistics to {target}: its folder does not exist; create it first"
        )
    by_table = {
        name: {
            "num_embeddings": counts.num_embeddings,
            "feature_names": counts.feature_names,
            "max_undercount": counts.max_undercount,
            "total_lookups": counts.num_lookups if counts.max_undercount else None,
            "effective_share": counts.effective_share,
            "halves": counts.halves,
        }
        for name, counts in tables.items()
    }
    facts = {"num_batches": num_batches, "num_samples": num_samples, "tables": by_table}
    empty = np.empty(0, dtype=np.int64)
    # table names are dictionary-encoded: an int32 code per line, each name once
    sizes = [counts.rows_U.numel() for counts in tables.values()]
    codes = np.repeat(np.arange(len(tables), dtype=np.int32), sizes)
    columns = [
        pa.DictionaryArray.from_arrays(codes, pa.array(list(tables), pa.string())),
        np.concatenate([empty, *(counts.rows_U.numpy() for counts in tables.values())]),
        np.concatenate([empty, *(counts.counts_U.numpy() for counts in tables.values())]),
    ]
    table = pa.table(columns, names=_SCHEMA.names, metadata={_METADATA_KEY: json.dumps(facts)})
    unfinished = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        pq.write_table(table, unfinished)
        os.replace(unfinished, target)
    finally:
        unfinished.unlink(missing_ok=True)


def read_tables(path: str | os.PathLike[str]) -> tuple[dict[str, TableCounts], int, int]:
    """Reads the file: counts by table name, number of batches and number of samples."""
    if not Path(path).is_file():
        raise InputError(f"there is no statistics file {path}")
    try:
        data = pq.read_table(path)
        data.validate(full=True)  # finds dictionary codes outside the dictionary
        facts = json.loads((data.schema.metadata or {})[_METADATA_KEY])
        data = data.select(_SCHEMA.names).cast(_SCHEMA)
        names = list(facts["tables"])
        codes = pc.index_in(data.column("table"), pa.array(names, pa.string())).to_numpy()
        rows, counts = (data.column(name).to_numpy() for name in ("row", "count"))
        # sorted by table, then by row; a line with an unknown table has code NaN and comes last
        order = np.lexsort((rows, codes))
        codes, rows, counts = codes[order], rows[order], counts[order]
        borders = np.searchsorted(codes, np.arange(len(names) + 1))
        _check(borders[-1] == rows.size, "a line names a table that the metadata lacks")
        tables = {
            name: _table(facts["tables"][name], rows[start:end], counts[start:end])
            for name, start, end in zip(names, borders, borders[1:])
        }
        num_batches, num_samples = int(facts["num_batches"]), int(facts["num_samples"])
        _check(num_batches >= 0 and num_samples >= 0, "a number of batches or samples is negative")
    except _DAMAGE as error:
        raise InputError(
            f"{path} does not contain frequency statistics ({type(error).__name__}: "
            f"{first_line(error)[:200]}); write it with `torchrec-picasso stats` or "
            "FrequencyStats.to_parquet"
        ) from error
    return tables, num_batches, num_samples


def _table(facts: Mapping[str, Any], rows_U: np.ndarray, counts_U: np.ndarray) -> TableCounts:
    """Checks the lines of a table, sorted by row, and returns its counts."""
    num_embeddings, max_undercount = int(facts["num_embeddings"]), int(facts["max_undercount"])
    num_counted = int(counts_U.sum())
    total_lookups = int(facts["total_lookups"]) if max_undercount else num_counted
    _check(0 <= num_embeddings < _MAX_ROWS, "num_embeddings is out of range")
    is_inside_U = (rows_U >= 0) & (rows_U < num_embeddings)
    _check(bool(is_inside_U.all()), "a row is outside its table")
    _check(bool((np.diff(rows_U) > 0).all()), "a row has two lines")
    _check(bool((counts_U > 0).all()), "a count is not above 0")
    # summed as float64, because the int64 sum of a damaged file may overflow
    _check(counts_U.sum(dtype=np.float64) < _MAX_TOTAL, "the sum of counts is 2**53 or more")
    _check(0 <= max_undercount < _MAX_TOTAL, "max_undercount is out of range")
    effective_share = float(facts["effective_share"])
    _check(0 < effective_share <= 1, "effective_share is out of range")
    halves = tuple(tuple(map(int, half)) for half in facts.get("halves", ()))
    _check(list(map(len, halves)) in ([], [NUM_RANGES] * 2), "halves are not of all ranges")
    _check(all(min(half) >= 0 for half in halves), "a number of lookups is negative")
    _check(num_counted <= total_lookups < _MAX_TOTAL, "total_lookups is out of range")
    return TableCounts(
        num_embeddings=num_embeddings,
        feature_names=tuple(map(str, facts["feature_names"])),
        rows_U=torch.from_numpy(rows_U.copy()),
        counts_U=torch.from_numpy(counts_U.copy()),
        max_undercount=max_undercount,
        num_uncounted=total_lookups - num_counted,
        effective_share=effective_share,
        halves=halves,
    )


def _check(holds: bool, message: str) -> None:
    if not holds:
        raise ValueError(message)
