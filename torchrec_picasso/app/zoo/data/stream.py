"""Clicks with what a stream of them has beside ids: times, candidates, crossed features, two tasks.

A crossed feature is a hash of an id of the item and an id of the profile. Candidates and history
read its table alike: a click of the history is crossed with the profile of the sample.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Self

from torchrec_picasso.app.zoo.data.clicks import Clicks, history_of
from torchrec_picasso.app.zoo.data.history import History, Ids

_LEAST_STAY_S, _LONGEST_STAY_S = 60, 1800  # between two clicks; later ones are another visit


@dataclass(frozen=True, eq=False, kw_only=True)
class Stream(Clicks):
    """Samples of C candidates as columns; targets are ``(n, C)``, labels ``(n, C, tasks)``.

    Args:
        happened_n: Time of each sample in seconds, shape ``(n,)``.
        earlier: Times of the history's clicks.
        crosses: Target and profile that each crossed feature is a hash of.
        cross_rows: Rows of each table of crossed features.
        longest: Longest history.
    """

    happened_n: Ids
    earlier: History
    crosses: Mapping[str, tuple[str, str]]
    cross_rows: int = 1
    longest: int = 1

    @staticmethod
    def from_clicks(
        clicks: Clicks,
        labels: NDArray[Any],
        happened_n: Ids,
        earlier: History,
        crosses: Mapping[str, tuple[str, str]],
    ) -> Stream:
        """The stream of clicks with these labels, ``(n, C, tasks)``."""
        columns = {**vars(clicks), "clicked": labels.astype(np.float32)}
        return Stream(**columns, happened_n=happened_n, earlier=earlier, crosses=crosses)

    def latest(self, most: int) -> Self:
        """The same samples, with the latest ``most`` clicks of histories."""
        kept = super().latest(most)
        return replace(kept, longest=most, earlier=self.earlier.latest(most))

    def take(self, samples_m: Ids) -> Self:
        """The samples of given numbers, in that order."""
        taken, earlier = super().take(samples_m), self.earlier.take(samples_m)
        return replace(taken, happened_n=self.happened_n[samples_m], earlier=earlier)

    def columns(self) -> dict[str, tuple[Ids, Ids]]:
        """Ids and lengths of each feature, crossed ones included."""
        found = super().columns()
        for number, (name, (target, profile)) in enumerate(self.crosses.items()):
            for suffixed in (str, history_of):
                ids, lengths_n = found[suffixed(target)]
                with_ids = np.repeat(self.profiles[profile], lengths_n)
                crossed = hashed_pairs(ids, with_ids, number, self.cross_rows)
                found[suffixed(name)] = crossed, lengths_n
        return found

    def dense(self) -> NDArray[np.float32]:
        """Ages of the history's clicks in seconds, 0 behind them, shape ``(n, longest)``."""
        lengths_n = self.earlier.lengths_n
        ages = np.repeat(self.happened_n, lengths_n) - self.earlier.joined()
        dense = np.zeros((len(self), self.longest), dtype=np.float32)
        dense[np.arange(self.longest) < lengths_n[:, None]] = ages
        return dense


def hashed_pairs(one: Ids, other: Ids, seed: int, num_rows: int) -> Ids:
    """Hashes of pairs of ids, from 0 to ``num_rows - 1``.

    Source: the mixing function of Steele et al., Fast Splittable Pseudorandom Number Generators
    (OOPSLA 2014).
    """
    mixed = np.full(one.shape, seed + 1, dtype=np.uint64)
    for ids in (one, other):
        mixed = (mixed ^ ids.astype(np.uint64)) * np.uint64(0x9E3779B97F4A7C15)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        mixed ^= mixed >> np.uint64(31)
    return (mixed % np.uint64(num_rows)).astype(np.int64)


def stays(user_n: Ids, second_n: Ids) -> NDArray[np.bool_]:
    """Whether the user reads on: the next click comes after 1 to 30 minutes, shape ``(n,)``.

    Args:
        user_n: User of each click.
        second_n: Time of each click in seconds, ascending.
    """
    order_n = np.argsort(user_n, kind="stable")
    same = user_n[order_n[1:]] == user_n[order_n[:-1]]
    gap = second_n[order_n[1:]] - second_n[order_n[:-1]]
    stays_n = np.zeros(len(user_n), dtype=bool)
    stays_n[order_n[:-1]] = same & (gap >= _LEAST_STAY_S) & (gap <= _LONGEST_STAY_S)
    return stays_n
