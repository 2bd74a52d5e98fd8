"""The Parquet form of frequency statistics: columns ``table, row, count``, facts in the metadata.

One line per row counted, readable by any tool; what a line cannot say (a table without lookups,
sizes, feature names, error bounds) is JSON under one key of the schema metadata. Where a table has
a tail, a fourth column ``in_tail`` marks the lines of its sample. Written aside, then renamed.

Format version 1 holds exact whole counts and is written where they are all there is, so releases
that know no other read it; version 2 holds the rest.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch
from torch import Tensor

from torchrec_picasso.errors import PicassoError
from torchrec_picasso.frequency.counts import TableCounts
from torchrec_picasso.frequency.dependence import INDEPENDENT, Dependence
from torchrec_picasso.frequency.parquet_checks import fact_problem, lines_problem
from torchrec_picasso.frequency.tail import TailSample

__all__ = ["read_tables", "write_tables"]

_METADATA_KEY = b"torchrec_picasso.frequency_stats"
_EXACT_VERSION, _FORMAT_VERSION = 1, 2
_COLUMNS = ("table", "row", "count")
_TAIL_COLUMN = "in_tail"
_COLUMN_TYPES = {
    "table": ("text", (pa.types.is_string, pa.types.is_large_string, pa.types.is_dictionary)),
    "row": ("integers", (pa.types.is_integer,)),
    "count": ("numbers", (pa.types.is_integer, pa.types.is_floating)),
    _TAIL_COLUMN: ("true or false", (pa.types.is_boolean,)),
}
_LONGEST_REASON = 200
_HINT = "write it with FrequencyStats.to_parquet"


def write_tables(
    path: str | os.PathLike[str],
    tables: Mapping[str, TableCounts],
    num_batches: float,
    num_samples: float,
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
    are_floats = any(counts.counts_U.is_floating_point() for counts in tables.values())
    have_tails = any(counts.tail is not None for counts in tables.values())
    are_exact = not are_floats and all(counts.is_exact for counts in tables.values())
    facts = {
        "format_version": _EXACT_VERSION if are_exact else _FORMAT_VERSION,
        "num_batches": num_batches,
        "num_samples": num_samples,
        "tables": {name: _about(counts) for name, counts in tables.items()},
    }
    fields = [
        ("table", pa.dictionary(pa.int32(), pa.string())),
        ("row", pa.int64()),
        ("count", pa.float64() if are_floats else pa.int64()),
    ]
    if have_tails:
        fields.append((_TAIL_COLUMN, pa.bool_()))
    # per table: its head, then its tail
    parts = [
        (code, *_lines(rows, counts), in_tail)
        for code, table in enumerate(tables.values())
        for rows, counts, in_tail in _parts(table)
    ]
    sizes = [rows.size for _, rows, _, _ in parts]
    codes = np.repeat(np.array([part[0] for part in parts], dtype=np.int32), sizes)
    columns = [
        pa.DictionaryArray.from_arrays(codes, pa.array(list(tables), pa.string())),
        pa.array(np.concatenate([_EMPTY, *(rows for _, rows, _, _ in parts)])),
        pa.array(np.concatenate([_EMPTY, *(counts for _, _, counts, _ in parts)])).cast(
            fields[2][1]
        ),
    ]
    if have_tails:
        columns.append(pa.array(np.repeat([part[3] for part in parts], sizes)))
    schema = pa.schema(fields, metadata={_METADATA_KEY: json.dumps(facts)})
    aside = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        pq.write_table(pa.Table.from_arrays(columns, schema=schema), aside)
        os.replace(aside, target)
    finally:
        aside.unlink(missing_ok=True)


def read_tables(path: str | os.PathLike[str]) -> tuple[dict[str, TableCounts], float, float]:
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
    in_tail = np.zeros(rows.size, dtype=bool)
    if _TAIL_COLUMN in data.column_names:
        in_tail = data.column(_TAIL_COLUMN).to_numpy()

    # lines sorted by (table, head before tail, row), then cut at the borders of heads and tails
    order = np.lexsort((rows, in_tail, codes))
    rows, counts = rows[order].astype(np.int64), counts[order]
    borders = np.searchsorted((2 * codes + in_tail)[order], np.arange(2 * len(names) + 1))
    tables = {}
    for place, name in enumerate(names):
        start, middle, end = borders[2 * place : 2 * place + 3]
        head, tail = slice(start, middle), slice(middle, end)
        for lines in (head, tail):
            problem = lines_problem(facts["tables"][name], rows[lines], counts[lines])
            if problem is not None:
                raise PicassoError(
                    f"table {name!r} of the statistics file {path} has {problem}; {_HINT}"
                )
        tables[name] = _table(
            facts["tables"][name], rows[head], counts[head], rows[tail], counts[tail]
        )
    return tables, facts["num_batches"], facts["num_samples"]


_EMPTY = np.empty(0, dtype=np.int64)


def _about(counts: TableCounts) -> dict[str, Any]:
    """What lines cannot say of a table; what is as in any exact table is left out."""
    about: dict[str, Any] = {
        "num_embeddings": counts.num_embeddings,
        "feature_names": list(counts.feature_names),
    }
    if counts.counts_U.is_floating_point():
        about["decayed"] = True
    if counts.max_undercount:
        about["max_undercount"] = counts.max_undercount
    if counts.tail is not None:
        about["tail_level"] = counts.tail.level
    for name in ("total_lookups", "feature_lookups", "feature_bags"):
        if getattr(counts, name):
            about[name] = getattr(counts, name)
    for name, value in asdict(counts.dependence).items():
        if value != getattr(INDEPENDENT, name):
            about[name] = value
    return about


def _parts(counts: TableCounts) -> list[tuple[Tensor, Tensor, bool]]:
    head = (counts.rows_U, counts.counts_U, False)
    if counts.tail is None:
        return [head]
    return [head, (counts.tail.rows_V, counts.tail.counts_V, True)]


def _lines(rows: Tensor, counts: Tensor) -> tuple[np.ndarray, np.ndarray]:
    return rows.numpy(), counts.numpy()


def _table(
    about: Mapping[str, Any],
    rows_U: np.ndarray,
    counts_U: np.ndarray,
    rows_V: np.ndarray,
    counts_V: np.ndarray,
) -> TableCounts:
    number = np.float64 if about.get("decayed") else np.int64
    tail = None
    if "tail_level" in about:
        tail = TailSample(
            level=about["tail_level"],
            rows_V=torch.from_numpy(rows_V.copy()),
            counts_V=torch.from_numpy(counts_V.astype(number)),
        )
    return TableCounts(
        num_embeddings=about["num_embeddings"],
        feature_names=tuple(about["feature_names"]),
        rows_U=torch.from_numpy(rows_U.copy()),
        counts_U=torch.from_numpy(counts_U.astype(number)),
        max_undercount=about.get("max_undercount", 0),
        tail=tail,
        total_lookups=about.get("total_lookups"),
        feature_lookups=tuple(about.get("feature_lookups", ())),
        feature_bags=tuple(about.get("feature_bags", ())),
        dependence=Dependence(
            effective_share=about.get("effective_share", 1.0),
            persistence=tuple(about.get("persistence", INDEPENDENT.persistence)),
        ),
    )


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
        present = [name for name in (*_COLUMNS, _TAIL_COLUMN) if name in schema.names]
        data = pq.read_table(path, columns=present)
        data.validate(full=True)  # codes of tables may point at none
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:_LONGEST_REASON]
        raise PicassoError(f"{path} cannot be read as Parquet ({reason}); {_HINT}") from error
    for name, (expected, are_right) in _COLUMN_TYPES.items():
        if name not in present:
            continue
        column = data.column(name)
        if not any(is_right(column.type) for is_right in are_right) or column.null_count:
            raise PicassoError(
                f"column {name!r} of the statistics file {path} is {column.type} with "
                f"{column.null_count} nulls, expected {expected} without nulls; {_HINT}"
            )
    return data


def _facts(path: str | os.PathLike[str], schema: pa.Schema) -> dict[str, Any]:
    written = (schema.metadata or {}).get(_METADATA_KEY)
    if written is None:
        raise PicassoError(
            f"the statistics file {path} does not say how many rows and which features each table "
            f"has (metadata key {_METADATA_KEY.decode()!r}); {_HINT}"
        )
    try:
        facts: Any = json.loads(written)
    except (ValueError, RecursionError) as error:
        raise PicassoError(
            f"the metadata of the statistics file {path} is no JSON ({type(error).__name__}); "
            f"{_HINT}"
        ) from error
    if not isinstance(facts, dict):
        raise PicassoError(f"the metadata of the statistics file {path} is no mapping; {_HINT}")
    version = str(facts.get("format_version"))
    if version not in (str(_EXACT_VERSION), str(_FORMAT_VERSION)):
        raise PicassoError(
            f"the statistics file {path} has format version {version[:_LONGEST_REASON]}, "
            f"expected {_EXACT_VERSION} or {_FORMAT_VERSION}; read it with the release that wrote "
            "it, or collect again"
        )
    problem = fact_problem(facts)
    if problem is not None:
        raise PicassoError(f"the metadata of the statistics file {path}: {problem}; {_HINT}")
    return facts


def _table_codes(
    path: str | os.PathLike[str], column: pa.ChunkedArray, names: list[str]
) -> np.ndarray:
    """Index into ``names`` of each line's table."""
    codes = pc.index_in(column.cast(pa.string()), pa.array(names, pa.string()))
    if codes.null_count:
        unknown = column.filter(pc.is_null(codes)).slice(0, 1).to_pylist()[0]
        raise PicassoError(
            f"the statistics file {path} counts rows of table {str(unknown)[:_LONGEST_REASON]!r}, "
            f"which its metadata does not describe; described are "
            f"{str(names)[:_LONGEST_REASON]}; {_HINT}"
        )
    return codes.to_numpy()
