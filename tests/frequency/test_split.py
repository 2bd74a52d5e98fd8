"""Cold rows of batches that the hot set was not chosen from, against real hold-outs."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.frequency.streams import zipf_ids
from torchrec_picasso.frequency import CountSpectrum
from torchrec_picasso.frequency.split import coverage, expected_unique_cold

COUNTS = st.lists(st.integers(1, 12), max_size=25)
NUM_REPEATS = 200


def spectrum_of(counts: list[int] | np.ndarray, num_embeddings: int) -> CountSpectrum:
    seen = np.asarray(counts, dtype=np.int64)
    return CountSpectrum.of(torch.from_numpy(seen[seen > 0]), num_embeddings)


def held_out(
    counts_R: np.ndarray, num_lookups: int, num_hot: int, rng: np.random.Generator
) -> tuple[float, float]:
    """Cold rows of held-out batches beside hot sets of the rest: mean and standard error."""
    ids = np.repeat(np.arange(counts_R.size), counts_R)
    cold = np.empty(NUM_REPEATS)
    for repeat in range(NUM_REPEATS):
        rng.shuffle(ids)
        batch, rest = ids[:num_lookups], ids[num_lookups:]
        left_R = np.bincount(rest, minlength=counts_R.size)
        hottest = np.lexsort((rng.random(counts_R.size), -left_R))[:num_hot]  # ties at random
        cold[repeat] = np.setdiff1d(batch, hottest).size
    return float(cold.mean()), float(cold.std() / NUM_REPEATS**0.5)


@pytest.mark.parametrize(
    ("num_rows", "sampled", "exponent"),
    [(60, 3000, 1.0), (300, 3000, 0.8), (2000, 3000, 1.0), (2000, 8000, 1.1), (500, 400, 1.0)],
)
@pytest.mark.parametrize("share", [0.02, 0.1, 0.25])
def test_cold_rows_are_those_of_held_out_batches(
    num_rows: int, sampled: int, exponent: float, share: float
) -> None:
    """To three standard errors of the trial and 2 %: a binomial stands for a draw without return"""
    counts_R = np.bincount(zipf_ids(sampled, num_rows, exponent, seed=0), minlength=num_rows)
    spectrum, rng = spectrum_of(counts_R, num_rows), np.random.default_rng(1)
    num_lookups = round(sampled * share)
    for num_hot in (1, num_rows // 50, num_rows // 10, num_rows // 3, num_rows // 2):
        trial, error = held_out(counts_R, num_lookups, num_hot, rng)
        found = expected_unique_cold(spectrum, num_lookups, num_hot)
        assert abs(found - trial) < 3 * error + 0.02 * trial, (num_hot, trial, found)


def test_rows_near_the_cut_look_hotter_than_they_are() -> None:
    """Judged on the sample that chose them, hot rows take more of a batch than they will."""
    counts_R = np.bincount(zipf_ids(3000, 2000, 1.0, seed=0), minlength=2000)
    spectrum = spectrum_of(counts_R, 2000)
    trial, error = held_out(counts_R, 300, 400, np.random.default_rng(1))
    naive = spectrum.expected_unique(300) - spectrum.expected_hot(300, 400)
    assert naive < trial - 0.1 * trial
    assert abs(expected_unique_cold(spectrum, 300, 400) - trial) < 3 * error + 0.02 * trial


@given(COUNTS, st.integers(0, 400))
def test_without_hot_rows_all_distinct_rows_are_cold(counts: list[int], num_lookups: int) -> None:
    spectrum = spectrum_of(counts, 40)
    assert expected_unique_cold(spectrum, num_lookups, 0) == spectrum.expected_unique(num_lookups)


@given(COUNTS, st.integers(0, 400), st.integers(40, 60))
def test_where_all_rows_are_hot_none_is_cold(
    counts: list[int], num_lookups: int, num_hot: int
) -> None:
    assert expected_unique_cold(spectrum_of(counts, 40), num_lookups, num_hot) == 0


@settings(max_examples=30)  # of 41 answers each
@given(COUNTS, st.integers(1, 300))
def test_more_hot_rows_leave_no_more_cold_ones(counts: list[int], num_lookups: int) -> None:
    spectrum = spectrum_of(counts, 40)
    cold = [expected_unique_cold(spectrum, num_lookups, num_hot) for num_hot in range(41)]
    assert all(more <= fewer + 1e-6 for fewer, more in pairwise(cold))
    assert all(0 <= rows <= spectrum.expected_unique(num_lookups) + 1e-6 for rows in cold)


@pytest.mark.parametrize("num_hot", [0, 1, 3, 40])
def test_an_empty_batch_has_no_cold_rows(num_hot: int) -> None:
    assert expected_unique_cold(spectrum_of([5, 2, 1], 40), 0, num_hot) == 0


def test_a_table_without_lookups_has_no_cold_rows() -> None:
    assert expected_unique_cold(spectrum_of([], 40), 100, 3) == 0
    assert coverage(spectrum_of([], 40), 3) == 0


@given(COUNTS, st.integers(0, 45))
def test_coverage_is_the_share_of_the_largest_counts(counts: list[int], num_rows: int) -> None:
    taken = sum(sorted(counts, reverse=True)[:num_rows])
    expected = taken / sum(counts) if counts else 0
    assert coverage(spectrum_of(counts, 40), num_rows) == pytest.approx(expected)


def test_decayed_counts_are_judged_as_whole_ones_nearby() -> None:
    """Counts a little off whole numbers, as after many half-lives, change cold rows as little."""
    counts_R = np.bincount(zipf_ids(20_000, 2000, 1.1, seed=0), minlength=2000)
    seen = torch.from_numpy(counts_R[counts_R > 0]).double()
    whole, faded = (CountSpectrum.of(seen * factor, 2000) for factor in (1, 0.999))
    for num_hot in (40, 200, 1000):
        assert expected_unique_cold(faded, 400, num_hot) == pytest.approx(
            expected_unique_cold(whole, 400, num_hot), rel=0.01
        )
