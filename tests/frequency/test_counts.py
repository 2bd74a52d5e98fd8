"""Counts of one table: they agree with numpy on any stream and keep their bounds beyond the budget;
bounds survive a merge; heavy hitters answer about as all rows do."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.frequency.samples import (
    HUGE,
    as_dict,
    chunks_of,
    counted,
    table_of,
    true_counts,
    zipf_ids,
)
from torchrec_picasso.frequency import TableCounts
from torchrec_picasso.frequency import counts as counters
from torchrec_picasso.frequency.counts import LookupCounter

NUM_IDS = 60  # dense below 4 * 15 rows counted, sorted otherwise
STREAM = chunks_of(NUM_IDS)
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


def test_the_heaviest_hitters_are_those_of_all(exact: TableCounts, heavy: TableCounts) -> None:
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


@pytest.fixture
def small_folds() -> Iterator[None]:
    """Half a million ids would wait otherwise, and no test here could fold twice."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(counters, "_MIN_PENDING_LOOKUPS", 1)
        yield


@pytest.mark.usefixtures("small_folds")
@given(STREAM, st.sampled_from([NUM_IDS, NUM_IDS + 1, 4 * NUM_IDS + 1, HUGE, 1 << 40, None]))
def test_counts_are_exact_if_rows_fit(chunks: list[list[int]], num_embeddings: int | None) -> None:
    counts = counted(chunks, num_embeddings, max_rows_counted=NUM_IDS)
    true = true_counts(chunks)
    assert as_dict(counts) == true
    assert (counts.rows_U.diff() > 0).all()
    assert counts.rows_U.dtype == counts.counts_U.dtype == torch.int64
    assert not counts.max_undercount
    assert counts.num_rows_seen == len(true)
    assert counts.num_lookups == true.total()
    smallest_table = 1 + max(true, default=-1)
    assert counts.num_embeddings == (smallest_table if num_embeddings is None else num_embeddings)


@pytest.mark.usefixtures("small_folds")
@given(STREAM, st.integers(1, 12))
def test_beyond_the_budget_misra_and_gries_hold(chunks: list[list[int]], max_rows: int) -> None:
    counts = counted(chunks, HUGE, max_rows_counted=max_rows)
    true = true_counts(chunks)
    head = as_dict(counts)
    assert counts.rows_U.numel() <= max_rows
    assert counts.max_undercount <= true.total() / (max_rows + 1)
    for row, count in true.items():
        assert count - counts.max_undercount <= head.get(row, 0) <= count
    assert set(head) <= set(true)
    assert counts.num_lookups == true.total()
    assert (not counts.max_undercount) == (len(true) <= max_rows)


@pytest.mark.parametrize("num_embeddings", [1 << 41, None])
def test_ids_beyond_32_bits_are_counted(num_embeddings: int | None) -> None:
    counts = counted([[1 << 40, 3], [1 << 40]], num_embeddings)
    assert as_dict(counts) == {3: 1, 1 << 40: 2}


def test_ids_may_be_a_view_that_changes_later() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(counters, "_MIN_PENDING_LOOKUPS", 100)
        counter = LookupCounter(table_of(HUGE))
        batch = np.array([5, 6, 7])
        counter.add(batch[1:])
        batch[:] = 0
        assert as_dict(counter.result()) == {6: 1, 7: 1}


def test_halves_of_a_stream_are_told_apart_by_ranges_of_rows() -> None:
    """Of 100 chunks in 25 parts of the time, 48 are in the earlier half."""
    counts = counted([[0]] * 50 + [[70]] * 50, 128)
    earlier, later = counts.halves
    assert (earlier[0], sum(earlier), later[0], later[35], sum(later)) == (48, 48, 2, 50, 52)
    assert counts.merge(counts).halves[1][35] == 100
    assert counted([[0]], 128).halves == counted([[0], [1]], None).halves == ()
