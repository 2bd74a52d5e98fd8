"""Lists of ids, one per sample, as slices of one vector.

Slices may overlap: in a log of clicks sorted by user, the history of each click is a slice and
costs two numbers instead of a copy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class History:
    """A list of ids for each of n samples.

    Args:
        values: The vector.
        starts_n: Start of each list, shape ``(n,)``.
        ends_n: One past the end of each list, shape ``(n,)``.
    """

    values: Ids
    starts_n: Ids
    ends_n: Ids

    @staticmethod
    def from_lists(lists: Sequence[Ids]) -> History:
        """Builds a history from separate lists."""
        values = np.concatenate([np.empty(0, dtype=np.int64), *lists]).astype(np.int64)
        return History.from_lengths(values, np.array(list(map(len, lists)), dtype=np.int64))

    @staticmethod
    def from_lengths(values: Ids, lengths_n: Ids) -> History:
        """Builds a history from concatenated lists ``values`` of ``lengths_n``."""
        ends_n = np.cumsum(lengths_n, dtype=np.int64)
        return History(values, ends_n - lengths_n, ends_n)

    @staticmethod
    def before(key_n: Ids, ids_n: Ids, most: int) -> History:
        """For each event, the ids of earlier events with the same key; one stable sort.

        Args:
            key_n: Key of each event, in time order.
            ids_n: Id of each event.
            most: Longest list; the latest ids are kept.
        """
        order_n = np.argsort(key_n, kind="stable")
        sorted_n = key_n[order_n]
        place_n = np.empty(len(order_n), dtype=np.int64)
        place_n[order_n] = np.arange(len(order_n))
        first_n = np.searchsorted(sorted_n, key_n, "left")  # first event of the same key
        return History(ids_n[order_n], np.maximum(first_n, place_n - most), place_n)

    def __len__(self) -> int:
        return len(self.starts_n)

    def __getitem__(self, sample: int) -> Ids:
        return self.values[self.starts_n[sample] : self.ends_n[sample]]

    def __iter__(self) -> Iterator[Ids]:
        return (self[sample] for sample in range(len(self)))

    @property
    def lengths_n(self) -> Ids:
        """Number of ids of each list, shape ``(n,)``."""
        lengths_n: Ids = self.ends_n - self.starts_n
        return lengths_n

    @property
    def largest(self) -> int:
        """The largest id in ``values``, 0 if empty."""
        return int(self.values.max()) if self.values.size else 0

    def hashed(self, num_rows: int) -> History:
        """The same lists, with ids modulo ``num_rows``."""
        return replace(self, values=self.values % num_rows)

    def latest(self, most: int) -> History:
        """The last ``most`` ids of each list."""
        return replace(self, starts_n=np.maximum(self.starts_n, self.ends_n - most))

    def take(self, samples_m: Ids) -> History:
        """The lists of given samples, in that order."""
        return replace(self, starts_n=self.starts_n[samples_m], ends_n=self.ends_n[samples_m])

    def joined(self) -> Ids:
        """All lists concatenated."""
        return np.concatenate([np.empty(0, dtype=np.int64), *self])
