"""How fast a hot set goes stale: what one chosen in a window still covers so many windows later.

Ids of news or shops come and go; a hot set that serves most lookups when it is fresh may serve few
a day later. The report says how soon, which is how often a hot set must be refreshed: about once
per half-life. Counts of the newest windows and a hot set per age are all that is kept in memory.

Shape letters: U rows seen, H hot rows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from torchrec_picasso.errors import InputError
from torchrec_picasso.frequency.sums import count_rows, sum_counts
from torchrec_picasso.frequency.windows import TimedIds, check_window, cut_windows

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["MAX_AGE", "DriftReport", "drift_of_windows", "measure_drift"]

MAX_AGE = 48
"""Windows that a hot set is followed for, unless asked otherwise."""


@dataclass(frozen=True, kw_only=True)
class DriftReport:
    """Coverage of a hot set by its age.

    Args:
        window: Length of a window, in the unit of the times it was measured on.
        num_hot: Hot rows, over all tables.
        coverage: Share of a window's lookups that hot sets of age 1, 2, ... windows cover, pooled
            over all windows that have one.
        coverage_fresh: The share that hot sets of age 1 cover in the same windows.
    """

    window: float
    num_hot: int
    coverage: tuple[float, ...]
    coverage_fresh: tuple[float, ...]

    @property
    def half_life(self) -> float | None:
        """Time, in the unit of ``window``, in which a fresh hot set loses half of its coverage.

        Interpolated between windows; ``None`` if the data is not long enough to show it.
        """
        kept = [of / fresh if fresh else 1.0 for of, fresh in self._pairs()]
        for place in range(1, len(kept)):
            if kept[place] <= 0.5:
                before, after = kept[place - 1], kept[place]
                part = (before - 0.5) / (before - after)
                return (place - 1 + part) * self.window  # kept[0] is fresh, of age 1
        return None

    def to_frame(self) -> pd.DataFrame:
        """A pandas DataFrame with columns ``age, coverage, coverage_fresh``, age as the times."""
        import pandas as pd

        ages = [(place + 1) * self.window for place in range(len(self.coverage))]
        return pd.DataFrame(
            {"age": ages, "coverage": self.coverage, "coverage_fresh": self.coverage_fresh}
        )

    def _pairs(self) -> Iterator[tuple[float, float]]:
        return zip(self.coverage, self.coverage_fresh)


def measure_drift(
    chunks: Iterable[tuple[float, Mapping[str, Tensor]]],
    window: float,
    num_hot: int,
    *,
    num_history: int = 1,
    max_age: int = MAX_AGE,
) -> DriftReport:
    """Measures how fast hot sets go stale.

    Args:
        chunks: ``(time, {table: ids})``, in order of time; ids int64, ``(N,)``.
        window: Length of a window, in the unit of the times.
        num_hot: Hot rows, over all tables.
        num_history: Newest windows that a hot set is chosen from.
        max_age: Windows that a hot set is followed for.

    Returns:
        Coverage by age, from 1 to the oldest that the data has.

    Raises:
        InputError: If time goes backwards, or there are no two windows with lookups.
    """
    check_window(window)
    return drift_of_windows(
        cut_windows(chunks, window), window, num_hot, num_history=num_history, max_age=max_age
    )


def drift_of_windows(
    pieces: Iterable[TimedIds],
    window: float,
    num_hot: int,
    *,
    num_history: int = 1,
    max_age: int = MAX_AGE,
) -> DriftReport:
    """:func:`measure_drift` of a stream that is cut already, see :func:`read_windows`.

    Cost:
        O(num_history * U + max_age * (U + H)) per window, of which U rows are seen.
    """
    for name, value in (("num_hot", num_hot), ("num_history", num_history), ("max_age", max_age)):
        if value < 1:
            raise InputError(f"{name} is {value}, expected at least 1")
    history: deque[tuple[int, _Counts]] = deque()
    hot_sets: deque[tuple[int, Tensor]] = deque()  # by the window they were chosen in
    tables: dict[str, int] = {}
    hits, fresh_hits, totals = (torch.zeros(max_age + 1, dtype=torch.float64) for _ in range(3))
    for number, of_window in groupby(pieces, key=lambda piece: piece.window):
        counts = _count(of_window, tables)
        total = float(counts[1].sum())
        if not total:
            continue
        while hot_sets and number - hot_sets[0][0] > max_age:
            hot_sets.popleft()
        by_age = {number - chosen: _share(hot, counts) for chosen, hot in hot_sets}
        if 1 in by_age:  # compared with a fresh one, on the same window
            for age, hit in by_age.items():
                hits[age] += hit
                fresh_hits[age] += by_age[1]
                totals[age] += total
        history.append((number, counts))
        while history[0][0] <= number - num_history:
            history.popleft()
        hot_sets.append((number, _hottest([of for _, of in history], num_hot)))
    last = int(totals.nonzero().max()) if totals.any() else 0
    if not last:
        raise InputError(
            "no two windows in a row have lookups, so nothing can be said about drift; choose a "
            "longer window, or give more data"
        )
    # an age that no pair of windows has takes the value before it
    coverage, fresh = [], []
    for age in range(1, last + 1):
        if totals[age]:
            coverage.append(float(hits[age] / totals[age]))
            fresh.append(float(fresh_hits[age] / totals[age]))
        else:
            coverage.append(coverage[-1])
            fresh.append(fresh[-1])
    return DriftReport(
        window=window, num_hot=num_hot, coverage=tuple(coverage), coverage_fresh=tuple(fresh)
    )


_Counts = tuple[Tensor, Tensor]  # keys (table, row) in one number, ascending, and their lookups
_TABLE_SHIFT = 40  # a table has at most 2 ** 40 rows here, and there are at most 2 ** 23 tables


def _count(pieces: Iterable[TimedIds], tables: dict[str, int]) -> _Counts:
    keys: list[Tensor] = [torch.empty(0, dtype=torch.int64)]
    for piece in pieces:
        for (table, _), ids_N in piece.ids.items():
            number = tables.setdefault(table, len(tables))
            if ids_N.numel() and not 0 <= int(ids_N.min()) <= int(ids_N.max()) < 1 << _TABLE_SHIFT:
                raise InputError(
                    f"table {table!r} has an id outside 0..{(1 << _TABLE_SHIFT) - 1}; map ids to "
                    "rows first"
                )
            keys.append(ids_N.long() + (number << _TABLE_SHIFT))
    rows, counts = count_rows(torch.cat(keys).numpy())
    return torch.from_numpy(rows), torch.from_numpy(counts)


def _hottest(history: list[_Counts], num_hot: int) -> Tensor:
    """The most frequent keys, ascending, ``(H,)``."""
    keys_U, counts_U = history[0]
    for of in history[1:]:
        keys_U, counts_U = sum_counts(keys_U, counts_U, *of)
    order_U = counts_U.sort(descending=True, stable=True).indices
    return keys_U[order_U[:num_hot]].sort().values


def _share(hot_H: Tensor, counts: _Counts) -> float:
    """Lookups of a window that go to hot rows."""
    keys_U, counts_U = counts
    place_U = torch.searchsorted(hot_H, keys_U).clamp(max=hot_H.numel() - 1)
    return float(counts_U[hot_H[place_U] == keys_U].sum())
