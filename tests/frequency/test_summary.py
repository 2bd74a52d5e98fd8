"""The summary's columns, and questions about one table, by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.frequency.samples import ROWS, TwoCollections, kjt, make_stats
from torchrec_picasso.errors import PicassoError, PlanError
from torchrec_picasso.frequency import FrequencyStats
from torchrec_picasso.frequency.summary import COLUMNS


def collected() -> FrequencyStats:
    """Two samples: table a has lookups 0, 0, 9 and 3; b none; c those of ``shared``."""
    batch = kjt(f0=[[0, 0], []], shared=[[9], [3]], f1=[[], []])
    return FrequencyStats.collect([batch], TwoCollections())


def test_a_line_per_table() -> None:
    frame = collected().summary(batch_size=1)
    assert tuple(frame.columns) == COLUMNS
    lines = {line["table"]: line for line in frame.to_dict("records")}
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


def test_pooling_factors_of_features() -> None:
    stats = collected()
    factors = {name: stats.pooling_factor(name) for name in ("f0", "shared", "f1")}
    assert factors == {"f0": 1.0, "shared": 1.0, "f1": 0.0}


def test_an_unknown_feature_is_named() -> None:
    with pytest.raises(PlanError, match=r"has feature 'f9'; they know \['f0', 'shared', 'f1'"):
        collected().pooling_factor("f9")


def test_distinct_rows_and_unseen_mass() -> None:
    stats = make_stats(ROWS, {"large": {4: 4, 30: 1, 31: 1}})
    assert stats.num_distinct("large") == 3
    assert stats.unseen_mass("large") == pytest.approx(2 / 6)
    assert (stats.num_distinct("small"), stats.unseen_mass("small")) == (0, 1)
    assert stats.spectrum("large").counts_K.tolist() == [4, 1]


@pytest.mark.parametrize("method", ["num_distinct", "unseen_mass", "spectrum"])
def test_an_unknown_table_is_named(method: str) -> None:
    with pytest.raises(PlanError, match=r"no table 'huge'; they know \['small', 'large'\]"):
        getattr(make_stats(ROWS, {}), method)("huge")


@pytest.mark.parametrize("value", [-1, 0.5, True])
def test_cold_rows_are_asked_for_with_whole_numbers(value: Any) -> None:
    stats = make_stats(ROWS, {"large": {4: 4, 30: 1}})
    assert stats.expected_unique_cold("large", 2, 0) == stats.expected_unique("large", 2)
    assert stats.expected_unique_cold("large", 2, 40) == 0
    with pytest.raises(PicassoError, match=f"num_lookups is {value}, expected an integer of at"):
        stats.expected_unique_cold("large", value, 1)
    with pytest.raises(PicassoError, match=f"num_hot is {value}, expected an integer of at least"):
        stats.expected_unique_cold("large", 1, value)
    with pytest.raises(PlanError, match="no table 'huge'"):
        stats.expected_unique_cold("huge", 1, 1)


@pytest.mark.parametrize("factor", [0, -0.5, 1.5, float("nan"), "1"])
def test_a_decay_is_above_zero_and_at_most_one(factor: Any) -> None:
    with pytest.raises(PicassoError, match="expected a number above 0 and at most 1"):
        make_stats(ROWS, {}).decayed(factor)


def test_decayed_statistics_scale_all_their_numbers() -> None:
    stats = make_stats(ROWS, {"large": {4: 4, 30: 1}})
    assert stats.decayed(1) is stats
    half = stats.decayed(0.5)
    assert (half.num_batches, half.num_samples) == (1, 3.5)
    assert half.tables["large"].counts_U.tolist() == [2, 0.5]
    assert half.coverage("large", 1) == stats.coverage("large", 1)
    frame = half.merge(stats).to_frame()
    assert frame.to_numpy().tolist() == [["large", 4, 6.0], ["large", 30, 1.5]]


@pytest.mark.parametrize("value", [0, -1, 1.5, True])
def test_a_memory_budget_is_a_positive_integer(value: Any) -> None:
    stats = make_stats(ROWS, {})
    message = f"max_rows_counted is {value}, expected an integer of at least 1"
    with pytest.raises(PicassoError, match=message):
        stats.merge(stats, max_rows_counted=value)
    with pytest.raises(PicassoError, match=message):
        FrequencyStats.collect([], TwoCollections(), max_rows_counted=value)
