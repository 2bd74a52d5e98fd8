"""The tail's sample: exact counts of rows that a hash chooses, whoever counts them."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.frequency.streams import as_dict, true_counts
from torchrec_picasso.frequency.sums import count_rows
from torchrec_picasso.frequency.tail import TailSample

STREAM = st.lists(st.lists(st.integers(0, 200), max_size=20), min_size=1, max_size=6)
_MASK = (1 << 64) - 1


def trailing_zeros(row: int) -> int:
    """Of SplitMix64's hash, in Python's integers."""
    z = (row + 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    z ^= z >> 31
    return (z & -z).bit_length() - 1 if z else 64


def sample_of(chunks: list[list[int]], max_rows: int) -> TailSample:
    nothing = torch.empty(0, dtype=torch.int64)
    sample = TailSample.of(nothing, nothing, max_rows=max_rows)
    for chunk in chunks:
        rows, counts = count_rows(np.array(chunk, dtype=np.int64))
        sample = sample.add(torch.from_numpy(rows), torch.from_numpy(counts), max_rows)
    return sample


@given(STREAM, st.integers(1, 40))
def test_counts_are_exact_of_all_rows_that_the_hash_chooses(
    chunks: list[list[int]], max_rows: int
) -> None:
    sample = sample_of(chunks, max_rows)
    true = true_counts(chunks)
    chosen = {row: count for row, count in true.items() if trailing_zeros(row) >= sample.level}
    assert as_dict(sample.rows_V, sample.counts_V) == chosen
    assert len(chosen) <= max_rows
    if sample.level:  # no lower level would have fitted
        assert sum(trailing_zeros(row) >= sample.level - 1 for row in true) > max_rows
    assert (sample.rows_V.diff() > 0).all()


@given(STREAM, st.integers(1, 40), st.randoms())
def test_neither_order_nor_chunks_matter(
    chunks: list[list[int]], max_rows: int, random: Random
) -> None:
    ids = [i for chunk in chunks for i in chunk]
    random.shuffle(ids)
    assert sample_of([ids], max_rows) == sample_of(chunks, max_rows)
    assert sample_of([[i] for i in ids], max_rows) == sample_of(chunks, max_rows)


@given(STREAM, STREAM, st.integers(1, 40), st.integers(1, 40))
def test_merged_samples_count_both_streams(
    one: list[list[int]], two: list[list[int]], few: int, more: int
) -> None:
    a, b = sample_of(one, few), sample_of(two, more)
    merged = a.merge(b)
    assert merged == b.merge(a)
    assert merged.level == max(a.level, b.level)
    chosen = {
        row: count
        for row, count in true_counts([*one, *two]).items()
        if trailing_zeros(row) >= merged.level
    }
    assert as_dict(merged.rows_V, merged.counts_V) == chosen


@pytest.mark.parametrize("num_rows", [5_000, 50_000, 300_000])
@pytest.mark.parametrize("spread", [1, 1 << 24])
def test_distinct_rows_are_estimated_within_three_standard_errors(
    num_rows: int, spread: int
) -> None:
    """Rows in a row and rows far apart: the hash makes them alike."""
    rows = torch.arange(num_rows, dtype=torch.int64) * spread
    sample = TailSample.of(rows, torch.ones_like(rows), max_rows=1024)
    assert 1024 // 4 < sample.rows_V.numel() <= 1024
    error = abs(sample.num_distinct - num_rows) / num_rows
    assert error < 3 / sample.rows_V.numel() ** 0.5
    assert sample.rows_per_sampled == 2**sample.level


def test_scaling_scales_counts_alone() -> None:
    sample = sample_of([[1, 1, 2, 9]], 10)
    half = sample.scaled(0.5)
    assert as_dict(half.rows_V, half.counts_V) == {1: 1.0, 2: 0.5, 9: 0.5}
    assert half.counts_V.dtype == torch.float64
    assert half.num_distinct == sample.num_distinct
    assert half != sample
