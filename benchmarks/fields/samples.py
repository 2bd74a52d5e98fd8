"""Batches of generated fields, each of which depends on (seed, stream, rank, step) alone.

Ids are drawn by inverting the exact Zipf distribution; frequent rows lie anywhere in their table.
Labels follow a hidden taste of some rows, so that there is something to learn.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torchrec.datasets.utils import Batch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from benchmarks.fields.field_specs import FieldSpec
from torchrec_picasso.zoo.data.generated import zipf_cdf

__all__ = ["NUM_DENSE", "Samples"]

NUM_DENSE = 4
_TRAIN, _HELDOUT, _TASTE, _ROWS = 0, 1, 2, 3  # which random stream a number belongs to


class Samples:
    """Where batches come from.

    Args:
        fields: What a sample has.
        batch_size: Samples of a batch.
        seed: Another seed gives other ids and labels.
        weighted: Whether ids carry weights, 1 where a field is averaged: TorchRec's placements do
            not agree on what a weighted mean is.
    """

    def __init__(
        self, fields: Sequence[FieldSpec], batch_size: int, seed: int, weighted: bool = False
    ) -> None:
        self._fields = tuple(fields)
        self._batch_size = batch_size
        self._seed = seed
        self._weighted = weighted
        rng = np.random.default_rng([seed, _ROWS])
        self._cdfs = [zipf_cdf(of.num_embeddings, of.exponent) for of in fields]
        self._row_of_rank = [rng.permutation(of.num_embeddings) for of in fields]
        taste = np.random.default_rng([seed, _TASTE])
        self._taste = [taste.normal(size=of.num_embeddings) for of in fields]

    def training(self, rank: int, num_batches: int) -> list[Batch]:
        """One rank's batches."""
        return [self._batch(_TRAIN, rank, step) for step in range(num_batches)]

    def heldout(self, world_size: int, num_steps: int) -> Iterator[Batch]:
        """All ranks' batches of a stream that is never trained on."""
        return (
            self._batch(_HELDOUT, rank, step)
            for step in range(num_steps)
            for rank in range(world_size)
        )

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
