"""The laws of merge, coverage and expected_unique; the frame and the summary, by hand."""

import pickle
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given

from tests.frequency.samples import (
    ROWS,
    TwoCollections,
    dense_counts,
    kjt,
    make_stats,
    stats_of,
    table_counts,
)
from torchrec_picasso.errors import PicassoError, PlanError
from torchrec_picasso.frequency import FrequencyStats

STATS = stats_of(ROWS)


@given(STATS, STATS)
def test_merge_adds_counts_and_commutes(one: FrequencyStats, two: FrequencyStats) -> None:
    merged = one.merge(two)
    assert merged == two.merge(one)
    assert (merged.num_batches, merged.num_samples) == (4, 14)
    for name in ROWS:
        total = dense_counts(one.tables[name]) + dense_counts(two.tables[name])
        np.testing.assert_array_equal(dense_counts(merged.tables[name]), total)
        assert (merged.tables[name].rows_U.diff() > 0).all()


@given(STATS, STATS, STATS)
def test_merge_is_associative(a: FrequencyStats, b: FrequencyStats, c: FrequencyStats) -> None:
    assert a.merge(b).merge(c) == a.merge(b.merge(c))


def test_merge_unites_tables() -> None:
    one, two = make_stats({"a": 3}, {"a": {0: 1}}), make_stats({"b": 4}, {"b": {3: 2}})
    merged = one.merge(two)
    assert list(merged.tables) == ["a", "b"]
    assert merged.tables["b"] == two.tables["b"]


def test_merge_refuses_another_model() -> None:
    one, two = make_stats({"a": 3}, {}), make_stats({"a": 4}, {})
    with pytest.raises(PlanError, match="different models: table 'a' has num_embeddings 3 and 4"):
        one.merge(two)
    renamed = FrequencyStats(tables={"a": replace(one.tables["a"], feature_names=("g",))})
    with pytest.raises(PlanError, match=r"table 'a' has feature_names \('f',\) and \('g',\)"):
        one.merge(renamed)


def test_expected_unique_by_hand() -> None:
    stats = make_stats({"a": 4, "one": 9}, {"a": {0: 5, 3: 5}, "one": {2: 7}})
    assert stats.expected_unique("a", 1) == pytest.approx(1)
    assert stats.expected_unique("a", 2) == pytest.approx(14 / 9)  # of 45 pairs, 25 are of both
    assert stats.expected_unique("one", 50) == pytest.approx(1)
    assert stats.expected_unique("one", 0) == 0


def test_frame_is_ordered() -> None:
    stats = make_stats({"z": 9, "none": 2, "a": 9}, {"z": {1: 2, 5: 7, 0: 2}, "a": {3: 1}})
    frame = stats.to_frame()
    assert list(frame.columns) == ["table", "row", "count"]
    assert frame.to_numpy().tolist() == [["z", 5, 7], ["z", 0, 2], ["z", 1, 2], ["a", 3, 1]]
    assert frame.dtypes[["row", "count"]].tolist() == [np.int64, np.int64]
    assert FrequencyStats(tables={}).to_frame().columns.tolist() == list(frame.columns)


def test_pickle() -> None:
    stats = make_stats(ROWS, {"large": {4: 4}})
    assert pickle.loads(pickle.dumps(stats)) == stats


@pytest.mark.parametrize("method", ["coverage", "expected_unique"])
def test_unknown_tables_and_numbers_are_refused(method: str) -> None:
    ask = getattr(make_stats(ROWS, {}), method)
    with pytest.raises(PlanError, match=r"no table 'huge', only \['small', 'large'\]"):
        ask("huge", 1)
    for wrong in (-1, 0.5, True):
        with pytest.raises(PicassoError, match=f"is {wrong}, expected an integer of at least 0"):
            ask("small", wrong)


def collected() -> FrequencyStats:
    """Two samples: table a has lookups 0, 0, 9 and 3; b none; c those of ``shared``."""
    batch = kjt(f0=[[0, 0], []], shared=[[9], [3]], f1=[[], []])
    return FrequencyStats.collect([batch], TwoCollections())


def test_the_summary_has_a_line_per_table() -> None:
    lines = {line["table"]: line for line in collected().summary(batch_size=1).to_dict("records")}
    assert list(lines) == ["a", "b", "c"]
    unique = lines["a"].pop("unique_per_batch")
    assert lines["a"] == {
        "table": "a",
        "rows": 10,
        "features": "f0, shared",
        "lookups": 4,
        "pooling_factor": 2.0,
        "distinct": 3,
        "unseen_mass": 0.5,
        "rows_for_50": 1,
        "rows_for_80": 3,
        "rows_for_90": 3,
        "max_undercount": 0,
    }
    assert unique == pytest.approx(2 - 1 / 6)  # of six pairs of lookups one is of row 0 twice
    assert lines["b"]["lookups"] == lines["b"]["unique_per_batch"] == lines["b"]["rows_for_90"] == 0
    assert lines["b"]["unseen_mass"] == 1


def test_without_samples_each_feature_is_taken_to_have_one_lookup() -> None:
    stats = replace(make_stats({"a": 9}, {"a": {0: 3, 1: 1}}), num_samples=0)
    line = stats.summary(batch_size=2).to_dict("records")[0]
    assert line["pooling_factor"] == 1
    assert line["unique_per_batch"] == pytest.approx(1.5)  # of six pairs three are of both rows


def test_an_empty_batch_has_no_distinct_rows() -> None:
    assert collected().summary(batch_size=0)["unique_per_batch"].tolist() == [0, 0, 0]


@pytest.mark.parametrize("batch_size", [-1, 0.5, True])
def test_a_batch_size_is_a_whole_number(batch_size: Any) -> None:
    with pytest.raises(PicassoError, match=f"batch_size is {batch_size}, expected an integer of"):
        collected().summary(batch_size)


def test_counts_differ_from_other_counts() -> None:
    counts = table_counts(3, {1: 2})
    others = [table_counts(4, {1: 2}), table_counts(3, {1: 3}), table_counts(3, {2: 2}), "a"]
    assert all(counts != other for other in others)
