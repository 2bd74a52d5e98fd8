"""Many generated fields on mixed tables: one id per sample or several, of any skew.

A batch depends on (seed, stream, rank, step) alone. Ids are drawn by inverting the exact Zipf
distribution; frequent rows lie anywhere in their table. Labels follow a hidden taste of some rows,
so that there is something to learn.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torchrec.datasets.utils import Batch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_picasso.app.zoo.data.field_specs import FieldSpec
from torchrec_picasso.app.zoo.data.generated import zipf_cdf

__all__ = ["NUM_DENSE", "FieldsSource"]

NUM_DENSE = 4
_TRAIN, _HELDOUT, _TASTE, _ROWS = 0, 1, 2, 3  # which random stream a number belongs to


class FieldsSource:
    """Endless generated batches.

    Args:
        fields: What a sample has.
        batch_size: Samples of a batch.
        heldout_steps: Batches of each rank that training never sees.
        seed: Another seed gives other ids and labels.
        weighted: Whether ids carry weights, 1 where a field is averaged: TorchRec's placements do
            not agree on what a weighted mean is.
    """

    def __init__(
        self,
        fields: Sequence[FieldSpec],
        batch_size: int,
        heldout_steps: int,
        seed: int,
        weighted: bool = False,
    ) -> None:
        self._fields = tuple(fields)
        self._batch_size, self._heldout_steps = batch_size, heldout_steps
        self._seed = seed
        self._weighted = weighted
        rng = np.random.default_rng([seed, _ROWS])
        self._cdfs = [zipf_cdf(of.num_embeddings, of.exponent) for of in fields]
        self._row_of_rank = [rng.permutation(of.num_embeddings) for of in fields]
        taste = np.random.default_rng([seed, _TASTE])
        self._taste = [taste.normal(size=of.num_embeddings) for of in fields]

    @property
    def columns(self) -> Mapping[str, tuple[str, ...]]:
        """All are fields."""
        return {"fields": tuple(of.feature for of in self._fields)}

    @property
    def num_rows(self) -> Mapping[str, int]:
        """Rows that the ids of each column need."""
        return {of.feature: of.num_embeddings for of in self._fields}

    @property
    def num_dense(self) -> int:
        """Dense features of a sample."""
        return NUM_DENSE

    @property
    def num_tasks(self) -> int:
        """Labels of a sample."""
        return 1

    def batches(self, rank: int, world_size: int, start_step: int = 0) -> Iterator[Batch]:
        """This rank's batches from ``start_step`` on, without end."""
        return (self._batch(_TRAIN, rank, step) for step in itertools.count(start_step))

    def heldout(self, rank: int, world_size: int) -> Iterator[Batch]:
        """This rank's share of ``heldout_steps`` batches from a stream of their own."""
        return (self._batch(_HELDOUT, rank, step) for step in range(self._heldout_steps))

    def _batch(self, stream: int, rank: int, step: int) -> Batch:
        rng = np.random.default_rng([self._seed, stream, rank, step])
        size = self._batch_size
        ids, weights, logit_B = [], [], np.zeros(size)
        for index, of in enumerate(self._fields):
            chances_BP = rng.random((size, of.pooling_factor))
            ranks_BP = np.searchsorted(self._cdfs[index], chances_BP, "right")
            rows_BP = self._row_of_rank[index][ranks_BP]
            logit_B += self._taste[index][rows_BP].mean(axis=1)
            ids.append(rows_BP.reshape(-1))
            drawn = rng.random(rows_BP.size, dtype=np.float32)
            weights.append(np.ones_like(drawn) if of.mean else drawn)
        dense_BI = rng.normal(size=(size, NUM_DENSE)).astype(np.float32)
        logit_B = 2 * logit_B / np.sqrt(len(self._fields)) + dense_BI[:, 0]
        labels_B = (rng.random(size) < 1 / (1 + np.exp(-logit_B))).astype(np.float32)
        return Batch(
            dense_features=torch.from_numpy(dense_BI),
            sparse_features=self._bags(ids, weights),
            labels=torch.from_numpy(labels_B),
        )

    def _bags(
        self, ids: Sequence[NDArray[np.int64]], weights: Sequence[NDArray[np.float32]]
    ) -> KeyedJaggedTensor:
        factors_F = torch.tensor([of.pooling_factor for of in self._fields], dtype=torch.int32)
        return KeyedJaggedTensor.from_lengths_sync(
            keys=[of.feature for of in self._fields],
            values=torch.from_numpy(np.concatenate(ids)),
            lengths=factors_F.repeat_interleave(self._batch_size),
            weights=torch.from_numpy(np.concatenate(weights)) if self._weighted else None,
        )
