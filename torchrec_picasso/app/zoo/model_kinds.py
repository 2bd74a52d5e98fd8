"""The models that a configuration can name: each file of ``zoo/models`` has one.

A model is a module over :class:`.FeatureGroups`; its ``reads`` declares the groups of columns that
it looks up. There is no further registration.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from torchrec_picasso.app.config import FeatureConfig, ModelConfig
from torchrec_picasso.app.zoo import models
from torchrec_picasso.app.zoo.data.source import BatchSource
from torchrec_picasso.app.zoo.feature_groups import SEQUENCE, FeatureGroup, FeatureGroups, Reads
from torchrec_picasso.app.zoo.kinds import DLRM, model_kinds
from torchrec_picasso.errors import ConfigError

_NO_SIZES = ("embeddings", "num_dense")  # parameters of a model that every model has
_ROLES_OF_DATA = {
    "stream": ("cross", "cross_history"),
    "clicks": ("target", "profile", "history", "negatives"),
}
"""Columns that only this kind of data has."""


def data_kind(kind: str) -> str:
    """The kind of the generated data that a model can read, one of :data:`.DATA_KINDS`."""
    roles = {reads.role for reads in _reads_of(kind).values()} if kind != DLRM else set()
    found = (name for name, only in _ROLES_OF_DATA.items() if roles.intersection(only))
    return next(found, "criteo")


def groups_of(
    model: ModelConfig,
    features: Mapping[str, FeatureConfig],
    source: BatchSource,
    max_length: int,
) -> list[FeatureGroup]:
    """The groups that a model looks up, as its class declares and the configuration changes them.

    Args:
        model: Kind and default dim.
        features: Changes by group.
        source: Has the columns.
        max_length: Longest sequence.

    Raises:
        ConfigError: If the model has no such group, or the data no such columns.
    """
    declared = _reads_of(model.kind)
    unknown = [name for name in features if name not in declared]
    if unknown:
        raise ConfigError(
            f"features.{unknown[0]}: a {model.kind} has no such group; it reads "
            f"{', '.join(declared)}"
        )
    return [
        _group(name, reads, model, features.get(name) or FeatureConfig(), source, max_length)
        for name, reads in declared.items()
    ]


def make_head(model: ModelConfig, embeddings: FeatureGroups, source: BatchSource) -> nn.Module:
    """Builds a model over its embeddings.

    Args:
        model: Kind and sizes.
        embeddings: Embeddings of its groups.
        source: Defines dense features and labels.

    Raises:
        ConfigError: If a size is unknown, or does not fit the embeddings or the data.
    """
    sizes, known = dict(model.sizes or {}), _sizes_of(model.kind)
    unknown = [name for name in sizes if name not in known]
    if unknown:
        raise ConfigError(
            f"model.sizes.{unknown[0]}: a {model.kind} has no such size; it has {', '.join(known)}"
        )
    num_tasks = sizes.setdefault("num_tasks", source.num_tasks) if "num_tasks" in known else 1
    if num_tasks != source.num_tasks:
        raise ConfigError(
            f"model.kind: a {model.kind} of {num_tasks} tasks cannot learn from samples with "
            f"{source.num_tasks} labels; set data.num_tasks or model.sizes.num_tasks"
        )
    num_candidates = getattr(source, "num_candidates", None)
    if ("num_candidates" in known) != (num_candidates is not None):
        raise ConfigError(
            f"model.kind: a {model.kind} cannot learn from these samples, whose candidates are "
            f"{num_candidates or 'not in lists'}; set data.kind to {data_kind(model.kind)}"
        )
    if num_candidates is not None:
        sizes["num_candidates"] = num_candidates
    try:
        return _model_class(model.kind)(embeddings, source.num_dense, **sizes)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"model.sizes: a {model.kind} cannot have {sizes}: {error}") from error


def describe_groups(kind: str) -> Sequence[str]:
    """Describes the groups that a model reads, one line each."""
    if kind == DLRM:
        return ["fields: one_hot"]
    return [
        f"{name}: {reads.kind}, {reads.role}"
        + (f", tables of {reads.tables_of}" if reads.tables_of else "")
        + (f", dim {reads.dim}" if reads.dim else "")
        for name, reads in _reads_of(kind).items()
    ]


def describe_sizes(kind: str) -> str:
    """Describes the sizes of a model with their defaults, in one line."""
    if kind == DLRM:
        return "model.embedding_dim, model.dense_layers, model.over_layers"
    defaults = {name: size.default for name, size in _sizes_of(kind).items()}
    return ", ".join(
        f"{name}={list(size) if isinstance(size, tuple) else size}"
        for name, size in defaults.items()
    )


def _model_class(kind: str) -> Any:
    if kind not in model_kinds() or kind == DLRM:
        raise ConfigError(
            f"model.kind: there is no {kind!r}; models are {', '.join(model_kinds())}"
        )
    module = importlib.import_module(f"{models.__name__}.{kind}")
    (model,) = (
        value
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, nn.Module)
        if value.__module__ == module.__name__ and hasattr(value, "reads")
    )
    return model


def _reads_of(kind: str) -> Mapping[str, Reads]:
    reads: Mapping[str, Reads] = _model_class(kind).reads
    return reads


def _sizes_of(kind: str) -> dict[str, inspect.Parameter]:
    parameters = inspect.signature(_model_class(kind)).parameters
    return {name: size for name, size in parameters.items() if name not in _NO_SIZES}


def _group(
    name: str,
    reads: Reads,
    model: ModelConfig,
    change: FeatureConfig,
    source: BatchSource,
    max_length: int,
) -> FeatureGroup:
    available = source.columns.get(reads.role)
    if available is None:
        raise ConfigError(
            f"model.kind: a {model.kind} reads {reads.role!r}, which this data has not; it has "
            f"{', '.join(source.columns)}. Set data.kind to {data_kind(model.kind)}"
        )
    columns = change.columns if change.columns is not None else available
    missing = [column for column in columns if column not in source.num_rows]
    if missing or not columns:
        raise ConfigError(
            f"features.{name}.columns: the data has no column {', '.join(missing) or 'at all'}; "
            f"it has {', '.join(source.num_rows)}"
        )
    kind = change.kind or reads.kind
    return FeatureGroup(
        name=name,
        columns=tuple(columns),
        dims=(change.dim or reads.dim or model.embedding_dim,) * len(columns),
        kind=kind,
        max_length=max_length if kind == SEQUENCE else 1,
        tables_of=change.tables_of or reads.tables_of,
    )
