"""Lists of ids, one per sample, as stretches of one vector.

Stretches may overlap: of a log of clicks, the history of each click is a stretch of the clicks of
one user, and costs two numbers instead of a copy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

__all__ = ["History", "Ids"]

Ids = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class History:
    """A list of ids for each of n samples.

    Args:
        values: What the stretches are of.
        starts_n: First entry of each list, shape ``(n,)``.
        ends_n: The entry behind its last one, shape ``(n,)``.
    """

    values: Ids
    starts_n: Ids
    ends_n: Ids

    @staticmethod
    def of_lists(lists: Sequence[Ids]) -> History:
        """From lists, one after the other."""
        values = np.concatenate([np.empty(0, dtype=np.int64), *lists]).astype(np.int64)
        return History.of_lengths(values, np.array([len(of) for of in lists], dtype=np.int64))

    @staticmethod
    def of_lengths(values: Ids, lengths_n: Ids) -> History:
        """From lists that lie one after the other.

        Args:
            values: All of them.
            lengths_n: Ids of each list, summing to all.
        """
        ends_n = np.cumsum(lengths_n, dtype=np.int64)
        return History(values, ends_n - lengths_n, ends_n)

    @staticmethod
    def before(key_n: Ids, ids_n: Ids, most: int) -> History:
        """Of each event, the ids of the events before it that have the same key.

        Args:
            key_n: Whose event, in time order.
            ids_n: Of each event.
            most: Longest list; the latest ids stay.

        Cost:
            One stable sort of n.
        """
        order_n = np.argsort(key_n, kind="stable")
        sorted_n = key_n[order_n]
        place_n = np.empty(len(order_n), dtype=np.int64)
        place_n[order_n] = np.arange(len(order_n))
        first_n = np.searchsorted(sorted_n, key_n, "left")  # of the key
        return History(ids_n[order_n], np.maximum(first_n, place_n - most), place_n)

    def __len__(self) -> int:
        return len(self.starts_n)

    def __getitem__(self, sample: int) -> Ids:
        return self.values[self.starts_n[sample] : self.ends_n[sample]]

    def __iter__(self) -> Iterator[Ids]:
        return (self[sample] for sample in range(len(self)))

    @property
    def lengths_n(self) -> Ids:
        """Ids of each list, shape ``(n,)``."""
        lengths_n: Ids = self.ends_n - self.starts_n
        return lengths_n

    @property
    def largest(self) -> int:
        """The largest id of any list; 0 where all are empty."""
        return int(self.values.max()) if self.values.size else 0

    def hashed(self, num_rows: int) -> History:
        """The same lists, with ids modulo a number of rows."""
        return replace(self, values=self.values % num_rows)

    def latest(self, most: int) -> History:
        """The last ids of each list, ``most`` at most."""
        return replace(self, starts_n=np.maximum(self.starts_n, self.ends_n - most))

    def of(self, samples_m: Ids) -> History:
        """The lists of some samples, in their order."""
        return replace(self, starts_n=self.starts_n[samples_m], ends_n=self.ends_n[samples_m])

    def joined(self) -> Ids:
        """All lists, one after the other."""
        return np.concatenate([np.empty(0, dtype=np.int64), *self])
