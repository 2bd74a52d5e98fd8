"""Counts of one table: bounds survive a merge; heavy hitters answer about as all rows do."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.frequency.samples import HUGE, as_dict, chunks_of, counted, true_counts, zipf_ids
from torchrec_picasso.frequency import TableCounts

STREAM = chunks_of(60)
BUDGET = st.integers(1, 12)


@given(STREAM, STREAM, BUDGET, BUDGET)
def test_merging_adds_bounds_and_keeps_them(
    one: list[list[int]], two: list[list[int]], few: int, more: int
) -> None:
    a, b = (counted(chunks, HUGE, max_rows_counted=n) for chunks, n in ((one, few), (two, more)))
    merged = a.merge(b)
    assert merged == b.merge(a)
    assert merged.max_undercount == a.max_undercount + b.max_undercount
    true, head = true_counts([*one, *two]), as_dict(merged)
    assert merged.num_lookups == true.total()
    for row, count in true.items():
        assert count - merged.max_undercount <= head.get(row, 0) <= count


@given(STREAM, STREAM, BUDGET)
def test_a_spectrum_has_all_lookups_in_at_most_the_rows_of_the_table(
    one: list[list[int]], two: list[list[int]], max_rows: int
) -> None:
    """Whatever was counted, lookups per sample follow from the spectrum's total."""
    for num_embeddings in (60, HUGE):
        a, b = (counted(chunks, num_embeddings, max_rows_counted=max_rows) for chunks in (one, two))
        for counts in (a, b, a.merge(b)):
            spectrum = counts.spectrum
            assert spectrum.num_lookups == pytest.approx(counts.num_lookups)
            assert counts.rows_U.numel() <= counts.num_rows_seen <= num_embeddings
            assert (spectrum.counts_K.diff() <= 0).all()


@pytest.fixture(scope="module")
def stream() -> np.ndarray:
    return zipf_ids(400_000, 1_000_000, 1.05, seed=3)


@pytest.fixture(scope="module")
def exact(stream: np.ndarray) -> TableCounts:
    return counted([stream], HUGE)


@pytest.fixture(scope="module")
def heavy(stream: np.ndarray) -> TableCounts:
    """The same stream in chunks, with memory for a fifth of its rows."""
    counts = counted(np.array_split(stream, 40), HUGE, max_rows_counted=16_384)
    assert counts.max_undercount
    return counts


def test_the_most_frequent_heavy_hitters_are_those_of_all_rows(
    exact: TableCounts, heavy: TableCounts
) -> None:
    found, true = (counts.most_frequent_first()[0][:100].tolist() for counts in (heavy, exact))
    assert len(set(found) & set(true)) >= 95  # rows near the cut have nearly the same count


def test_heavy_hitters_answer_about_as_all_rows(
    stream: np.ndarray, exact: TableCounts, heavy: TableCounts
) -> None:
    """Found: 0.1 to 0.7 % off; the rows of all lookups together, which are rare ones, 12 %."""
    halves = [counted([half], HUGE, max_rows_counted=16_384) for half in np.array_split(stream, 2)]
    true = exact.spectrum
    for counts in (heavy, halves[0].merge(halves[1])):
        spectrum = counts.spectrum
        for num_lookups in (100, 4096, 40_000):
            found, expected = (s.expected_unique(num_lookups) for s in (spectrum, true))
            assert found == pytest.approx(expected, rel=0.02)
        for num_hot in (10, 100, 1000):
            assert spectrum.coverage(num_hot) == pytest.approx(true.coverage(num_hot), rel=0.01)
            found, expected = (s.expected_cold(4096, num_hot) for s in (spectrum, true))
            assert found == pytest.approx(expected, rel=0.01)
        assert counts.num_rows_seen == pytest.approx(exact.num_rows_seen, rel=0.2)
