"""The Parquet form of frequency statistics: columns ``table, row, count``, facts in the metadata.

One line per row seen, readable by any tool; what a line cannot say (a table without lookups, sizes,
feature names) is JSON under one key of the schema metadata. Written aside, then renamed.
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

from torchrec_picasso.errors import PicassoError
from torchrec_picasso.frequency.counts import TableCounts

__all__ = ["read_tables", "write_tables"]

_METADATA_KEY = b"torchrec_picasso.frequency_stats"
_FORMAT_VERSION = 1
_COLUMNS = ("table", "row", "count")
_HINT = "write it with FrequencyStats.to_parquet"


def write_tables(
    path: str | os.PathLike[str],
    tables: Mapping[str, TableCounts],
    num_batches: int,
    num_samples: int,
) -> None:
    """Writes the file under a name of its own, then renames it.

    Args:
        path: File to write or to replace; its folder exists.
        tables: Counts by table name.
        num_batches: Batches the sample held.
        num_samples: Samples those batches held.

    Raises:
        PicassoError: If the folder does not exist.
    """
    target = Path(path)
    if not target.parent.is_dir():
        raise PicassoError(
            f"cannot write statistics to {target}: its folder does not exist; create it first"
        )
    facts = {
        "format_version": _FORMAT_VERSION,
        "num_batches": num_batches,
        "num_samples": num_samples,
        "tables": {
            name: {
                "num_embeddings": counts.num_embeddings,
                "feature_names": list(counts.feature_names),
            }
            for name, counts in tables.items()
        },
    }
    schema = pa.schema(
        [
            ("table", pa.dictionary(pa.int32(), pa.string())),
            ("row", pa.int64()),
            ("count", pa.int64()),
        ],
        metadata={_METADATA_KEY: json.dumps(facts)},
    )
    sizes = [counts.num_rows_seen for counts in tables.values()]
    codes = np.repeat(np.arange(len(sizes), dtype=np.int32), sizes)
    columns = [
        pa.DictionaryArray.from_arrays(codes, pa.array(list(tables), pa.string())),
        pa.array(np.concatenate([_EMPTY, *(c.rows_U.numpy() for c in tables.values())])),
        pa.array(np.concatenate([_EMPTY, *(c.counts_U.numpy() for c in tables.values())])),
    ]
    aside = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        pq.write_table(pa.Table.from_arrays(columns, schema=schema), aside)
        os.replace(aside, target)
    finally:
        aside.unlink(missing_ok=True)


def read_tables(path: str | os.PathLike[str]) -> tuple[dict[str, TableCounts], int, int]:
    """Reads the file and checks every line against the table's facts.

    Args:
        path: The file.

    Returns:
        Counts by table name, batches and samples of the sample.

    Raises:
        PicassoError: If the file is missing, empty, not Parquet, or not such statistics.
    """
    data = _read(Path(path))
    facts = _facts(path, data.schema)
    names = list(facts["tables"])
    codes = _table_codes(path, data.column("table"), names)
    rows, counts = (data.column(name).to_numpy() for name in ("row", "count"))

    # lines sorted by (table, row), then cut at the tables' borders
    order = np.lexsort((rows, codes))
    codes, rows, counts = codes[order], rows[order].astype(np.int64), counts[order].astype(np.int64)
    borders = np.searchsorted(codes, np.arange(len(names) + 1))
    tables = {}
    for name, start, end in zip(names, borders[:-1], borders[1:]):
        about = facts["tables"][name]
        _check_lines(path, name, about["num_embeddings"], rows[start:end], counts[start:end])
        tables[name] = TableCounts(
            num_embeddings=about["num_embeddings"],
            feature_names=tuple(about["feature_names"]),
            rows_U=torch.from_numpy(rows[start:end].copy()),
            counts_U=torch.from_numpy(counts[start:end].copy()),
        )
    return tables, facts["num_batches"], facts["num_samples"]


_EMPTY = np.empty(0, dtype=np.int64)


def _read(path: Path) -> pa.Table:
    if not path.is_file():
        raise PicassoError(f"there is no statistics file {path}; {_HINT}")
    if path.stat().st_size == 0:
        raise PicassoError(f"the statistics file {path} is empty (0 bytes); {_HINT}")
    try:
        schema = pq.read_schema(path)
        missing = [name for name in _COLUMNS if name not in schema.names]
        if missing:
            raise PicassoError(
                f"the statistics file {path} lacks columns {missing}; it has {schema.names}, "
                f"expected {list(_COLUMNS)}; {_HINT}"
            )
        data = pq.read_table(path, columns=list(_COLUMNS))
    except pa.ArrowException as error:
        raise PicassoError(f"{path} cannot be read as Parquet ({error}); {_HINT}") from error
    for name in ("row", "count"):
        column = data.column(name)
        if not pa.types.is_integer(column.type) or column.null_count:
            raise PicassoError(
                f"column {name!r} of the statistics file {path} is {column.type} with "
                f"{column.null_count} nulls, expected integers without nulls; {_HINT}"
            )
    return data


def _facts(path: str | os.PathLike[str], schema: pa.Schema) -> dict[str, Any]:
    written = (schema.metadata or {}).get(_METADATA_KEY)
    if written is None:
        raise PicassoError(
            f"the statistics file {path} does not say how many rows and which features each table "
            f"has (metadata key {_METADATA_KEY.decode()!r}); {_HINT}"
        )
    facts: dict[str, Any] = json.loads(written)
    if facts.get("format_version") != _FORMAT_VERSION:
        raise PicassoError(
            f"the statistics file {path} has format version {facts.get('format_version')!r}, "
            f"expected {_FORMAT_VERSION}; read it with the release that wrote it, or collect again"
        )
    return facts


def _table_codes(
    path: str | os.PathLike[str], column: pa.ChunkedArray, names: list[str]
) -> np.ndarray:
    """Index into ``names`` of each line's table."""
    codes = pc.index_in(column.cast(pa.string()), pa.array(names, pa.string()))
    if codes.null_count:
        unknown = column.filter(pc.is_null(codes)).slice(0, 1).to_pylist()[0]
        raise PicassoError(
            f"the statistics file {path} counts rows of table {unknown!r}, which its metadata does "
            f"not describe; described are {names}; {_HINT}"
        )
    return codes.to_numpy()


def _check_lines(
    path: str | os.PathLike[str],
    name: str,
    num_embeddings: int,
    rows: np.ndarray,
    counts: np.ndarray,
) -> None:
    """Rows are ascending here, so the first and the last bound them."""
    if not rows.size:
        return
    place = f"table {name!r} of the statistics file {path}"
    if rows[0] < 0 or rows[-1] >= num_embeddings:
        wrong = rows[0] if rows[0] < 0 else rows[-1]
        raise PicassoError(f"{place} has row {wrong}, expected 0..{num_embeddings - 1}; {_HINT}")
    repeated = rows[1:][rows[1:] == rows[:-1]]
    if repeated.size:
        raise PicassoError(f"{place} has row {repeated[0]} twice, expected one line each; {_HINT}")
    if counts.min() < 1:
        raise PicassoError(f"{place} has count {counts.min()}, expected at least 1; {_HINT}")
