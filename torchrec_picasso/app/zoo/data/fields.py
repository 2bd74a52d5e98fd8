"""Many generated fields on mixed tables: one or several ids per sample, Zipf-skewed.

A batch depends on (seed, stream, rank, step) alone. Frequent rows are scattered over their table.
Labels follow a hidden score of each row, so models can learn.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torchrec.datasets.utils import Batch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_picasso.app.zoo.data.field_specs import FieldSpec
from torchrec_picasso.app.zoo.data.generated import zipf_cdf

NUM_DENSE = 4
_TRAIN, _HELDOUT, _SCORES, _ROWS = 0, 1, 2, 3  # random streams


class FieldsSource:
    """Endless generated batches.

    Args:
        fields: Fields of a sample.
        batch_size: Samples of a batch.
        heldout_steps: Held-out batches of each rank.
        seed: Seed of ids and labels.
    """

    num_dense, num_tasks = NUM_DENSE, 1

    def __init__(
        self, fields: Sequence[FieldSpec], batch_size: int, heldout_steps: int, seed: int
    ) -> None:
        self._fields = tuple(fields)
        self.num_rows = {field.feature: field.num_embeddings for field in fields}
        self.columns = {"fields": tuple(self.num_rows)}
        self._batch_size, self._heldout_steps = batch_size, heldout_steps
        self._seed = seed
        rng = np.random.default_rng([seed, _ROWS])
        self._cdfs = [zipf_cdf(field.num_embeddings, field.exponent) for field in fields]
        self._row_of_frequency_rank = [rng.permutation(field.num_embeddings) for field in fields]
        rng = np.random.default_rng([seed, _SCORES])
        self._scores = [rng.normal(size=field.num_embeddings) for field in fields]

    def batches(self, rank: int, world_size: int, start_step: int = 0) -> Iterator[Batch]:
        """This rank's batches from ``start_step`` on, without end."""
        return (self._batch(_TRAIN, rank, step) for step in itertools.count(start_step))

    def heldout(self, rank: int, world_size: int) -> Iterator[Batch]:
        """This rank's share of ``heldout_steps`` batches from a stream of their own."""
        return (self._batch(_HELDOUT, rank, step) for step in range(self._heldout_steps))

    def _batch(self, stream: int, rank: int, step: int) -> Batch:
        rng = np.random.default_rng([self._seed, stream, rank, step])
        size = self._batch_size
        ids, logit_B = [], np.zeros(size)
        for index, field in enumerate(self._fields):
            chances_BP = rng.random((size, field.pooling_factor))
            ranks_BP = np.searchsorted(self._cdfs[index], chances_BP, "right")
            rows_BP = self._row_of_frequency_rank[index][ranks_BP]
            logit_B += self._scores[index][rows_BP].mean(axis=1)
            ids.append(rows_BP.reshape(-1))
            rng.random(rows_BP.size, dtype=np.float32)  # once weights; seeds keep their samples
        dense_BI = rng.normal(size=(size, NUM_DENSE)).astype(np.float32)
        logit_B = 2 * logit_B / np.sqrt(len(self._fields)) + dense_BI[:, 0]
        labels_B = (rng.random(size) < 1 / (1 + np.exp(-logit_B))).astype(np.float32)
        return Batch(
            dense_features=torch.from_numpy(dense_BI),
            sparse_features=self._bags(ids),
            labels=torch.from_numpy(labels_B),
        )

    def _bags(self, ids: Sequence[NDArray[np.int64]]) -> KeyedJaggedTensor:
        factors = [field.pooling_factor for field in self._fields]
        return KeyedJaggedTensor.from_lengths_sync(
            keys=[field.feature for field in self._fields],
            values=torch.from_numpy(np.concatenate(ids)),
            lengths=torch.tensor(factors, dtype=torch.int32).repeat_interleave(self._batch_size),
        )
