"""The laws of hot-set selection, against a plain sort over all rows."""

from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.frequency.samples import ROWS, dense_counts, make_stats, stats_of
from torchrec_picasso.errors import PlanError
from torchrec_picasso.frequency import FrequencyStats, select_hot_rows

STATS = stats_of(ROWS)
ALL_ROWS = sum(ROWS.values())


def plain_choice(stats: FrequencyStats, tables: list[str], count: int) -> list[tuple[str, int]]:
    """The first rows by count descending, then table order, then row."""
    ranked = [
        (-hits, position, row, name)
        for position, name in enumerate(tables)
        for row, hits in enumerate(dense_counts(stats.tables[name]).tolist())
    ]
    return sorted((name, row) for _, _, row, name in sorted(ranked)[:count])


def flat(chosen: dict[str, torch.Tensor]) -> list[tuple[str, int]]:
    return sorted((name, row) for name, rows in chosen.items() for row in rows.tolist())


@given(STATS, st.integers(0, ALL_ROWS))
def test_a_total_takes_the_most_frequent_rows(stats: FrequencyStats, total: int) -> None:
    chosen = select_hot_rows(ROWS, total, stats)
    assert list(chosen) == list(ROWS)
    assert flat(chosen) == plain_choice(stats, list(ROWS), total)
    for rows in chosen.values():
        assert rows.dtype == torch.int64
        assert (rows.diff() > 0).all()


@given(STATS, st.integers(0, ROWS["small"]), st.integers(0, ROWS["large"]))
def test_numbers_per_table_are_exact(stats: FrequencyStats, small: int, large: int) -> None:
    asked = {"large": large, "small": small}
    chosen = select_hot_rows(ROWS, asked, stats)
    assert list(chosen) == list(ROWS)
    for name, count in asked.items():
        assert flat({name: chosen[name]}) == plain_choice(stats, [name], count)
        assert (chosen[name].diff() > 0).all()


@given(STATS, st.integers(1, ALL_ROWS))
def test_a_larger_total_keeps_the_rows(stats: FrequencyStats, total: int) -> None:
    fewer = flat(select_hot_rows(ROWS, total - 1, stats))
    assert set(fewer) < set(flat(select_hot_rows(ROWS, total, stats)))


def test_a_mapping_leaves_other_tables_out() -> None:
    chosen = select_hot_rows(ROWS, {"large": 2})
    assert {name: rows.tolist() for name, rows in chosen.items()} == {"large": [0, 1]}
    assert select_hot_rows(ROWS, {}) == {}


def test_zero_needs_no_statistics() -> None:
    chosen = select_hot_rows(ROWS, 0)
    assert {name: rows.tolist() for name, rows in chosen.items()} == {"small": [], "large": []}
    assert all(rows.dtype == torch.int64 for rows in chosen.values())


def test_numpys_integers_are_integers() -> None:
    assert flat(select_hot_rows(ROWS, {"small": cast(int, np.int64(1))})) == [("small", 0)]


def test_tables_of_another_part_of_the_model_are_not_chosen() -> None:
    stats = make_stats({**ROWS, "else": 5}, {"else": {1: 99}, "small": {2: 1}})
    assert flat(select_hot_rows(ROWS, 1, stats)) == [("small", 2)]


@pytest.mark.parametrize(
    ("hot_rows", "message"),
    [
        (-1, "hot_rows is -1 for the tables together, expected an integer between 0 and 43"),
        (44, "hot_rows is 44 for the tables together, expected an integer between 0 and 43"),
        (True, "hot_rows is True for the tables together, expected an integer"),
        (2.0, "hot_rows is 2.0 for the tables together"),
        ("2", "hot_rows is '2' for the tables together"),
        ({"small": -1}, "hot_rows is -1 for table 'small', expected an integer between 0 and 3"),
        ({"small": 4}, "hot_rows is 4 for table 'small', expected an integer between 0 and 3"),
        ({"small": False}, "hot_rows is False for table 'small', .* between 0 and 3"),
        ({"small": 0.5}, "hot_rows is 0.5 for table 'small'"),
        ({"tiny": 1}, r"names table 'tiny', but the tables are \['small', 'large'\]"),
    ],
)
def test_impossible_numbers_are_refused(hot_rows: Any, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        select_hot_rows(ROWS, hot_rows, make_stats(ROWS, {}))


def test_a_total_needs_statistics() -> None:
    with pytest.raises(PlanError, match=r"hot_rows=5 .* there are no statistics; pass stats="):
        select_hot_rows(ROWS, 5)


@pytest.mark.parametrize("hot_rows", [0, 1, {"small": 1}])
def test_statistics_of_another_model_are_refused(hot_rows: Any) -> None:
    other = make_stats({"small": 4, "large": 40}, {})
    with pytest.raises(PlanError, match="'small' has 3 rows in the model, but 4 in the"):
        select_hot_rows(ROWS, hot_rows, other)
