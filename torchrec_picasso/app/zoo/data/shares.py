"""Which samples are a batch; each batch depends on (seed, stream, rank, step) alone.

Samples without an order are drawn anew, with replacement. Samples in time order are taken as they
come, from a place on where users have histories; the ranks share the samples of a step, and after
the last sample comes the first. What is held out lies before that place.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from torchrec_picasso.app.zoo.data.history import Ids

__all__ = ["HELDOUT", "TRAIN", "Shares"]

TRAIN, HELDOUT = 0, 1
"""Streams of batches."""


@dataclass(frozen=True, kw_only=True)
class Shares:
    """Deals samples out to batches.

    Args:
        num_samples: Samples there are.
        in_time_order: Whether they follow each other as they happened.
        batch_size: Samples per rank and step.
        world_size: Ranks that share a step.
        seed: Draws samples that have no order.
        start: The first sample in time order that is trained on.
    """

    num_samples: int
    in_time_order: bool
    batch_size: int
    world_size: int
    seed: int
    start: int = 0

    def samples(self, stream: int, rank: int, step: int) -> Ids:
        """The samples of a batch, shape ``(B,)``.

        Args:
            stream: :data:`TRAIN` or :data:`HELDOUT`.
            rank: Whose batch.
            step: Which.
        """
        if not self.in_time_order:
            rng = np.random.default_rng([self.seed, stream, rank, step])
            return rng.integers(self.num_samples, size=self.batch_size)
        turn = step if stream == TRAIN else -1 - step
        place = turn * self.world_size + rank
        first = self.start + place * self.batch_size
        return np.arange(first, first + self.batch_size) % self.num_samples
