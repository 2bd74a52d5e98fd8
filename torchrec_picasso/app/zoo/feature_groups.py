"""Groups of columns that a model looks up, and the embedding collections that hold their tables.

Groups that read the same tables share collections. If one of them is a sequence, the tables are
EmbeddingCollections, one per dim (TorchRec allows one dim each), else one EmbeddingBagCollection.
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

from torchrec_picasso.app.config.schema import FEATURE_KINDS
from torchrec_picasso.errors import ConfigError

ONE_HOT, BAG, SEQUENCE = FEATURE_KINDS

Found = dict[str, list[Any]]
"""Per group, one value per column: a tensor ``(B, D)``, for sequences a JaggedTensor of B lists."""


@dataclass(frozen=True, kw_only=True)
class FeatureGroup:
    """Columns that a model treats in the same way.

    Args:
        name: Name of the group.
        columns: Features of the batch.
        dims: Columns of each feature's table.
        kind: One of :data:`.FEATURE_KINDS`.
        max_length: Longest list of a sample; the data's reader truncates longer ones.
        tables_of: Group whose tables these columns read, in order; ``None`` = tables of their own.
    """

    name: str
    columns: tuple[str, ...]
    dims: tuple[int, ...]
    kind: str = ONE_HOT
    max_length: int = 1
    tables_of: str | None = None


@dataclass(frozen=True)
class Reads:
    """Declares a group of columns that a model reads.

    Args:
        role: Role of the columns, see :class:`torchrec_picasso.app.zoo.data.source.BatchSource`.
        kind: One of :data:`.FEATURE_KINDS`.
        tables_of: Group whose tables it reads; ``None`` = tables of its own.
        dim: Columns of each table; ``None`` = as configured.
    """

    role: str
    kind: str = ONE_HOT
    tables_of: str | None = None
    dim: int | None = None


class FeatureGroups(nn.Module):
    """Looks up all groups of a batch. Tables are on the meta device.

    Args:
        groups: Groups, each name once.
        num_rows: Rows that the ids of each column need.

    Raises:
        ConfigError: If a group reads tables of another group that does not fit, or a bag and a
            sequence read the same tables.
    """

    def __init__(self, groups: Sequence[FeatureGroup], num_rows: Mapping[str, int]) -> None:
        super().__init__()
        self.groups = {group.name: group for group in groups}
        self._check()
        taken: set[str] = set()  # names of tables
        self.collections = nn.ModuleDict()
        self._key_of_column: dict[tuple[str, int], str] = {}
        self._sequence_keys: set[str] = set()
        for owner in (group for group in groups if group.tables_of is None):
            readers = [group for group in groups if owner.name in (group.name, group.tables_of)]
            is_sequence = any(group.kind == SEQUENCE for group in readers)
            tables = _tables_of(owner, readers, num_rows, taken, is_sequence)
            taken |= {table.name for table in tables}
            tables_by_key: dict[str, list[Any]] = {}
            for index, table in enumerate(tables):
                key = f"{owner.name}_{table.embedding_dim}" if is_sequence else owner.name
                tables_by_key.setdefault(key, []).append(table)
                self._key_of_column |= {(group.name, index): key for group in readers}
            collection = EmbeddingCollection if is_sequence else EmbeddingBagCollection
            for key, some_tables in tables_by_key.items():
                self.collections[key] = collection(tables=some_tables, device=torch.device("meta"))
                if is_sequence:
                    self._sequence_keys.add(key)

    def dims(self, name: str) -> tuple[int, ...]:
        """Columns of each table that a group reads."""
        return self.groups[name].dims

    def forward(self, features: KeyedJaggedTensor) -> Found:
        """Returns the embeddings of each column; a column with one id always gives a tensor."""
        rows = {key: collection(features) for key, collection in self.collections.items()}
        # to_dict splits once, with one backward; indexing would have a backward over all columns
        # for each column
        rows |= {key: rows[key].to_dict() for key in rows if key not in self._sequence_keys}
        return {
            name: [
                self._value(rows, self._key_of_column[name, index], column, group.kind)
                for index, column in enumerate(group.columns)
            ]
            for name, group in self.groups.items()
        }

    def _value(self, rows: Mapping[str, Any], key: str, column: str, kind: str) -> Any:
        value = rows[key][column]  # by name: sharding changes the order
        return value.values() if kind == ONE_HOT and key in self._sequence_keys else value

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
                owners = [each.name for each in self.groups.values() if each.tables_of is None]
                raise ConfigError(
                    f"group {group.name!r} reads the tables of {group.tables_of!r}, which is no "
                    "group with as many tables of its own and the same dims; groups with tables "
                    f"are {owners}"
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
    is_sequence: bool,
) -> list[EmbeddingBagConfig] | list[EmbeddingConfig]:
    config = EmbeddingConfig if is_sequence else EmbeddingBagConfig
    tables = []
    for index, (column, dim) in enumerate(zip(owner.columns, owner.dims)):
        name = f"t_{column}"
        features = tuple(dict.fromkeys(group.columns[index] for group in readers))
        tables.append(
            config(
                name=f"{name}_{owner.name}" if name in taken else name,
                num_embeddings=max(num_rows[feature] for feature in features),
                embedding_dim=dim,
                feature_names=list(features),
            )
        )
    return tables
