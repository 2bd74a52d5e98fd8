"""What a model looks up, in groups of columns, and the collections that hold their tables.

Groups that read the same tables share collections. Where one of them is of sequences, these are
EmbeddingCollections, one for each dim, since TorchRec's hold one; else one EmbeddingBagCollection.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_picasso.app.zoo.tables import Table
from torchrec_picasso.errors import ConfigError

__all__ = [
    "BAG",
    "KINDS",
    "ONE_HOT",
    "SEQUENCE",
    "FeatureGroup",
    "FeatureGroups",
    "Found",
    "Reads",
]

ONE_HOT, BAG, SEQUENCE = KINDS = ("one_hot", "bag", "sequence")
"""One id per sample; any number, whose rows are summed; any number, each with its row."""

Found = dict[str, list[Any]]
"""By group, of each column: a tensor ``(B, D)``, of sequences a JaggedTensor of B lists."""


@dataclass(frozen=True, kw_only=True)
class FeatureGroup:
    """Columns that a model treats alike.

    Args:
        name: Of the group.
        columns: Features of the batch.
        dims: Columns of each one's table.
        kind: One of :data:`KINDS`.
        max_length: Longest list of a sample; the data's reader cuts what is longer.
        tables_of: The group whose tables these columns read, in their order; ``None`` = its own.
    """

    name: str
    columns: tuple[str, ...]
    dims: tuple[int, ...]
    kind: str = ONE_HOT
    max_length: int = 1
    tables_of: str | None = None


@dataclass(frozen=True)
class Reads:
    """A group of columns that a model reads, as it says itself.

    Args:
        role: What of the data, see :class:`torchrec_picasso.app.zoo.data.source.BatchSource`.
        kind: One of :data:`KINDS`.
        tables_of: The group whose tables it reads; ``None`` = its own.
        dim: Columns of each table; ``None`` = as the configuration says.
    """

    role: str
    kind: str = ONE_HOT
    tables_of: str | None = None
    dim: int | None = None


class FeatureGroups(nn.Module):
    """Looks up all groups of a batch. Tables are on the meta device.

    Args:
        groups: All; each name once.
        num_rows: Rows that the ids of each column need.

    Raises:
        ConfigError: If a group's tables are another's that does not fit, or a bag's and a
            sequence's, which need them in two forms.
    """

    def __init__(self, groups: Sequence[FeatureGroup], num_rows: Mapping[str, int]) -> None:
        super().__init__()
        self.groups = {group.name: group for group in groups}
        self._check()
        readers = {
            group.name: [of for of in groups if group.name in (of.name, of.tables_of)]
            for group in groups
            if group.tables_of is None
        }
        all_tables: list[Table] = []
        self.collections = nn.ModuleDict()
        self._place: dict[tuple[str, int], str] = {}
        self._in_lists: set[str] = set()
        for name, of in readers.items():
            taken = {table.name for table in all_tables}
            tables = _tables_of(self.groups[name], of, num_rows, taken)
            all_tables += tables
            is_ordered = any(group.kind == SEQUENCE for group in of)
            by_key: dict[str, list[Table]] = {}
            for index, table in enumerate(tables):
                key = f"{name}_{table.dim}" if is_ordered else name
                by_key.setdefault(key, []).append(table)
                self._place |= {(group.name, index): key for group in of}
            self._in_lists |= set(by_key) if is_ordered else set()
            for key, some in by_key.items():
                self.collections[key] = _collection(some, is_ordered)

    def dims(self, name: str) -> tuple[int, ...]:
        """Columns of each table that a group reads."""
        return self.groups[name].dims

    def forward(self, features: KeyedJaggedTensor) -> Found:
        """Gives what each column reads; of a column with one id its row, whatever holds it."""
        rows = {key: collection(features) for key, collection in self.collections.items()}
        # one split has one backward; a column at a time would have one over all columns each
        rows |= {key: rows[key].to_dict() for key in rows if key not in self._in_lists}
        return {
            name: [
                self._value(rows, self._place[name, index], column, group.kind)
                for index, column in enumerate(group.columns)
            ]
            for name, group in self.groups.items()
        }

    def _value(self, rows: Mapping[str, Any], key: str, column: str, kind: str) -> Any:
        value = rows[key][column]  # by name: sharding changes the order
        return value.values() if kind == ONE_HOT and key in self._in_lists else value

    def _check(self) -> None:
        for group in self.groups.values():
            if len(group.dims) != len(group.columns):
                raise ConfigError(
                    f"group {group.name!r} has {len(group.columns)} columns and {len(group.dims)} "
                    "dims; give each column one"
                )
            if group.tables_of is None:
                continue
            owner = self.groups.get(group.tables_of)
            if owner is None or owner.tables_of is not None or owner.dims != group.dims:
                raise ConfigError(
                    f"group {group.name!r} reads the tables of {group.tables_of!r}, which is no "
                    "group with as many tables of its own; groups with tables are "
                    f"{[of.name for of in self.groups.values() if of.tables_of is None]}"
                )
            if {group.kind, owner.kind} == {BAG, SEQUENCE}:
                raise ConfigError(
                    f"groups {group.name!r} and {owner.name!r} read the same tables, one as bags "
                    "and one as sequences; give each its own"
                )


def _tables_of(
    owner: FeatureGroup,
    readers: Sequence[FeatureGroup],
    num_rows: Mapping[str, int],
    taken: Collection[str],
) -> list[Table]:
    found = []
    for index, (column, dim) in enumerate(zip(owner.columns, owner.dims)):
        name = f"t_{column}"
        features = tuple(dict.fromkeys(group.columns[index] for group in readers))
        found.append(
            Table(
                name=f"{name}_{owner.name}" if name in taken else name,
                num_embeddings=max(num_rows[feature] for feature in features),
                dim=dim,
                features=features,
            )
        )
    return found


def _collection(
    tables: Sequence[Table], is_ordered: bool
) -> EmbeddingBagCollection | EmbeddingCollection:
    config, collection = (
        (EmbeddingConfig, EmbeddingCollection)
        if is_ordered
        else (EmbeddingBagConfig, EmbeddingBagCollection)
    )
    configs = [
        config(
            name=table.name,
            num_embeddings=table.num_embeddings,
            embedding_dim=table.dim,
            feature_names=list(table.features),
        )
        for table in tables
    ]
    return collection(tables=configs, device=torch.device("meta"))
