"""Lists a model's tables and counts every lookup in a stream of batches.

Every id is checked against its table in one pass over each feature's ids: counts of other ids would
select hot rows that do not exist.

Shape letters: N lookups.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice

import torch
from torch import Tensor, nn
from torchrec.modules.embedding_configs import BaseEmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_picasso.errors import InputError, PlanError
from torchrec_picasso.frequency.counts import ModelTable, TableCounts, count_rows, lookup_counter

__all__ = ["count_lookups", "model_tables", "table_configs"]

_MEASURED_BATCHES = 16
"""Number of first batches whose distinct rows are counted per batch."""


def model_tables(model: nn.Module) -> list[ModelTable]:
    """Lists the tables of an unsharded model's EmbeddingBagCollections and EmbeddingCollections, at
    any depth, in module order.

    Raises:
        PlanError: If there is no table, or two tables have the same name.
    """
    tables: dict[str, ModelTable] = {}
    paths: dict[str, str] = {}
    for path, config in table_configs(model):
        if config.name in tables:
            raise PlanError(
                f"table {config.name!r} exists in module {paths[config.name]!r} and in module "
                f"{path!r}, but frequency statistics are stored by table name; rename one of the "
                "tables"
            )
        paths[config.name] = path
        tables[config.name] = ModelTable(
            name=config.name,
            num_embeddings=config.num_embeddings,
            feature_names=tuple(config.feature_names),
        )
    if not tables:
        raise PlanError(
            f"{type(model).__name__} contains no EmbeddingBagCollection or EmbeddingCollection; "
            "pass the unsharded model"
        )
    return list(tables.values())


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
        values_by_feature = _values_by_feature(features)
        for table, counter in zip(tables, counters):
            ids = [_checked_ids(values_by_feature, name, table) for name in table.feature_names]
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


def _values_by_feature(features: KeyedJaggedTensor) -> Mapping[str, Tensor]:
    values_N = features.values().detach().cpu()
    # offset_per_key: first value of each feature, and N
    ends = features.offset_per_key()
    return {key: values_N[ends[i] : ends[i + 1]] for i, key in enumerate(features.keys())}


def _checked_ids(
    values_by_feature: Mapping[str, Tensor], feature: str, table: ModelTable
) -> Tensor:
    if feature not in values_by_feature:
        raise InputError(
            f"feature {feature!r} of table {table.name!r} is not in the batch, which has features "
            f"{list(values_by_feature)}; pass batches of this model"
        )
    ids_N = values_by_feature[feature]
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
