"""Rarefaction, extrapolation and coverage of a spectrum, against brute force and by hand."""

import math
from collections.abc import Iterator
from math import comb
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torchrec import KeyedJaggedTensor

from tests.frequency.samples import zipf_ids
from tests.support.tables import Table, bags_of
from torchrec_picasso.frequency import CountSpectrum, FrequencyStats
from torchrec_picasso.frequency.spectrum import _log_absent

COUNTS = st.lists(st.integers(1, 9), max_size=20)
SOME_COUNTS = st.lists(st.integers(1, 9), min_size=1, max_size=20)


def spectrum_of(counts: list[int], num_embeddings: int = 40) -> CountSpectrum:
    return CountSpectrum.from_counts(torch.tensor(counts, dtype=torch.int64), num_embeddings)


@given(COUNTS)
def test_every_count_is_kept_once(counts: list[int]) -> None:
    spectrum = spectrum_of(counts)
    values, rows = np.unique(np.array(counts, dtype=np.int64), return_counts=True)
    assert spectrum.counts_K.tolist() == values[::-1].tolist()
    assert spectrum.rows_K.tolist() == rows[::-1].tolist()
    assert spectrum.num_lookups == sum(counts)


@given(SOME_COUNTS, st.data())
def test_presence_equals_all_subsets(counts: list[int], data: st.DataObject) -> None:
    total = sum(counts)
    drawn = data.draw(st.integers(0, total))
    spectrum = spectrum_of(counts)
    expected = [1 - comb(total - int(c), drawn) / comb(total, drawn) for c in spectrum.counts_K]
    torch.testing.assert_close(
        spectrum.presence(drawn), torch.tensor(expected, dtype=torch.float64), rtol=1e-7, atol=1e-9
    )
    distinct = sum(e * rows for e, rows in zip(expected, spectrum.rows_K.tolist()))
    assert spectrum.expected_unique(drawn) == pytest.approx(distinct, rel=1e-7, abs=1e-7)


@given(SOME_COUNTS)
def test_extrapolation_starts_at_the_sample_and_ends_at_chaos_bound(counts: list[int]) -> None:
    spectrum = spectrum_of(counts, 10**9)
    seen = len(counts)
    assert spectrum.expected_unique(spectrum.num_lookups) == pytest.approx(seen)
    just_more = spectrum.expected_unique(spectrum.num_lookups + 1e-6)
    assert just_more == pytest.approx(seen, abs=1e-5)
    once, twice = counts.count(1), counts.count(2)
    chao = once * once / (2 * twice) if twice else once * (once - 1) / 2
    assert spectrum.num_unseen == pytest.approx(chao)
    if chao:
        assert spectrum.expected_unique(1e12) == pytest.approx(seen + chao)


def test_one_further_lookup_finds_new_rows_as_often_as_good_and_turing_say() -> None:
    """Extrapolation begins with the slope of Good and Turing, up to Colwell's discreteness."""
    spectrum = spectrum_of([5, 3, 2, 2, 1, 1, 1, 1], 10**9)
    assert spectrum.num_lookups == 16
    assert spectrum.unseen_mass == 4 / 16
    assert spectrum.num_unseen == 4 * 4 / (2 * 2)
    slope = spectrum.expected_unseen(16 + 1e-6) / 1e-6
    assert slope == pytest.approx(4 * -math.log1p(-4 / (16 * 4 + 4)), rel=1e-6)


def test_unseen_rows_fit_the_table() -> None:
    full = spectrum_of([1, 1, 1], 3)
    assert full.num_unseen == 0
    assert full.expected_unique(10**9) == 3
    assert spectrum_of([1] * 10, 12).num_unseen == 2  # Chao alone would say 45


def test_a_table_without_lookups() -> None:
    nothing = spectrum_of([])
    assert nothing.unseen_mass == 1
    assert nothing.expected_unique(100) == 0
    assert nothing.rows_for_coverage(0.5) == 0
    rows_K, share_K = nothing.coverage_curve()
    assert rows_K.tolist() == share_K.tolist() == [0]


@pytest.mark.parametrize("drawn", [1, 1000, 4096, 100_000, 500_000])
def test_both_forms_of_absence_agree_where_one_hands_over_to_the_other(drawn: float) -> None:
    counts_K = torch.tensor([20_000, 1000, 100, 17, 3, 2, 1], dtype=torch.float64)
    below, above = (_log_absent(total, counts_K, drawn).exp() for total in (1e6, 1e6 + 1e-3))
    torch.testing.assert_close(above, below, rtol=2e-6, atol=1e-12)


@pytest.mark.parametrize("total", [3 * 10**6, 10**9, 10**12])
@pytest.mark.parametrize("drawn", [1, 4096, 10**6])
def test_absence_among_many_lookups_equals_its_product(total: int, drawn: int) -> None:
    """``C(N - c, n) / C(N, n)`` is a product of c factors; here it is taken factor by factor."""
    counts = [1, 2, 3, 40, 1000]
    expected = [sum(math.log1p(-drawn / (total - i)) for i in range(c)) for c in counts]
    found = _log_absent(float(total), torch.tensor(counts, dtype=torch.float64), float(drawn))
    assert found.tolist() == pytest.approx(expected, rel=1e-5)


@given(SOME_COUNTS, st.floats(0, 1))
def test_rows_for_a_coverage_are_the_fewest_that_reach_it(counts: list[int], share: float) -> None:
    spectrum = spectrum_of(counts)
    taken = np.concatenate([[0], np.sort(counts)[::-1].cumsum()])
    rows = spectrum.rows_for_coverage(share)
    wanted = share * sum(counts)
    assert taken[rows] >= wanted - 1e-6
    assert rows == 0 or taken[rows - 1] < wanted + 1e-6


@given(SOME_COUNTS)
def test_the_coverage_curve_is_the_ranked_sum(counts: list[int]) -> None:
    rows_K, share_K = spectrum_of(counts).coverage_curve()
    taken = np.append(0, np.sort(counts)[::-1].cumsum() / sum(counts))
    np.testing.assert_allclose(share_K, taken[rows_K.astype(int)])
    assert (rows_K[0], rows_K[-1], share_K[-1]) == (0, len(counts), pytest.approx(1))


@given(COUNTS, st.integers(0, 45))
def test_coverage_is_the_share_of_the_largest_counts(counts: list[int], num_rows: int) -> None:
    taken = sum(sorted(counts, reverse=True)[:num_rows])
    expected = taken / sum(counts) if counts else 0
    assert spectrum_of(counts).coverage(num_rows) == pytest.approx(expected)


@given(SOME_COUNTS, st.integers(0, 25), st.integers(0, 60))
def test_cold_rows_are_outside_the_most_used(counts: list[int], num_hot: int, drawn: int) -> None:
    spectrum = spectrum_of(counts)
    presence = dict(zip(spectrum.counts_K.tolist(), spectrum.presence(drawn).tolist()))
    hot = sum(presence[count] for count in sorted(counts, reverse=True)[:num_hot])
    expected = max(0.0, spectrum.expected_unique(drawn) - hot)
    assert spectrum.expected_cold(drawn, num_hot) == pytest.approx(expected, rel=1e-9, abs=1e-9)


def test_lookups_without_a_count_are_rare_rows_as_far_as_the_table_has_rows() -> None:
    counts = torch.tensor([50, 40])
    many, few = (CountSpectrum.from_counts(counts, rows, num_uncounted=30) for rows in (1000, 17))
    assert (many.counts_K.tolist(), many.rows_K.tolist()) == ([50, 40, 1], [1, 1, 30])
    assert (few.counts_K.tolist(), few.rows_K.tolist()) == ([50, 40, 2], [1, 1, 15])
    assert many.num_lookups == few.num_lookups == 120


def test_rarefaction_is_right_of_a_long_skewed_stream() -> None:
    """Batches cut at random from two million lookups, past where the exact form ends."""
    ids = zipf_ids(2_000_000, 300_000, 1.1, seed=1)
    counts = np.bincount(ids)
    spectrum = CountSpectrum.from_counts(torch.from_numpy(counts[counts > 0]), 300_000)
    rng = np.random.default_rng(2)
    rng.shuffle(ids)
    batches = ids[: 200 * 4096].reshape(200, 4096)
    distinct = np.mean([np.unique(batch).size for batch in batches])
    assert spectrum.expected_unique(4096) == pytest.approx(distinct, rel=0.003)


ROWS, SAMPLES, HISTORY, TASTES = 20_000, 256, 20, 3
LOOKUPS = SAMPLES * HISTORY


def _batches(seed: int, num_batches: int, tastes: int | None) -> Iterator[KeyedJaggedTensor]:
    """Histories of few rows each, all of one skew; ``None`` = every lookup on its own."""
    rng = np.random.default_rng(seed)
    share = 1 / np.arange(1, ROWS + 1) ** 0.8
    share /= share.sum()
    for _ in range(num_batches):
        if tastes is None:
            ids = rng.choice(ROWS, LOOKUPS, p=share)
        else:
            liked = rng.choice(ROWS, (SAMPLES, tastes), p=share)
            picked = rng.integers(0, tastes, (SAMPLES, HISTORY))
            ids = np.take_along_axis(liked, picked, axis=1).ravel()
        lengths = torch.full((SAMPLES,), HISTORY)
        yield KeyedJaggedTensor(["f"], torch.from_numpy(ids), lengths=lengths)


def _collected(seed: int, num_batches: int, tastes: int | None) -> FrequencyStats:
    model = bags_of([Table("t", 4, ROWS, ("f",))], "meta")
    return FrequencyStats.collect(_batches(seed, num_batches, tastes), model)


@pytest.fixture(scope="module", name="bursts")
def _bursts() -> FrequencyStats:
    return _collected(1, 24, TASTES)


@pytest.mark.parametrize(("part", "error"), [(1.0, 0.03), (0.5, 0.08), (0.125, 0.08)])
def test_distinct_rows_are_those_of_other_batches_and_of_their_parts(
    bursts: FrequencyStats, part: float, error: float
) -> None:
    num_lookups = int(part * LOOKUPS)
    distinct = [batch.values()[:num_lookups].unique().numel() for batch in _batches(2, 24, TASTES)]
    found = bursts.expected_unique("t", num_lookups)
    assert found == pytest.approx(np.mean(distinct), rel=error)
    assert bursts.tables["t"].effective_share < 0.5


def test_all_lookups_have_all_rows(bursts: FrequencyStats) -> None:
    counts = bursts.tables["t"]
    found = bursts.expected_unique("t", counts.num_lookups)
    assert found == pytest.approx(counts.num_rows_seen, rel=1e-6)


def test_independent_lookups_and_a_single_batch_count_as_independent() -> None:
    assert _collected(1, 24, None).tables["t"].effective_share == 1
    assert _collected(1, 1, TASTES).tables["t"].effective_share == 1


def test_files_and_merges_keep_it(bursts: FrequencyStats, tmp_path: Path) -> None:
    bursts.to_parquet(tmp_path / "stats.parquet")
    assert FrequencyStats.from_parquet(tmp_path / "stats.parquet").tables == bursts.tables
    merged = bursts.merge(_collected(3, 24, None)).tables["t"]
    expected = (bursts.tables["t"].effective_share + 1) / 2
    assert merged.effective_share == pytest.approx(expected)
