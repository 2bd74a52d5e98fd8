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

__all__ = ["CriteoSource", "hash_ids", "log_dense"]


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
        stream = _Circle(self._path, *self._heldout(world_size), self._num_needed(world_size))
        for step in itertools.count():
            chunk = stream.take(self._global_size(world_size), keep=step >= start_step)
            if chunk is not None:
                yield self._share(chunk, rank)

    def heldout(self, rank: int, world_size: int) -> Iterator[Batch]:
        """This rank's share of the ``heldout_steps`` global batches that are kept out.

        Raises:
            PicassoError: If the file is malformed or has fewer samples.
        """
        first, _ = self._heldout(world_size)
        global_size = self._global_size(world_size)
        stream = _Circle(self._path, 0, first, self._num_needed(world_size))
        for _ in range(self._data.heldout_steps):
            chunk = stream.take(global_size, keep=True)
            assert chunk is not None
            yield self._share(chunk, rank)

    def _global_size(self, world_size: int) -> int:
        return self._data.batch_size * world_size

    def _heldout(self, world_size: int) -> tuple[int, int]:
        """Positions of the held-out samples in the file: first, and one past the last."""
        num_samples = self._data.heldout_steps * self._global_size(world_size)
        return self._data.heldout_fold * num_samples, (self._data.heldout_fold + 1) * num_samples

    def _num_needed(self, world_size: int) -> int:
        """Samples that a file needs to have a global batch left to train on."""
        first, end = self._heldout(world_size)
        return max(end, end - first + self._global_size(world_size))

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
    """Maps hashed ids to row ids: ``id % rows``. A missing id, -1, gets the last row.

    Args:
        ids_NF: Ids, shape ``(N, F)``.
        rows_F: Rows of each table, shape ``(F,)``.

    Returns:
        Row ids, shape ``(N, F)``.
    """
    return np.mod(ids_NF, rows_F)


def log_dense(dense_NI: NDArray[np.float32]) -> NDArray[np.float32]:
    """Maps integer features to ``log(1 + max(x, 0))``; a missing one becomes 0.

    Source:
        facebookresearch/dlrm, data_utils.py: the transform of its published Criteo results.
    """
    return np.log1p(np.maximum(np.nan_to_num(dense_NI), 0.0)).astype(np.float32)


class _Circle:
    """The samples of a file without a range of them, repeated without end.

    Args:
        path: The file.
        first: First sample of the range that is left out.
        end: One past its last sample.
        num_needed: Samples that the file must have.
    """

    def __init__(self, path: Path, first: int, end: int, num_needed: int) -> None:
        self._path = path
        self._first, self._end = first, end
        self._num_needed = num_needed
        self._chunks = self._endless()
        self._rest: SampleChunk | None = None

    def take(self, num_samples: int, keep: bool) -> SampleChunk | None:
        """Returns the next samples, or skips them and returns ``None``."""
        parts: list[SampleChunk] = []
        while num_samples:
            chunk = self._rest if self._rest is not None else next(self._chunks)
            taken = min(num_samples, len(chunk))
            parts.append(chunk.slice(0, taken))
            self._rest = chunk.slice(taken, len(chunk)) if taken < len(chunk) else None
            num_samples -= taken
        return _concat(parts) if keep else None

    def _endless(self) -> Iterator[SampleChunk]:
        while True:
            num_seen = 0
            for chunk in read_criteo(self._path):
                before = max(0, min(len(chunk), self._first - num_seen))
                after = max(0, min(len(chunk), self._end - num_seen))
                num_seen += len(chunk)
                for start, stop in ((0, before), (after, len(chunk))):
                    if start < stop:
                        yield chunk.slice(start, stop)
            if num_seen < self._num_needed:
                raise PicassoError(
                    f"{self._path}: {num_seen} samples, but {self._num_needed} are needed for the "
                    "held-out samples and one global batch (batch_size x ranks); give a larger "
                    "file, or lower batch_size or heldout_steps"
                )


def _concat(parts: list[SampleChunk]) -> SampleChunk:
    if len(parts) == 1:
        return parts[0]
    return SampleChunk(
        labels_N=np.concatenate([part.labels_N for part in parts]),
        dense_NI=np.concatenate([part.dense_NI for part in parts]),
        ids_NF=np.concatenate([part.ids_NF for part in parts]),
    )
