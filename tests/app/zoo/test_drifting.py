"""Ids of which others are popular every hour."""

from __future__ import annotations

import numpy as np
import pytest

from torchrec_picasso.app.zoo.data.drifting import generate_drifting
from torchrec_picasso.errors import InputError

HOURS, PER_HOUR, ROWS = 6, 20_000, 500


def shared_favourites(turnover: float) -> list[int]:
    """Of the first hour's ten most popular rows, how many are so in each hour."""
    ids, hours = generate_drifting(HOURS, PER_HOUR, num_rows=ROWS, turnover=turnover)
    favourites = [
        set(np.argsort(-np.bincount(ids[hours == hour], minlength=ROWS), kind="stable")[:10])
        for hour in range(HOURS)
    ]
    return [len(favourites[0] & of) for of in favourites]


def test_ids_are_the_same_again_and_of_their_hour() -> None:
    first, again, other = (generate_drifting(2, 300, seed=seed) for seed in (0, 0, 1))
    assert first[0].tolist() == again[0].tolist() != other[0].tolist()
    assert first[1].tolist() == [0] * 300 + [1] * 300
    assert first[0].dtype == first[1].dtype == np.int64


def test_popular_rows_change_as_fast_as_is_asked() -> None:
    still, slowly, at_once = (shared_favourites(turnover) for turnover in (0.0, 0.2, 1.0))
    assert min(still) >= 8  # the tenth and the eleventh are nearly alike
    assert still[-1] > slowly[-1]
    assert max(at_once[1:]) <= 2


def test_popularity_keeps_its_shape() -> None:
    ids, hours = generate_drifting(HOURS, PER_HOUR, num_rows=ROWS, turnover=0.5)
    largest = [np.bincount(ids[hours == hour]).max() / PER_HOUR for hour in range(HOURS)]
    expected = 1 / (1 / np.arange(1, ROWS + 1)).sum()
    assert np.allclose(largest, expected, rtol=0.1)


@pytest.mark.parametrize("turnover", [-0.1, 1.5])
def test_a_turnover_that_is_no_part_is_refused(turnover: float) -> None:
    with pytest.raises(InputError, match=r"turnover is .*, expected a part .* from 0 to 1"):
        generate_drifting(1, 1, turnover=turnover)
