"""Two ways to split a batch: in order, as a step does, and torn into shuffled pieces.

Shape letter: K micro-batches.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from torchrec_picasso.batches.join import join_outputs
from torchrec_picasso.batches.split import FEWEST_SAMPLES

__all__ = ["Cut"]

_MOST_PIECES = 64
"""Number of pieces of a torn batch, roughly; small batches have fewer."""


class Cut:
    """Samples of each piece of a batch, in order, and the pieces' positions by micro-batch."""

    def __init__(self, sizes: Sequence[int], pieces_K: Sequence[Sequence[int]]) -> None:
        self.sizes = sizes
        self.pieces_K = pieces_K
        self.sizes_K = [sum(sizes[piece] for piece in pieces) for pieces in pieces_K]

    @staticmethod
    def in_order(sizes_K: Sequence[int]) -> Cut:
        """Splits into micro-batches of these sizes, one piece each."""
        return Cut(sizes_K, [[k] for k in range(len(sizes_K))])

    @staticmethod
    def torn(num_samples: int, num_micro_batches: int, draw: random.Random) -> Cut:
        """Splits into pieces of random sizes, dealt in random order to uneven micro-batches.

        The last of the K >= 2 micro-batches has two samples, the fewest that one ever has. The
        batch has at least 2 K samples.
        """
        # about 64 pieces of 2 to `usual` + 1 samples; piece 0 (two samples) is the last one
        usual = max(FEWEST_SAMPLES, 2 * num_samples // min(_MOST_PIECES, num_samples))
        sizes = [FEWEST_SAMPLES]
        while (left := num_samples - sum(sizes)) >= 2 * FEWEST_SAMPLES:
            sizes.append(draw.randint(FEWEST_SAMPLES, min(usual + 1, left - FEWEST_SAMPLES)))
        sizes.append(left)
        # shuffle pieces 1.. and split them at random positions into the other micro-batches
        others = draw.sample(range(1, len(sizes)), len(sizes) - 1)
        num_parts = min(num_micro_batches - 1, len(others))
        ends = sorted(draw.sample(range(1, len(others)), num_parts - 1))
        parts = [others[start:end] for start, end in pairwise([0, *ends, len(others)])]
        return Cut(sizes, [*parts, [0]])

    @property
    def is_in_order(self) -> bool:
        """Whether micro-batch k is piece k, for all k."""
        return all(list(pieces) == [k] for k, pieces in enumerate(self.pieces_K))

    def joined(self, pieces: Sequence[Any], index: int) -> Any:
        """Joins the pieces of one micro-batch; ``pieces`` are all, in the order of the batch."""
        places = self.pieces_K[index]
        return join_outputs([pieces[p] for p in places], [self.sizes[p] for p in places])
