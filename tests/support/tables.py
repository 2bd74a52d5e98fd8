"""Tables of models, as data: their configurations for a collection, and counts of their rows."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    PoolingType,
)
from torchrec.distributed.embedding_types import (
    EmbeddingComputeKernel,
    GroupedEmbeddingConfig,
    ShardedEmbeddingTable,
)
from torchrec.modules.embedding_configs import DataType

from torchrec_picasso.frequency import FrequencyStats, TableCounts


@dataclass(frozen=True)
class Table:
    name: str
    dim: int
    rows: int
    features: tuple[str, ...]
    mean: bool = False


def tables_of(rows: Mapping[str, int], dim: int) -> list[Table]:
    """A table ``t`` for each number of rows, looked up by the feature ``f_t``."""
    return [Table(name, dim, num_rows, (f"f_{name}",)) for name, num_rows in rows.items()]


def configs_of(kind: type, tables: Iterable[Table], **more: Any) -> list[Any]:
    """Configurations of tables, for a collection."""
    pooling = {"pooling": PoolingType.MEAN}
    return [
        kind(
            name=table.name,
            embedding_dim=table.dim,
            num_embeddings=table.rows,
            feature_names=list(table.features),
            **(pooling if table.mean else {}),
            **more,
        )
        for table in tables
    ]


def bags_of(
    tables: Iterable[Table], device: str = "cpu", *, is_weighted: bool = False, **more: Any
) -> EmbeddingBagCollection:
    configs = configs_of(EmbeddingBagConfig, tables, **more)
    return EmbeddingBagCollection(configs, is_weighted, torch.device(device))


def sequences_of(
    tables: Iterable[Table], device: str = "cpu", *, need_indices: bool = False, **more: Any
) -> EmbeddingCollection:
    configs = configs_of(EmbeddingConfig, tables, **more)
    return EmbeddingCollection(configs, torch.device(device), need_indices)


def pack_of(
    tables: list[ShardedEmbeddingTable],
    kernel: EmbeddingComputeKernel = EmbeddingComputeKernel.FUSED,
    **more: Any,
) -> GroupedEmbeddingConfig:
    kind = DataType.FP32, PoolingType.SUM
    return GroupedEmbeddingConfig(*kind, False, False, kernel, tables, **more)


def stats_of(
    rows: Mapping[str, int], counts_of: Callable[[int], Tensor], num_batches: int, batch_size: int
) -> FrequencyStats:
    """Lookups of each table's first rows; ``counts_of`` gives them for a number of rows."""
    tables = {}
    for name, num_rows in rows.items():
        counts_U = counts_of(num_rows)
        tables[name] = TableCounts(
            num_embeddings=num_rows,
            feature_names=(f"f_{name}",),
            rows_U=torch.arange(len(counts_U)),
            counts_U=counts_U,
        )
    return FrequencyStats(
        tables=tables, num_batches=num_batches, num_samples=num_batches * batch_size
    )
