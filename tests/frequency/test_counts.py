"""Counts with a head and a tail: their bounds survive every operation, their answers stay close."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.frequency.samples import table_counts
from tests.frequency.streams import HUGE, as_dict, chunks_of, counted, true_counts, zipf_ids
from torchrec_picasso.errors import PlanError
from torchrec_picasso.frequency import TableCounts

STREAM = chunks_of(60)
BUDGET = st.integers(1, 12)


def small(chunks: list[list[int]], max_rows: int) -> TableCounts:
    return counted(chunks, HUGE, max_rows_counted=max_rows, max_rows_sampled=16)


def check_bounds(counts: TableCounts, chunks: list[list[int]]) -> None:
    """What every row's count may be, and that the tail is exact."""
    true = true_counts(chunks)
    head = as_dict(counts.rows_U, counts.counts_U)
    for row, count in true.items():
        assert count - counts.max_undercount <= head.get(row, 0) <= count
    assert counts.num_lookups == true.total()
    if counts.tail is not None:
        tail = as_dict(counts.tail.rows_V, counts.tail.counts_V)
        assert tail == {row: true[row] for row in tail}
    else:
        assert head == true


@given(STREAM, STREAM, BUDGET, BUDGET)
def test_merging_adds_bounds_and_keeps_them(
    one: list[list[int]], two: list[list[int]], few: int, more: int
) -> None:
    a, b = small(one, few), small(two, more)
    merged = a.merge(b)
    assert merged == b.merge(a)
    check_bounds(merged, [*one, *two])
    assert merged.max_undercount == a.max_undercount + b.max_undercount
    assert merged.is_exact == (a.is_exact and b.is_exact)


@given(STREAM, STREAM, BUDGET, BUDGET)
def test_merging_in_bounded_memory_keeps_the_bounds_too(
    one: list[list[int]], two: list[list[int]], budget: int, shrunk_to: int
) -> None:
    a, b = small(one, budget), small(two, budget)
    merged = a.merge(b, max_rows_counted=shrunk_to)
    assert merged.rows_U.numel() <= shrunk_to
    check_bounds(merged, [*one, *two])
    least = min(budget, shrunk_to)
    # Agarwal et al. 2012: merging loses no more than one pass over both streams may
    assert merged.max_undercount <= merged.num_lookups / (least + 1)


@given(STREAM, BUDGET, BUDGET)
def test_shrinking_keeps_the_bounds_and_all_else(
    chunks: list[list[int]], budget: int, shrunk_to: int
) -> None:
    counts = small(chunks, budget)
    fewer = counts.shrunk(shrunk_to)
    check_bounds(fewer, chunks)
    assert fewer.rows_U.numel() <= shrunk_to
    assert fewer.feature_lookups == counts.feature_lookups
    assert fewer.feature_bags == counts.feature_bags
    if counts.rows_U.numel() <= shrunk_to:
        assert fewer is counts


@given(STREAM, BUDGET, st.sampled_from([0.5, 0.25, 1e-3]))
def test_decaying_scales_every_number(chunks: list[list[int]], budget: int, factor: float) -> None:
    counts = small(chunks, budget)
    faded = counts.decayed(factor)
    assert faded.rows_U.tolist() == counts.rows_U.tolist()
    assert faded.counts_U.tolist() == [count * factor for count in counts.counts_U.tolist()]
    assert faded.max_undercount == counts.max_undercount * factor
    assert faded.num_lookups == pytest.approx(counts.num_lookups * factor)
    assert faded.feature_lookups == (counts.feature_lookups[0] * factor,)
    assert faded.feature_bags == (counts.feature_bags[0] * factor,)
    assert faded.num_rows_seen == counts.num_rows_seen
    assert (faded.tail is None) == (counts.tail is None)
    if counts.tail is not None and faded.tail is not None:
        assert faded.tail == counts.tail.scaled(factor)


def test_pooling_factor_is_lookups_per_sample() -> None:
    counts = replace(
        table_counts(9, {1: 6}),
        feature_names=("f", "g", "never"),
        feature_lookups=(6, 0, 0),
        feature_bags=(4, 4, 0),
    )
    factors = [counts.pooling_factor(name) for name in counts.feature_names]
    assert factors == [1.5, 0.0, 0.0]
    doubled = counts.merge(counts)
    assert [doubled.pooling_factor(name) for name in counts.feature_names] == factors


def test_pooling_factor_is_not_known_of_counts_alone() -> None:
    known = replace(table_counts(9, {1: 6}), feature_lookups=(6,), feature_bags=(4,))
    unknown = table_counts(9, {1: 6})
    for counts in (unknown, unknown.merge(known), known.merge(unknown)):
        with pytest.raises(PlanError, match="hold no number of samples for feature 'f'"):
            counts.pooling_factor("f")


def test_rows_are_ranked_by_count_then_by_row() -> None:
    rows, counts = table_counts(9, {1: 2, 3: 5, 4: 2, 8: 7}).most_frequent_first()
    assert rows.tolist() == [8, 3, 1, 4]
    assert counts.tolist() == [7, 5, 2, 2]


@pytest.fixture(scope="module")
def long_stream() -> np.ndarray:
    return zipf_ids(400_000, 1_000_000, 1.05, seed=3)


@pytest.fixture(scope="module")
def in_full(long_stream: np.ndarray) -> TableCounts:
    return counted([long_stream], HUGE)


@pytest.fixture(scope="module")
def in_part(long_stream: np.ndarray) -> TableCounts:
    """The same stream in chunks, with memory for a fifth of its rows and a sample."""
    chunks = np.array_split(long_stream, 40)
    counts = counted(chunks, HUGE, max_rows_counted=16_384, max_rows_sampled=8192)
    assert not counts.is_exact
    return counts


def test_a_head_and_a_tail_answer_like_all_rows(in_full: TableCounts, in_part: TableCounts) -> None:
    """Within three standard errors of a sample of 5,600 rows: 3 / sqrt(5,600) is 4 %."""
    assert in_full.is_exact
    assert in_part.num_rows_seen == pytest.approx(in_full.num_rows_seen, rel=0.04)
    exact, close = in_full.spectrum(), in_part.spectrum()
    assert close.num_lookups == exact.num_lookups == 400_000
    for num_lookups in (100, 4096, 40_000, 400_000):
        assert close.expected_unique(num_lookups) == pytest.approx(
            exact.expected_unique(num_lookups), rel=0.04
        )
    assert close.unseen_mass == pytest.approx(exact.unseen_mass, rel=0.04)
    for num_hot in (10, 100, 1000):
        assert close.expected_hot(4096, num_hot) == pytest.approx(
            exact.expected_hot(4096, num_hot), rel=0.01
        )


def test_the_hottest_rows_of_the_head_are_those_of_all_rows(
    in_full: TableCounts, in_part: TableCounts
) -> None:
    found, true = (counts.most_frequent_first()[0][:100].tolist() for counts in (in_part, in_full))
    assert len(set(found) & set(true)) >= 95  # rows near the cut have nearly the same count


def test_merged_halves_answer_like_the_whole(long_stream: np.ndarray, in_full: TableCounts) -> None:
    halves = [
        counted([half], HUGE, max_rows_counted=16_384, max_rows_sampled=8192)
        for half in np.array_split(long_stream, 2)
    ]
    merged = halves[0].merge(halves[1], max_rows_counted=16_384)
    assert merged.rows_U.numel() <= 16_384
    assert merged.spectrum().expected_unique(4096) == pytest.approx(
        in_full.spectrum().expected_unique(4096), rel=0.04
    )
