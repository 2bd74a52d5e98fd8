"""Chooses the samples of a batch, which depends on (seed, stream, rank, step) alone.

Samples without order are drawn with replacement. Samples in time order are taken in sequence from
``start`` on, modulo the number of samples, each rank a part of a step; held-out samples lie before
``start``.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from torchrec_picasso.app.zoo.data.history import Ids

TRAIN, HELDOUT = 0, 1
"""Streams of batches."""


@dataclass(frozen=True, kw_only=True)
class Shares:
    """Assigns samples to batches.

    Args:
        num_samples: Number of samples.
        in_time_order: Whether samples are sorted by time.
        batch_size: Samples per rank and step.
        world_size: Ranks.
        seed: Seed of samples without order.
        start: First trained sample in time order.
    """

    num_samples: int
    in_time_order: bool
    batch_size: int
    world_size: int
    seed: int
    start: int = 0

    def samples(self, stream: int, rank: int, step: int) -> Ids:
        """Numbers of the samples of a rank's batch, shape ``(B,)``.

        ``stream`` is :data:`TRAIN` or :data:`HELDOUT`.
        """
        if not self.in_time_order:
            rng = np.random.default_rng([self.seed, stream, rank, step])
            return rng.integers(self.num_samples, size=self.batch_size)
        turn = step if stream == TRAIN else -1 - step
        place = turn * self.world_size + rank
        first = self.start + place * self.batch_size
        return np.arange(first, first + self.batch_size) % self.num_samples
