"""Reads a model's tables and a stream of batches, and counts every lookup.

Every id is checked against its table here, because counts of ids that no table holds would make hot
sets of rows that do not exist. The check costs one pass over each feature's ids.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import islice

import torch
from torch import Tensor, nn
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_picasso.errors import InputError, PlanError
from torchrec_picasso.frequency.accumulate import MAX_ROWS_COUNTED, CountAccumulator
from torchrec_picasso.frequency.counts import ModelTable, TableCounts
from torchrec_picasso.frequency.sparse_counts import count_rows

__all__ = ["count_lookups", "model_tables"]

_BATCHES_LOOKED_AT = 16
"""First batches whose distinct rows show how often a batch repeats a row."""


def model_tables(model: nn.Module) -> list[ModelTable]:
    """Lists the embedding tables of an unsharded model, in module order.

    Args:
        model: Holds EmbeddingBagCollections or EmbeddingCollections at any depth, meta device too.

    Returns:
        One entry per table.

    Raises:
        PlanError: If there is no table, or one name stands for two tables.
    """
    tables: dict[str, ModelTable] = {}
    paths: dict[str, str] = {}
    for path, module in model.named_modules():
        if isinstance(module, EmbeddingBagCollection):
            configs = module.embedding_bag_configs()
        elif isinstance(module, EmbeddingCollection):
            configs = module.embedding_configs()
        else:
            continue
        for config in configs:
            if config.name in tables:
                raise PlanError(
                    f"table {config.name!r} exists in module {paths[config.name]!r} and in module "
                    f"{path!r}; frequency statistics are kept by table name, so give each table of "
                    "the model its own name"
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
            "pass the model as it is before sharding"
        )
    return list(tables.values())


def count_lookups(
    batches: Iterable[object],
    tables: Sequence[ModelTable],
    num_batches: int | None,
    max_rows_counted: int = MAX_ROWS_COUNTED,
) -> tuple[dict[str, TableCounts], int, int]:
    """Counts the lookups of each table.

    Args:
        batches: KeyedJaggedTensors, or objects with one in their ``sparse_features``.
        tables: Tables to count; batch features that none of them uses are ignored.
        num_batches: How many batches to take from ``batches``; ``None`` takes all.
        max_rows_counted: Most rows of a large table that are counted one by one.

    Returns:
        Counts per table name, batches read, samples read.

    Raises:
        InputError: If a batch is not of the kind above, lacks a feature, or holds an id outside its
            table.
    """
    counters = [CountAccumulator(table, max_rows_counted) for table in tables]
    distinct_rows = dict.fromkeys((table.name for table in tables), 0)
    num_lookups = dict(distinct_rows)  # both of the first batches alone
    batches_read = samples_read = 0
    for batch in islice(batches, num_batches):
        features = _sparse_features(batch)
        values_by_feature = _values_by_feature(features)
        for table, counter in zip(tables, counters):
            ids = [_checked_ids(values_by_feature, name, table) for name in table.feature_names]
            for ids_N in ids:
                counter.add(ids_N)
            if batches_read < _BATCHES_LOOKED_AT:
                ids_N = torch.cat(ids)
                num_lookups[table.name] += ids_N.numel()
                distinct_rows[table.name] += count_rows(ids_N.numpy())[0].size
        batches_read += 1
        samples_read += features.stride()
    counts = {table.name: counter.result() for table, counter in zip(tables, counters)}
    num_looked_at = min(batches_read, _BATCHES_LOOKED_AT)
    if num_looked_at > 1:  # one batch is the whole sample, whose distinct rows are known
        for name, table_counts in counts.items():
            spectrum = table_counts.spectrum().with_distinct(
                num_lookups[name] / num_looked_at,
                distinct_rows[name] / num_looked_at,
                num_looked_at,
            )
            counts[name] = replace(table_counts, effective_share=spectrum.effective_share)
    return counts, batches_read, samples_read


def _sparse_features(batch: object) -> KeyedJaggedTensor:
    features = getattr(batch, "sparse_features", batch)
    if not isinstance(features, KeyedJaggedTensor):
        raise InputError(
            f"a batch is a {type(batch).__name__}, expected a KeyedJaggedTensor or an object whose "
            "sparse_features is one; map your batches to their KeyedJaggedTensor first"
        )
    return features


def _values_by_feature(features: KeyedJaggedTensor) -> Mapping[str, Tensor]:
    values_N = features.values().detach().cpu()
    ends = features.offset_per_key()
    return {key: values_N[ends[i] : ends[i + 1]] for i, key in enumerate(features.keys())}


def _checked_ids(
    values_by_feature: Mapping[str, Tensor], feature: str, table: ModelTable
) -> Tensor:
    if feature not in values_by_feature:
        raise InputError(
            f"feature {feature!r} of table {table.name!r} is not in the batch, whose features are "
            f"{list(values_by_feature)}; were the batches made for another model?"
        )
    ids_N = values_by_feature[feature]
    if ids_N.is_floating_point():
        raise InputError(
            f"feature {feature!r} of table {table.name!r} holds {ids_N.dtype} values, expected "
            "integer row ids"
        )
    ids_N = ids_N.to(torch.int64)
    if ids_N.numel():
        smallest, largest = (int(x) for x in torch.aminmax(ids_N))
        num_embeddings = table.num_embeddings
        if smallest < 0 or (num_embeddings is not None and largest >= num_embeddings):
            wrong = smallest if smallest < 0 else largest
            raise InputError(
                f"feature {feature!r} holds id {wrong}, but the rows of table {table.name!r} are "
                f"{table.row_range}; hash or clip the ids to the table first"
            )
    return ids_N
