"""How lookups of real batches depend on each other, where independent ones would not.

Inside a batch ids come in bursts: a history comes with its sample and holds the same few
categories. Between batches interest moves on: the articles of this hour are not those of the next.
The counts of a sample show neither; its batches, one by one and in their order, show both.

Source: Kish 1965 (effective sample size).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

__all__ = ["INDEPENDENT", "SHARES_HOT", "Dependence"]

SHARES_HOT = (1 / 64, 1 / 16, 1 / 4, 1.0)
"""Hot sets whose persistence is known, as shares of the rows that they are chosen from."""


@dataclass(frozen=True, kw_only=True)
class Dependence:
    """Two facts of a table's lookups.

    Args:
        effective_share: Independent lookups that one lookup of a batch counts as.
        persistence: Of the hot rows that later batches would use were they like those that the
            rows were chosen from, the share that they do use; for hot sets of :data:`SHARES_HOT`.
    """

    effective_share: float = 1.0
    persistence: tuple[float, ...] = (1.0,) * len(SHARES_HOT)

    def persistence_of(self, num_hot: float, num_rows: float) -> float:
        """The persistence of a hot set, between those known.

        Args:
            num_hot: The most frequent rows, above 0.
            num_rows: Rows that they are chosen from.
        """
        share = np.log(max(num_hot, 1e-9) / max(num_rows, 1e-9))
        return float(np.interp(share, np.log(SHARES_HOT), self.persistence))

    def mean(self, other: Dependence, ours: float, theirs: float) -> Dependence:
        """That of two samples together.

        Args:
            other: Of the other sample.
            ours: Lookups of this one.
            theirs: Lookups of the other one.
        """
        if self == other or not ours + theirs:
            return self
        share = ours / (ours + theirs)

        def both(mine: float, other_one: float) -> float:
            return other_one + share * (mine - other_one)

        return Dependence(
            effective_share=both(self.effective_share, other.effective_share),
            persistence=tuple(map(both, self.persistence, other.persistence)),
        )


INDEPENDENT = Dependence()
"""Lookups that are drawn one by one, always alike."""
