"""Batches of a long training: of uneven sizes, of ids that drift, ending at other times on ranks.

Rank and step alone decide a batch, so any pipeline can be given the same ones. What is to be
learned is a smooth function of the ids, the same all the time; which of them come moves on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor
from torchrec import KeyedJaggedTensor
from torchrec.datasets.utils import Batch

from benchmarks.reliability.small_model import BAGS, SEQUENCES

_DRIFT_STEPS = 400
"""Steps in which the most looked up ids go once round a table."""

_MOST_SAMPLES = 288
"""Enough for 4 micro-batches to be tried, by the size of the first batch."""
_EMPTY_OF = 16
"""One batch in so many has no samples."""
_WINDOW = 0.4
"""Part of a table's rows that a step looks up: some are hot and others are not."""
_LONGEST, _NOISE, _MISSING = 4, 0.1, 3
_ROWS = {name: rows for name, (rows, _) in (BAGS | SEQUENCES).items()}


def soak_batch(step: int, rank: int) -> Batch:
    """A rank's batch of 0 to 288 samples, with empty bags and sequences."""
    generator = torch.Generator().manual_seed(1_000_003 * rank + step)
    drawn, chance = torch.randint(0, _MOST_SAMPLES * _EMPTY_OF, (2,), generator=generator).tolist()
    num_samples = 0 if chance % _EMPTY_OF == 0 else 1 + drawn // _EMPTY_OF
    num_samples = num_samples if step else _MOST_SAMPLES
    values, lengths = [], []
    labels_B = _NOISE * torch.randn(num_samples, generator=generator)
    for rows in _ROWS.values():
        lengths_B = torch.randint(0, _LONGEST + 1, (num_samples,), generator=generator)
        at_N = torch.rand(int(lengths_B.sum()), generator=generator) ** 3 * _WINDOW * rows
        ids_N = (at_N.long() + step * rows // _DRIFT_STEPS) % rows
        sample_N = torch.repeat_interleave(torch.arange(num_samples), lengths_B)
        labels_B.index_add_(0, sample_N, 0.3 * torch.sin(ids_N.float()))
        values.append(ids_N)
        lengths.append(lengths_B)
    return Batch(
        dense_features=torch.zeros(num_samples, 1),
        sparse_features=KeyedJaggedTensor(
            keys=list(_ROWS), values=torch.cat(values), lengths=torch.cat(lengths)
        ),
        labels=labels_B,
    )


def stand_in() -> Batch:
    """One sample of no ids, for a pipeline that cannot train a rank without samples.

    Its samples must not count: :func:`counts_nothing` recognizes it.
    """
    return Batch(
        dense_features=torch.ones(1, 1),
        sparse_features=KeyedJaggedTensor(
            keys=list(_ROWS),
            values=torch.zeros(0, dtype=torch.int64),
            lengths=torch.zeros(len(_ROWS), dtype=torch.int64),
        ),
        labels=torch.zeros(1),
    )


def counts_nothing(batch: Batch) -> bool:
    """Whether a batch is a :func:`stand_in`."""
    return bool(batch.dense_features.any())


@dataclass(frozen=True)
class Stretch:
    """Steps between two ends of data.

    Args:
        start: The first step.
        num_steps: Until the last rank's data has ended.
        index: Number of the stretch; the rank whose data ends first differs between stretches.
    """

    start: int
    num_steps: int
    index: int

    def num_batches(self, rank: int, world_size: int) -> int:
        """Batches that a rank has; at least one rank has as many as there are steps."""
        return max(0, self.num_steps - _MISSING * ((self.index + rank) % world_size))


class Feed(Iterator[Batch]):
    """A rank's batches of a stretch, and their labels until they are asked for.

    Args:
        stretch: Steps of the batches.
        rank: This rank.
        world_size: Number of ranks.
        is_padded: Whether a :func:`stand_in` takes the place of each batch without samples, and
            others follow until the last rank's data ends.
    """

    def __init__(self, stretch: Stretch, rank: int, world_size: int, is_padded: bool) -> None:
        own = stretch.num_batches(rank, world_size)
        batches = (soak_batch(stretch.start + at, rank) for at in range(own))
        missing = (stand_in() for _ in range(stretch.num_steps - own))
        self._batches: Iterator[Batch] = batches
        if is_padded:
            self._batches = chain(
                (batch if len(batch.labels) else stand_in() for batch in batches), missing
            )
        self._labels: deque[Tensor] = deque()

    def __next__(self) -> Batch:
        batch = next(self._batches)
        self._labels.append(batch.labels[:0] if counts_nothing(batch) else batch.labels)
        return batch

    def labels(self) -> Tensor:
        """Labels of the oldest batch not asked about; none where there is no more."""
        return self._labels.popleft() if self._labels else torch.zeros(0)
