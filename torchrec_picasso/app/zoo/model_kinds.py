"""The models that a configuration can name: every file of ``zoo/models`` with a class that reads.

A model is a module over :class:`.FeatureGroups` whose class says in ``reads`` which groups of
columns it looks up; nothing else has to know of it.
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

__all__ = [
    "describe_groups",
    "groups_of",
    "make_head",
    "model_class",
    "needs_clicks",
]

_GIVEN = ("self", "embeddings", "num_dense")
_OF_CLICKS = ("target", "profile", "history", "negatives")


def model_class(kind: str) -> type[nn.Module]:
    """The class of a model, whose ``reads`` says what it looks up.

    Args:
        kind: Any of :func:`model_kinds` but :data:`DLRM`.

    Raises:
        ConfigError: If there is none of this name.
    """
    if kind not in model_kinds() or kind == DLRM:
        raise ConfigError(
            f"model.kind: there is no {kind!r}; models are {', '.join(model_kinds())}"
        )
    name = f"{models.__name__}.{kind}"
    module = importlib.import_module(name)
    (found,) = (
        of
        for of in vars(module).values()
        if isinstance(of, type) and issubclass(of, nn.Module)
        if of.__module__ == name and hasattr(of, "reads")
    )
    return found


def needs_clicks(kind: str) -> bool:
    """Whether a model reads what only clicks have: histories, targets, profiles."""
    if kind == DLRM:
        return False
    return any(of.role in _OF_CLICKS for of in _reads(model_class(kind)).values())


def groups_of(
    model: ModelConfig,
    features: Mapping[str, FeatureConfig],
    source: BatchSource,
    max_length: int,
) -> list[FeatureGroup]:
    """The groups that a model looks up: as its class says, changed by the configuration.

    Args:
        model: Its kind and the usual dim.
        features: Changes by group.
        source: Has the columns.
        max_length: Longest sequence.

    Raises:
        ConfigError: If the model has no such group, or the data no such columns.
    """
    reads = _reads(model_class(model.kind))
    unknown = [name for name in features if name not in reads]
    if unknown:
        raise ConfigError(
            f"features.{unknown[0]}: a {model.kind} has no such group; it reads {', '.join(reads)}"
        )
    return [
        _group(name, of, model, features.get(name) or FeatureConfig(), source, max_length)
        for name, of in reads.items()
    ]


def make_head(model: ModelConfig, embeddings: FeatureGroups, source: BatchSource) -> nn.Module:
    """A model over its embeddings.

    Args:
        model: Kind and sizes.
        embeddings: Of the groups that it reads.
        source: Tells dense features and labels.

    Raises:
        ConfigError: If it has no such size, or they do not fit its embeddings or the data.
    """
    head, sizes = model_class(model.kind), dict(model.sizes or {})
    known = [name for name in inspect.signature(head.__init__).parameters if name not in _GIVEN]
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
    try:
        return head(embeddings, source.num_dense, **sizes)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"model.sizes: a {model.kind} cannot have {sizes}: {error}") from error


def _group(
    name: str,
    reads: Reads,
    model: ModelConfig,
    change: FeatureConfig,
    source: BatchSource,
    max_length: int,
) -> FeatureGroup:
    there = source.columns.get(reads.role)
    if there is None:
        raise ConfigError(
            f"model.kind: a {model.kind} reads {reads.role!r}, which this data has not; it has "
            f"{', '.join(source.columns)}. Set data.kind to clicks"
        )
    columns = change.columns if change.columns is not None else there
    missing = [column for column in columns if column not in source.num_rows]
    if missing or not columns:
        raise ConfigError(
            f"features.{name}.columns: the data has no column {', '.join(missing) or 'at all'}; "
            f"it has {', '.join(source.num_rows)}"
        )
    kind = change.kind or reads.kind
    dim = change.dim or reads.dim or model.embedding_dim
    return FeatureGroup(
        name=name,
        columns=tuple(columns),
        dims=(dim,) * len(columns),
        kind=kind,
        max_length=max_length if kind == SEQUENCE else 1,
        tables_of=change.tables_of or reads.tables_of,
    )


def _reads(head: type[nn.Module]) -> Mapping[str, Reads]:
    found: Any = head
    reads: Mapping[str, Reads] = found.reads
    return reads


def describe_groups(kind: str) -> Sequence[str]:
    """What a model reads, a line for each group."""
    if kind == DLRM:
        return ["fields: one_hot"]
    return [
        f"{name}: {of.kind}, {of.role}"
        + (f", tables of {of.tables_of}" if of.tables_of else "")
        + (f", dim {of.dim}" if of.dim else "")
        for name, of in _reads(model_class(kind)).items()
    ]
