"""Counts the lookups of a model's tables, in a stream of batches or in Parquet data files.

Every id is checked against its table: counts of other ids would select hot rows that do not exist.
Of a file, only the columns of counted features are decoded, in the calling thread and through small
buffers, so memory does not depend on the size of row groups.

Shape letters: N lookups.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from os import PathLike
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor, nn
from torchrec.modules.embedding_configs import BaseEmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_picasso.errors import InputError, PlanError
from torchrec_picasso.frequency.counts import ModelTable, TableCounts, count_rows, lookup_counter

__all__ = [
    *("CHUNK_ROWS", "count_files", "count_lookups", "model_tables", "num_samples_of"),
    "table_configs",
]

CHUNK_ROWS = 1 << 18
"""Samples per chunk of a file: 2 MiB per column of int64."""
_MEASURED_BATCHES = 16
"""Number of first batches whose distinct rows are counted per batch."""
_READ_BUFFER_BYTES = 1 << 20


def model_tables(model: nn.Module) -> list[ModelTable]:
    """Lists the tables of an unsharded model's EmbeddingBagCollections and EmbeddingCollections, at
    any depth, in module order.

    Raises:
        PlanError: If there is no table, or two tables have the same name.
    """
    configs: dict[str, tuple[str, BaseEmbeddingConfig]] = {}
    for path, config in table_configs(model):
        if config.name in configs:
            other = configs[config.name][0]
            raise PlanError(
                f"table {config.name!r} exists in module {other!r} and in module {path!r}, but "
                "frequency statistics are stored by table name; rename one of the tables"
            )
        configs[config.name] = (path, config)
    if not configs:
        raise PlanError(
            f"{type(model).__name__} contains no EmbeddingBagCollection or EmbeddingCollection; "
            "pass the unsharded model"
        )
    return [
        ModelTable(
            name=name,
            num_embeddings=config.num_embeddings,
            feature_names=tuple(config.feature_names),
        )
        for name, (_, config) in configs.items()
    ]


def table_configs(model: nn.Module) -> Iterator[tuple[str, BaseEmbeddingConfig]]:
    """Yields the path of the collection and the configuration of each table, in module order."""
    for path, module in model.named_modules():
        if isinstance(module, EmbeddingBagCollection):
            yield from ((path, config) for config in module.embedding_bag_configs())
        elif isinstance(module, EmbeddingCollection):
            yield from ((path, config) for config in module.embedding_configs())


def count_lookups(
    batches: Iterable[object],
    tables: Sequence[ModelTable],
    num_batches: int | None,
    max_rows_counted: int,
) -> tuple[dict[str, TableCounts], int, int]:
    """Counts the lookups of each table; arguments and errors as for ``FrequencyStats.collect``.

    Returns:
        Counts by table name, number of batches and of samples read.
    """
    counters = [lookup_counter(table, max_rows_counted) for table in tables]
    # sums over the first batches: distinct rows of each batch, and lookups
    distinct_rows = dict.fromkeys((table.name for table in tables), 0)
    num_lookups = dict(distinct_rows)
    batches_read = samples_read = 0
    for batch in islice(batches, num_batches):
        features = _sparse_features(batch)
        for table, counter in zip(tables, counters):
            ids = [_checked_ids(features, name, table) for name in table.feature_names]
            for ids_N in ids:
                counter.add(ids_N)
            if batches_read < _MEASURED_BATCHES:
                ids_N = torch.cat(ids)
                num_lookups[table.name] += ids_N.numel()
                distinct_rows[table.name] += count_rows(ids_N.numpy())[0].size
        batches_read += 1
        samples_read += features.stride()
    counts = {table.name: counter.result() for table, counter in zip(tables, counters)}
    num_measured = min(batches_read, _MEASURED_BATCHES)
    # A single batch is the whole sample: its distinct rows show nothing beyond the counts.
    if num_measured > 1:
        for name, table_counts in counts.items():
            spectrum = table_counts.spectrum().with_distinct(
                num_lookups[name] / num_measured, distinct_rows[name] / num_measured, num_measured
            )
            counts[name] = replace(table_counts, effective_share=spectrum.effective_share)
    return counts, batches_read, samples_read


def _sparse_features(batch: object) -> KeyedJaggedTensor:
    features = getattr(batch, "sparse_features", batch)
    if not isinstance(features, KeyedJaggedTensor):
        raise InputError(
            f"a batch is a {type(batch).__name__}, expected a KeyedJaggedTensor or an object with "
            "a KeyedJaggedTensor sparse_features; convert the batches first"
        )
    return features


def _checked_ids(features: KeyedJaggedTensor, feature: str, table: ModelTable) -> Tensor:
    names = features.keys()
    if feature not in names:
        raise InputError(
            f"feature {feature!r} of table {table.name!r} is not in the batch, which has features "
            f"{names}; pass batches of this model"
        )
    ids_N = features[feature].values().detach().cpu()
    if ids_N.is_floating_point():
        raise InputError(
            f"feature {feature!r} of table {table.name!r} holds {ids_N.dtype} values, expected "
            "integer row ids"
        )
    ids_N = ids_N.to(torch.int64)
    if (outside := table.id_outside(ids_N)) is not None:
        raise InputError(
            f"feature {feature!r} holds id {outside}, but the rows of table {table.name!r} are "
            f"{table.row_range}; hash or clip the ids first"
        )
    return ids_N


def count_files(
    paths: str | PathLike[str] | Iterable[str | PathLike[str]],
    tables: Sequence[ModelTable],
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
        for chunk in _read_chunks(path, columns):
            for table, counter in zip(tables, counters):
                for feature in table.feature_names:
                    try:
                        ids_N = _row_ids(chunk.column(feature), table, hash_ids, missing_id)
                    except InputError as error:
                        raise InputError(f"{path}: column {feature} {error}") from error
                    counter.add(ids_N)
            num_samples += chunk.num_rows
            if progress is not None:
                progress(chunk.num_rows)
    return {table.name: counter.result() for table, counter in zip(tables, counters)}, num_samples


def num_samples_of(path: str | PathLike[str]) -> int:
    """Reads the number of samples in a Parquet file from its footer; ``InputError`` if the file
    cannot be read."""
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
    types = pa.types
    return types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
