"""From clicks to batches, each of which depends on (seed, stream, rank, step) alone."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torchrec.datasets.utils import Batch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from benchmarks.sequences.clicks import HISTORIES, PROFILES, Clicks

__all__ = ["FEATURES", "draw_batch"]

FEATURES = (*HISTORIES, *HISTORIES.values(), *PROFILES)


def draw_batch(clicks: Clicks, batch_size: int, seed: Sequence[int]) -> Batch:
    """Draws samples anew, with replacement.

    Args:
        clicks: Where they come from.
        batch_size: Samples.
        seed: The same one gives the same batch.
    """
    rng = np.random.default_rng(seed)
    chosen_B = rng.integers(len(clicks.clicked), size=batch_size)
    values, lengths = [], []
    for name in FEATURES:
        if name in clicks.ids:
            values.append(clicks.ids[name][chosen_B])
            lengths.append(np.ones(batch_size, dtype=np.int32))
        else:
            lists = [clicks.history[name][sample] for sample in chosen_B]
            values.append(np.concatenate(lists) if lists else np.empty(0, dtype=np.int64))
            lengths.append(np.array([of.size for of in lists], dtype=np.int32))
    return Batch(
        dense_features=torch.zeros(batch_size, 1),
        sparse_features=KeyedJaggedTensor(
            keys=list(FEATURES),
            values=torch.from_numpy(np.concatenate(values)),
            lengths=torch.from_numpy(_joined(lengths)),
        ),
        labels=torch.from_numpy(clicks.clicked[chosen_B]),
    )


def _joined(lengths: Sequence[NDArray[np.int32]]) -> NDArray[np.int32]:
    return np.concatenate(lengths)
