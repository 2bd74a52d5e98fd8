"""Criteo samples as endless batches, each rank taking its own samples of the same global batch.

The file is read in order, again and again, without one run of ``heldout_steps`` global batches:
the first, or for cross-validation a later one (``heldout_fold``). Every rank reads the whole file
and drops the other ranks' samples: simple and the same for both formats, at W times the reading.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from torchrec.datasets.utils import Batch

from torchrec_picasso.app.config import DataConfig
from torchrec_picasso.app.zoo.data.criteo_files import SampleChunk, read_criteo
from torchrec_picasso.app.zoo.data.source import CriteoColumns, make_batch
from torchrec_picasso.errors import ConfigError, PicassoError


class CriteoSource(CriteoColumns):
    """Endless batches from a Criteo file.

    Args:
        data: Path, batch size and table sizes.

    Raises:
        ConfigError: If ``data.path`` is not given.
    """

    def __init__(self, data: DataConfig) -> None:
        if data.path is None:
            raise ConfigError("data.path: expected the path of a Criteo file, got null")
        super().__init__(data)
        self._path = Path(data.path)

    def batches(self, rank: int, world_size: int, start_step: int = 0) -> Iterator[Batch]:
        """This rank's share of the global batches from ``start_step`` on, without end.

        Samples before ``start_step`` are read and dropped.

        Raises:
            PicassoError: If the file is malformed, or has no full global batch left for training.
        """
        batches = self._global_batches(*self._heldout(world_size), world_size)
        return (self._share(batch, rank) for batch in itertools.islice(batches, start_step, None))

    def heldout(self, rank: int, world_size: int) -> Iterator[Batch]:
        """This rank's share of the ``heldout_steps`` global batches that are kept out.

        Raises:
            PicassoError: If the file is malformed or has fewer samples.
        """
        first, _ = self._heldout(world_size)
        batches = self._global_batches(0, first, world_size)
        return (
            self._share(batch, rank)
            for batch in itertools.islice(batches, self._data.heldout_steps)
        )

    def _global_size(self, world_size: int) -> int:
        return self._data.batch_size * world_size

    def _heldout(self, world_size: int) -> tuple[int, int]:
        """Positions of the held-out samples in the file: first, and one past the last."""
        num_samples = self._data.heldout_steps * self._global_size(world_size)
        return self._data.heldout_fold * num_samples, (self._data.heldout_fold + 1) * num_samples

    def _global_batches(self, first: int, end: int, world_size: int) -> Iterator[SampleChunk]:
        """The samples of the file without ``first`` to ``end``, repeated, in global batches."""
        size = self._global_size(world_size)
        heldout_first, heldout_end = self._heldout(world_size)
        num_needed = max(heldout_end, heldout_end - heldout_first + size)  # one batch to train on
        parts: list[SampleChunk] = []
        num_missing = size
        while True:
            num_seen = 0
            for chunk in read_criteo(self._path):
                before = max(0, min(len(chunk), first - num_seen))
                after = max(0, min(len(chunk), end - num_seen))
                num_seen += len(chunk)
                for start, stop in ((0, before), (after, len(chunk))):
                    while start < stop:
                        taken = min(stop - start, num_missing)
                        parts.append(chunk.slice(start, start + taken))
                        start, num_missing = start + taken, num_missing - taken
                        if not num_missing:
                            yield _concat(parts)
                            parts, num_missing = [], size
            if num_seen < num_needed:
                raise PicassoError(
                    f"{self._path}: {num_seen} samples, but {num_needed} are needed for the "
                    "held-out samples and one global batch (batch_size x ranks); give a larger "
                    "file, or lower batch_size or heldout_steps"
                )

    def _share(self, chunk: SampleChunk, rank: int) -> Batch:
        size = self._data.batch_size
        mine = chunk.slice(rank * size, (rank + 1) * size)
        rows_F = np.array([table.num_embeddings for table in self.tables], dtype=np.int64)
        return make_batch(
            mine.labels_N,
            log_dense(mine.dense_NI),
            hash_ids(mine.ids_NF, rows_F),
            [table.feature for table in self.tables],
        )


def hash_ids(ids_NF: NDArray[np.int64], rows_F: NDArray[np.int64]) -> NDArray[np.int64]:
    """Maps hashed ids to row ids: ``id % rows``. A missing id, -1, gets the last row."""
    return np.mod(ids_NF, rows_F)


def log_dense(dense_NI: NDArray[np.float32]) -> NDArray[np.float32]:
    """Maps integer features to ``log(1 + max(x, 0))``; a missing one becomes 0.

    Source:
        facebookresearch/dlrm, data_utils.py: the transform of its published Criteo results.
    """
    return np.log1p(np.maximum(np.nan_to_num(dense_NI), 0.0)).astype(np.float32)


def _concat(parts: list[SampleChunk]) -> SampleChunk:
    if len(parts) == 1:
        return parts[0]
    return SampleChunk(
        labels_N=np.concatenate([part.labels_N for part in parts]),
        dense_NI=np.concatenate([part.dense_NI for part in parts]),
        ids_NF=np.concatenate([part.ids_NF for part in parts]),
    )
