"""Sparse count vectors against Counter and numpy; the most frequent rows stay, lowered alike."""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from torchrec_picasso.frequency.counts import add_counts, count_rows, keep_heaviest

COUNTS = st.dictionaries(st.integers(0, 99), st.integers(1, 9), max_size=20)


def vector(counts: dict[int, int]) -> tuple[np.ndarray, np.ndarray]:
    rows = sorted(counts)
    return np.array(rows, dtype=np.int64), np.array([counts[r] for r in rows], dtype=np.int64)


@given(st.lists(st.integers(-5, 5)))
def test_rows_are_counted_as_numpy_counts_them(ids: list[int]) -> None:
    array = np.array(ids, dtype=np.int64)
    for found, expected in zip(count_rows(array), np.unique(array, return_counts=True)):
        np.testing.assert_array_equal(found, expected)


@given(COUNTS, COUNTS)
def test_sums_are_those_of_counters(one: dict[int, int], two: dict[int, int]) -> None:
    arrays = [*vector(one), *vector(two)]
    before = [array.copy() for array in arrays]
    rows, counts = add_counts(*arrays)
    assert dict(zip(rows.tolist(), counts.tolist())) == Counter(one) + Counter(two)
    assert (np.diff(rows) > 0).all()
    for array, was in zip(arrays, before):
        np.testing.assert_array_equal(array, was)  # the arguments are left alone


@given(COUNTS, st.integers(1, 20))
def test_all_rows_lose_the_count_of_the_first_that_does_not_fit(
    counts: dict[int, int], max_rows: int
) -> None:
    kept, lowered, subtracted = keep_heaviest(*vector(counts), max_rows)
    ranked = sorted(counts.values(), reverse=True)
    expected = ranked[max_rows] if len(ranked) > max_rows else 0
    assert subtracted == expected
    assert dict(zip(kept.tolist(), lowered.tolist())) == {
        row: count - expected for row, count in counts.items() if count > expected
    }
    assert (np.diff(kept) > 0).all()
    assert kept.size <= max_rows


def test_counts_that_no_row_exceeds_leave_nothing() -> None:
    kept, lowered, subtracted = keep_heaviest(np.arange(5), np.full(5, 3), 4)
    assert (kept.size, lowered.size, subtracted) == (0, 0, 3)
