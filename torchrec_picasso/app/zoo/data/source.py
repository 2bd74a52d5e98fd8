"""What every source of training samples offers, and how samples become a TorchRec batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torchrec.datasets.utils import Batch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

__all__ = ["BatchSource", "make_batch"]


class BatchSource(Protocol):
    """Endless batches that depend only on (rank, world size, step), so a run can be repeated."""

    @property
    def columns(self) -> Mapping[str, tuple[str, ...]]:
        """Columns of ids by the role that models know them in.

        ``fields``: all with one id per sample. Clicks have beside these ``target``, what is clicked
        or not, ``profile``, the other fields, ``history``, of each target what was clicked before,
        and ``negatives``, for each click of a history something that was not clicked.
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
        """This rank's share of the samples that training never sees."""
        ...


def make_batch(
    labels_B: NDArray[np.float32],
    dense_BI: NDArray[np.float32],
    ids_BF: NDArray[np.int64],
    features: Sequence[str],
) -> Batch:
    """Builds a one-hot batch.

    Args:
        labels_B: Clicks, 0 or 1, shape ``(B,)``, or of several tasks ``(B, tasks)``.
        dense_BI: Dense features, shape ``(B, I)``.
        ids_BF: Row ids, shape ``(B, F)``, each inside its table.
        features: Names of the F features.

    Returns:
        A batch whose ``KeyedJaggedTensor`` holds one id per feature and sample.
    """
    num_samples, num_features = ids_BF.shape
    values_FB = np.ascontiguousarray(ids_BF.T).reshape(-1)  # feature-major, as TorchRec wants it
    return Batch(
        dense_features=torch.from_numpy(np.ascontiguousarray(dense_BI)),
        sparse_features=KeyedJaggedTensor.from_lengths_sync(
            keys=list(features),
            values=torch.from_numpy(values_FB),
            lengths=torch.ones(num_features * num_samples, dtype=torch.int32),
        ),
        labels=torch.from_numpy(np.ascontiguousarray(labels_B)),
    )
