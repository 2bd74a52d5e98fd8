"""Reads the ids of a model's tables from batches and from Parquet data files.

Every id is checked against its table: counts of other ids would select hot rows that do not exist.
Of a file, only the columns of counted features are decoded, in the calling thread and through small
buffers, so memory does not depend on the size of row groups.

Shape letters: N lookups.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from os import PathLike
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from torch import nn
from torchrec.modules.embedding_configs import BaseEmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_picasso.errors import InputError, PlanError, first_line
from torchrec_picasso.frequency.counts import ModelTable

CHUNK_ROWS = 1 << 18
"""Samples per chunk of a file: 2 MiB per column of int64."""
_LISTS = (pa.ListType, pa.LargeListType, pa.FixedSizeListType)
_READ_BUFFER_BYTES = 1 << 20


def model_tables(model: nn.Module) -> list[ModelTable]:
    """Lists the tables of an unsharded model's EmbeddingBagCollections and EmbeddingCollections, at
    any depth, in module order.

    Raises PlanError if there is no table, or two tables have the same name.
    """
    paths: dict[str, str] = {}
    tables = []
    for path, config in table_configs(model):
        if config.name in paths:
            raise PlanError(
                f"table {config.name!r} exists in module {paths[config.name]!r} and in module "
                f"{path!r}, but frequency statistics are stored by table name; rename one of the "
                "tables"
            )
        paths[config.name] = path
        size, names = config.num_embeddings, tuple(config.feature_names)
        tables.append(ModelTable(name=config.name, num_embeddings=size, feature_names=names))
    if not tables:
        raise PlanError(
            f"{type(model).__name__} contains no EmbeddingBagCollection or EmbeddingCollection; "
            "pass the unsharded model"
        )
    return tables


def table_configs(model: nn.Module) -> Iterator[tuple[str, BaseEmbeddingConfig]]:
    """Yields the path of the collection and the configuration of each table, in module order."""
    for path, module in model.named_modules():
        if isinstance(module, EmbeddingBagCollection):
            yield from ((path, config) for config in module.embedding_bag_configs())
        elif isinstance(module, EmbeddingCollection):
            yield from ((path, config) for config in module.embedding_configs())


def batch_features(batch: object) -> KeyedJaggedTensor:
    """Returns the features of a batch, itself or its ``sparse_features``."""
    features = getattr(batch, "sparse_features", batch)
    if not isinstance(features, KeyedJaggedTensor):
        raise InputError(
            f"a batch is a {type(batch).__name__}, expected a KeyedJaggedTensor or an object with "
            "a KeyedJaggedTensor sparse_features; convert the batches first"
        )
    return features


def batch_ids(features: KeyedJaggedTensor, table: ModelTable) -> NDArray[np.int64]:
    """Returns the row ids that a batch looks up in a table, by all its features, ``(N,)``."""
    ids, names = [], features.keys()
    for name in table.feature_names:
        if name not in names:
            raise InputError(
                f"feature {name!r} of table {table.name!r} is not in the batch, which has features "
                f"{names}; pass batches of this model"
            )
        values_N = features[name].values().detach().cpu()
        if values_N.is_floating_point():
            raise InputError(
                f"feature {name!r} of table {table.name!r} holds {values_N.dtype} values, expected "
                "integer row ids"
            )
        ids.append(values_N.numpy().astype(np.int64, copy=False))
        table.check_ids(ids[-1], f"feature {name!r}")
    return np.concatenate(ids)


def read_chunks(
    paths: str | PathLike[str] | Iterable[str | PathLike[str]], tables: Sequence[ModelTable]
) -> Iterator[tuple[Path, pa.RecordBatch]]:
    """Yields each file's path and samples, in chunks with the columns of the tables' features.

    Raises InputError if a file cannot be read or lacks a column, or a column holds no integers.
    """
    files = [Path(paths)] if isinstance(paths, (str, PathLike)) else [Path(path) for path in paths]
    if not files:
        raise InputError("no data files were given; name at least one Parquet file")
    # a feature of several tables is read once
    columns = list(dict.fromkeys(name for table in tables for name in table.feature_names))
    for path in files:  # all files are checked before the first, possibly for hours, is counted
        _check_columns(path, columns)
    for path in files:
        with _open(path) as file:
            try:
                for chunk in file.iter_batches(CHUNK_ROWS, columns=columns, use_threads=False):
                    yield path, chunk
            except (pa.ArrowException, OSError) as error:
                raise InputError(f"{path}: damaged Parquet file ({first_line(error)})") from error


def _open(path: Path) -> pq.ParquetFile:
    if not path.is_file():
        raise InputError(f"{path}: no such file; name Parquet files, not folders")
    if path.stat().st_size == 0:
        raise InputError(f"{path}: the file is empty (0 bytes); expected Parquet")
    try:
        return pq.ParquetFile(path, buffer_size=_READ_BUFFER_BYTES, pre_buffer=False)
    except (pa.ArrowException, OSError) as error:
        raise InputError(f"{path}: not readable as Parquet ({first_line(error)})") from error


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
        if not pa.types.is_integer(kind.value_type if isinstance(kind, _LISTS) else kind):
            raise InputError(
                f"{path}: column {name} holds {kind}, expected integers or lists of integers; "
                "convert it to integer ids first"
            )


def chunk_ids(
    path: Path, chunk: pa.RecordBatch, table: ModelTable, hash_ids: bool, missing_id: int | None
) -> NDArray[np.int64]:
    """Returns the row ids that samples of a file look up in a table, by all its features,
    ``(N,)``; arguments as for ``FrequencyStats.from_files``."""
    ids: list[NDArray[np.int64]] = []
    for name in table.feature_names:
        where, column = f"{path}: column {name}", chunk.column(name)
        if isinstance(column.type, _LISTS):
            column = column.flatten()
        try:
            column = column.cast(pa.int64())
        except pa.ArrowInvalid as error:  # only uint64 has larger values
            raise InputError(
                f"{where} holds an id of 2**63 or more; convert its ids to int64 first"
            ) from error
        column = column.drop_null() if missing_id is None else column.fill_null(missing_id)
        ids_N = column.to_numpy(zero_copy_only=False)
        if hash_ids and table.num_embeddings is not None:
            ids_N = ids_N % table.num_embeddings
        table.check_ids(ids_N, where)
        ids.append(ids_N)
    return np.concatenate(ids)
