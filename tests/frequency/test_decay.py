"""Counts that forget by half per half-life."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.frequency.streams import HUGE, as_dict, table_of
from torchrec_picasso.errors import InputError
from torchrec_picasso.frequency.decay import decayed_stats
from torchrec_picasso.frequency.windows import TimedIds

WINDOWS = st.lists(
    st.tuples(st.integers(0, 3), st.lists(st.integers(0, 19), max_size=12)), min_size=1, max_size=6
)


def pieces_of(windows: list[tuple[int, list[int]]]) -> Iterator[TimedIds]:
    """Each window so many after the one before it; 0 = a further piece of it."""
    number = 10
    for gap, ids in windows:
        number += gap
        yield TimedIds(
            window=number, ids={("t", "f"): torch.tensor(ids).long()}, num_samples=len(ids)
        )


@given(WINDOWS, st.sampled_from([0.5, 1.0, 2.0, 3.0]), st.sampled_from([20, HUGE]))
def test_a_lookup_counts_half_when_it_is_a_half_life_old(
    windows: list[tuple[int, list[int]]], half_life: float, num_embeddings: int
) -> None:
    stats = decayed_stats(pieces_of(windows), [table_of(num_embeddings)], half_life)
    newest = max(piece.window for piece in pieces_of(windows))
    weights = np.zeros(20)
    for piece in pieces_of(windows):
        np.add.at(weights, piece.ids["t", "f"], 0.5 ** ((newest - piece.window) / half_life))
    counts = stats.tables["t"]
    found = as_dict(counts.rows_U, counts.counts_U)
    assert found == pytest.approx({row: w for row, w in enumerate(weights) if w})
    assert counts.num_lookups == pytest.approx(weights.sum())
    assert stats.num_samples == pytest.approx(weights.sum())
    if weights.sum():
        assert stats.pooling_factor("f") == pytest.approx(1)


def test_memory_stays_bounded_over_many_windows() -> None:
    rng = np.random.default_rng(0)
    windows = [(1, [*rng.integers(0, 10**6, 300).tolist(), *[7] * 30]) for _ in range(30)]
    stats = decayed_stats(pieces_of(windows), [table_of(HUGE)], 5.0, max_rows_counted=200)
    counts = stats.tables["t"]
    assert counts.rows_U.numel() <= 200
    weight = sum(0.5 ** (age / 5) for age in range(30))
    assert counts.num_lookups == pytest.approx(330 * weight)
    found = as_dict(counts.rows_U, counts.counts_U)[7]
    assert 30 * weight - counts.max_undercount <= found <= 30 * weight + 1e-9
    assert counts.max_undercount < 0.1 * 30 * weight


def test_a_single_window_is_exact() -> None:
    counts = decayed_stats(pieces_of([(0, [1, 1, 2])]), [table_of(20)], 1.0).tables["t"]
    assert as_dict(counts.rows_U, counts.counts_U) == {1: 2, 2: 1}
    assert counts.counts_U.dtype == torch.int64


def test_no_windows_are_no_lookups() -> None:
    stats = decayed_stats([], [table_of(20)], 1.0)
    assert stats.tables["t"].num_lookups == stats.num_samples == 0
    assert stats.tables["t"].num_embeddings == 20


@pytest.mark.parametrize("half_life", [0.0, -1.0, float("nan")])
def test_a_half_life_is_above_zero(half_life: float) -> None:
    with pytest.raises(InputError, match="expected a number of windows above 0"):
        decayed_stats([], [table_of(20)], half_life)


def test_a_table_of_unknown_size_is_refused() -> None:
    with pytest.raises(InputError, match=r"tables \['t'\] have no num_embeddings"):
        decayed_stats([], [table_of(None)], 1.0)
