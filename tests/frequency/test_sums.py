"""Sparse count vectors add up like dense ones."""

from __future__ import annotations

from collections import Counter

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from torchrec_picasso.frequency.sums import count_rows, sum_counts, sum_sorted

COUNTS = st.dictionaries(st.integers(0, 30), st.integers(1, 9))


def vector(counts: dict[int, int]) -> tuple[np.ndarray, np.ndarray]:
    rows = sorted(counts)
    return np.array(rows, dtype=np.int64), np.array([counts[r] for r in rows], dtype=np.int64)


@given(st.lists(st.integers(-5, 5)), st.sampled_from([np.int32, np.int64]))
def test_rows_are_counted_as_numpy_counts_them(ids: list[int], dtype: type) -> None:
    array: np.ndarray = np.array(ids, dtype=dtype)
    rows, counts = count_rows(array)
    expected_rows, expected_counts = np.unique(array, return_counts=True)
    np.testing.assert_array_equal(rows, expected_rows)
    np.testing.assert_array_equal(counts, expected_counts)
    assert rows.dtype == dtype


@given(COUNTS, COUNTS)
def test_sums_are_those_of_counters(one: dict[int, int], two: dict[int, int]) -> None:
    expected = Counter(one) + Counter(two)
    before = [array.copy() for array in (*vector(one), *vector(two))]
    arrays = [*vector(one), *vector(two)]
    rows, counts = sum_sorted(*arrays)
    assert dict(zip(rows.tolist(), counts.tolist())) == expected
    assert (np.diff(rows) > 0).all()
    for array, was in zip(arrays, before):
        np.testing.assert_array_equal(array, was)  # the arguments are left alone


@given(COUNTS, COUNTS)
def test_whole_and_decayed_counts_add_up_to_decayed_ones(
    one: dict[int, int], two: dict[int, int]
) -> None:
    (rows_U, counts_U), (rows_V, counts_V) = (map(torch.from_numpy, vector(c)) for c in (one, two))
    rows, counts = sum_counts(rows_U, counts_U, rows_V, counts_V.double() / 2)
    expected = {row: one.get(row, 0) + two.get(row, 0) / 2 for row in {*one, *two}}
    assert dict(zip(rows.tolist(), counts.tolist())) == expected
    assert counts.dtype == torch.float64
