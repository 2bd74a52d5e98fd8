"""What Criteo's samples have, whether read or generated: 13 dense features, columns of one id."""

from __future__ import annotations

from collections.abc import Mapping

from torchrec_picasso.app.config import DataConfig
from torchrec_picasso.app.zoo.tables import NUM_DENSE, TableSpec, table_specs

__all__ = ["CriteoColumns"]


class CriteoColumns:
    """The column facts of a :class:`.BatchSource`.

    Args:
        data: Table sizes.
    """

    def __init__(self, data: DataConfig) -> None:
        self._data = data
        self._tables = table_specs(data)

    @property
    def tables(self) -> tuple[TableSpec, ...]:
        """A table for each column."""
        return self._tables

    @property
    def columns(self) -> Mapping[str, tuple[str, ...]]:
        """All are fields."""
        return {"fields": tuple(table.feature for table in self._tables)}

    @property
    def num_rows(self) -> Mapping[str, int]:
        """Rows that the ids of each column need."""
        return {table.feature: table.num_embeddings for table in self._tables}

    @property
    def num_dense(self) -> int:
        """Dense features of a sample."""
        return NUM_DENSE

    @property
    def num_tasks(self) -> int:
        """Labels of a sample."""
        return self._data.num_tasks
