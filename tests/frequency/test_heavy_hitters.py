"""What is kept of too many rows: the most frequent, each lowered by the same amount."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from torchrec_picasso.frequency.heavy_hitters import keep_heaviest

COUNTS = st.dictionaries(st.integers(0, 99), st.integers(1, 9), max_size=20)


@given(COUNTS, st.integers(1, 20))
def test_all_rows_lose_the_count_of_the_first_that_does_not_fit(
    counts: dict[int, int], max_rows: int
) -> None:
    rows = np.array(sorted(counts), dtype=np.int64)
    of = np.array([counts[row] for row in sorted(counts)], dtype=np.int64)
    kept, lowered, subtracted = keep_heaviest(rows, of, max_rows)
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


def test_decayed_counts_keep_their_fractions() -> None:
    kept, lowered, subtracted = keep_heaviest(np.arange(3), np.array([0.5, 2.25, 1.0]), 2)
    assert (kept.tolist(), lowered.tolist(), subtracted) == ([1, 2], [1.75, 0.5], 0.5)
