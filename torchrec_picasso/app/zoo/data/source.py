"""Interface of the sources of training samples, and one-hot samples as TorchRec batches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torchrec.datasets.utils import Batch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_picasso.app.config import DataConfig
from torchrec_picasso.app.zoo.tables import NUM_DENSE, table_specs


class BatchSource(Protocol):
    """Endless batches that depend only on (rank, world size, step), so runs are reproducible."""

    @property
    def columns(self) -> Mapping[str, tuple[str, ...]]:
        """Id columns by role.

        ``fields`` are all columns with one id per sample. Clicks also have ``target``, the columns
        of the item; ``profile``, the other fields; ``history``, for each target column the earlier
        clicks; ``negatives``, for each click of a history an item that was not clicked.
        """
        ...

    @property
    def num_rows(self) -> Mapping[str, int]:
        """Rows that the ids of each column need."""
        ...

    @property
    def num_dense(self) -> int:
        """Dense features of a sample."""
        ...

    @property
    def num_tasks(self) -> int:
        """Labels of a sample."""
        ...

    def batches(self, rank: int, world_size: int, start_step: int = 0) -> Iterator[Batch]:
        """This rank's share of the global batches from ``start_step`` on, without end."""
        ...

    def heldout(self, rank: int, world_size: int) -> Iterator[Batch]:
        """This rank's share of the samples that are never trained on."""
        ...


class CriteoColumns:
    """Columns of Criteo's samples, read or generated: 13 dense features, columns of one id.

    Args:
        data: Table sizes.
    """

    num_dense = NUM_DENSE

    def __init__(self, data: DataConfig) -> None:
        self._data = data
        self.tables = table_specs(data)
        self.num_rows = {table.feature: table.num_embeddings for table in self.tables}
        self.columns = {"fields": tuple(self.num_rows)}
        self.num_tasks = data.num_tasks


def make_batch(
    labels_B: NDArray[np.float32],
    dense_BI: NDArray[np.float32],
    ids_BF: NDArray[np.int64],
    features: Sequence[str],
) -> Batch:
    """Builds a batch with one id per feature and sample.

    Args:
        labels_B: Labels 0 or 1, shape ``(B,)``, or for several tasks ``(B, tasks)``.
        dense_BI: Dense features, shape ``(B, I)``.
        ids_BF: Row ids, shape ``(B, F)``.
        features: Names of the F features.
    """
    num_samples, num_features = ids_BF.shape
    values_FB = np.ascontiguousarray(ids_BF.T).reshape(-1)  # a KeyedJaggedTensor is feature-major
    return Batch(
        dense_features=torch.from_numpy(np.ascontiguousarray(dense_BI)),
        sparse_features=KeyedJaggedTensor.from_lengths_sync(
            keys=list(features),
            values=torch.from_numpy(values_FB),
            lengths=torch.ones(num_features * num_samples, dtype=torch.int32),
        ),
        labels=torch.from_numpy(np.ascontiguousarray(labels_B)),
    )
