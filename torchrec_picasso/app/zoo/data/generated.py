"""Generated click data: Criteo's table sizes, Zipf-skewed ids, labels that a DLRM can learn.

A batch depends on (seed, stream, rank, step) alone, so any step can be made without those before.
Ids are drawn from the exact bounded Zipf distribution by inverting its CDF: 8 bytes per table row,
O(log rows) per id.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray
from torchrec.datasets.utils import Batch

from torchrec_picasso.app.config import DataConfig
from torchrec_picasso.app.zoo.data.source import CriteoColumns, make_batch
from torchrec_picasso.app.zoo.tables import NUM_DENSE

_TRAIN, _HELDOUT, _TABLES = 0, 1, 2  # random streams
_EXPONENT_SPREAD = 0.15  # tables differ in skew by up to this much around the mean
_ID_LOGIT_SCALE = 2.0  # standard deviation of the logit's part from all ids
_DENSE_LOGIT_SCALE = 0.5
_BASE_LOGIT = -1.0  # about 3 clicks in 10 samples
_SALTS_PER_TASK = 500_009
_LINEAR_SHARE, _WAVE_LOGIT_SCALE = 0.5, 1.5
_WAVES = ((1.0, 0.5), (2.0, 1.5))  # frequency and phase of each sine


def zipf_cdf(num_rows: int, exponent: float) -> NDArray[np.float64]:
    """Cumulative probability of the 1st, 2nd, ... most frequent row, shape ``(num_rows,)``.

    The k-th row is drawn with probability proportional to ``k ** -exponent``.
    """
    weights = np.arange(1, num_rows + 1, dtype=np.float64) ** -exponent
    cdf = np.cumsum(weights)
    return cdf / cdf[-1]


class GeneratedSource(CriteoColumns):
    """Endless generated batches.

    Args:
        data: Table sizes, batch size and skew.
        seed: Seed of tables, ids and labels.
    """

    def __init__(self, data: DataConfig, seed: int) -> None:
        super().__init__(data)
        self._seed = seed
        rng = np.random.default_rng([seed, _TABLES])
        spread = _EXPONENT_SPREAD * rng.uniform(-1.0, 1.0, len(self.tables))
        self.exponents = np.maximum(0.0, data.zipf_exponent + spread)  # of each table, (T,)
        if data.zipf_exponent == 0:
            self.exponents[:] = 0.0
        # Frequency rank k is row (k * stride + shift) % rows, so hot rows are scattered.
        self._strides = [_coprime(rng, table.num_embeddings) for table in self.tables]
        self._shifts = [int(rng.integers(table.num_embeddings)) for table in self.tables]
        self._dense_weights = rng.normal(size=NUM_DENSE) / math.sqrt(NUM_DENSE)
        self._cdfs: list[NDArray[np.float64]] | None = None  # built on first use

    def batches(self, rank: int, world_size: int, start_step: int = 0) -> Iterator[Batch]:
        """This rank's batches from ``start_step`` on, without end."""
        return (self._batch(_TRAIN, rank, step) for step in itertools.count(start_step))

    def heldout(self, rank: int, world_size: int) -> Iterator[Batch]:
        """This rank's share of ``heldout_steps`` batches from a stream of their own."""
        return (self._batch(_HELDOUT, rank, step) for step in range(self._data.heldout_steps))

    def _batch(self, stream: int, rank: int, step: int) -> Batch:
        rng = np.random.default_rng([self._seed, stream, rank, step])
        batch_size = self._data.batch_size
        if self._cdfs is None:
            self._cdfs = [
                zipf_cdf(table.num_embeddings, exponent)
                for table, exponent in zip(self.tables, self.exponents)
            ]
        ids_BT = np.empty((batch_size, len(self.tables)), dtype=np.int64)
        for index, table in enumerate(self.tables):
            frequency_rank_B = np.searchsorted(self._cdfs[index], rng.random(batch_size), "right")
            row_B = frequency_rank_B * self._strides[index] + self._shifts[index]
            ids_BT[:, index] = row_B % table.num_embeddings
        dense_BI = np.log1p(rng.exponential(10.0, (batch_size, NUM_DENSE))).astype(np.float32)
        logits_BL = self._logits(ids_BT, dense_BI)
        labels = [rng.random(batch_size) < 1 / (1 + np.exp(-logit_B)) for logit_B in logits_BL.T]
        labels_B = np.stack(labels, axis=1).astype(np.float32)
        if self.num_tasks == 1:
            labels_B = labels_B[:, 0]
        return make_batch(labels_B, dense_BI, ids_BT, [table.feature for table in self.tables])

    def _logits(
        self, ids_BT: NDArray[np.int64], dense_BI: NDArray[np.float32]
    ) -> NDArray[np.float64]:
        """Logits of all L tasks, shape ``(B, L)``."""
        dense_part_B = (dense_BI - 2.0) @ self._dense_weights * _DENSE_LOGIT_SCALE
        id_parts = [self._id_part(ids_BT, task) for task in range(self.num_tasks)]
        shared = self._data.task_correlation
        for task in range(1, self.num_tasks):
            id_parts[task] = shared * id_parts[0] + math.sqrt(1 - shared**2) * id_parts[task]
        if self._data.labels == "sines":
            id_parts = [_waves(id_part_B) for id_part_B in id_parts]
        logits_BL: NDArray[np.float64] = np.stack(
            [_BASE_LOGIT + id_part_B + dense_part_B for id_part_B in id_parts], axis=1
        )
        return logits_BL

    def _id_part(self, ids_BT: NDArray[np.int64], task: int) -> NDArray[np.float64]:
        # Every row of every table has a fixed score in [-1, 1), standard deviation 1/sqrt(3).
        num_tables = ids_BT.shape[1]
        salts_T = np.arange(num_tables) + self._seed * 1_000_003 + task * _SALTS_PER_TASK
        scores_BT = _hashed_uniform(ids_BT, salts_T)
        id_part_B: NDArray[np.float64] = (
            scores_BT.sum(axis=1) * _ID_LOGIT_SCALE * math.sqrt(3 / num_tables)
        )
        return id_part_B


def _waves(id_part_B: NDArray[np.float64]) -> NDArray[np.float64]:
    """Adds sines of the ids' part, so that labels of low correlation need different units.

    Source:
        Ma et al., Modeling Task Relationships in Multi-task Learning with Multi-gate
        Mixture-of-Experts (KDD 2018), section 3.2, with labels drawn instead of values.
    """
    waves_B: NDArray[np.float64] = id_part_B * _LINEAR_SHARE
    for frequency, phase in _WAVES:
        waves_B = waves_B + _WAVE_LOGIT_SCALE * np.sin(frequency * id_part_B + phase)
    return waves_B


def _coprime(rng: np.random.Generator, num_rows: int) -> int:
    """A random stride that is coprime to the rows of a table, so it visits each row once."""
    while True:
        stride = int(rng.integers(1, num_rows + 1))
        if math.gcd(stride, num_rows) == 1:
            return stride


def _hashed_uniform(ids_BT: NDArray[np.int64], salts_T: NDArray[np.int64]) -> NDArray[np.float64]:
    """A fixed pseudo-random number in [-1, 1) for each (id, salt).

    Source:
        The finalizer of SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number
        Generators, OOPSLA 2014).
    """
    z = (ids_BT.astype(np.uint64) << np.uint64(20)) + salts_T.astype(np.uint64)
    z = z * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z = z ^ (z >> np.uint64(31))
    return (z >> np.uint64(11)).astype(np.float64) * 2.0**-52 - 1.0
