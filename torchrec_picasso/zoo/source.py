"""What every source of training samples offers, and how samples become a TorchRec batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torchrec.datasets.utils import Batch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_picasso.zoo.tables import TableSpec

__all__ = ["BatchSource", "make_batch"]


class BatchSource(Protocol):
    """Endless batches that depend only on (rank, world size, step), so a run can be repeated."""

    @property
    def tables(self) -> tuple[TableSpec, ...]:
        """The tables that the batches look up."""
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
        labels_B: Clicks, 0 or 1, shape ``(B,)``.
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
