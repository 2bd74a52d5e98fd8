"""Collected counts equal numpy's, and what cannot be counted is refused by name; the laws of merge,
coverage and expected_unique; the frame and the summary, by hand; the laws of hot-set selection,
against a plain sort over all rows."""

import pickle
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torchrec import KeyedJaggedTensor
from torchrec.datasets.utils import Batch

from tests.frequency.samples import (
    ROWS,
    TwoCollections,
    dense_counts,
    kjt,
    make_stats,
    stats_of,
    table_counts,
)
from torchrec_picasso.errors import InputError, PicassoError, PlanError
from torchrec_picasso.frequency import FrequencyStats, select_hot_rows

BAGS = st.lists(st.lists(st.integers(0, 5), max_size=4), min_size=3, max_size=3)
BATCH = st.fixed_dictionaries({"f0": BAGS, "shared": BAGS, "f1": BAGS})
FULL = {"f0": [[0]], "shared": [[9]], "f1": [[1, 1]]}


def ids_of(batches: list[dict[str, list[list[int]]]], *features: str) -> list[int]:
    return [i for b in batches for f in features for bag in b[f] for i in bag]


@given(st.lists(BATCH, max_size=3))
def test_counts_equal_numpys(batches: list[dict[str, list[list[int]]]]) -> None:
    stats = FrequencyStats.collect((kjt(**batch) for batch in batches), TwoCollections())
    assert list(stats.tables) == ["a", "b", "c"]
    for table, features in {"a": ("f0", "shared"), "b": ("f1",), "c": ("shared",)}.items():
        counted = stats.tables[table]
        expected = np.bincount(
            np.array(ids_of(batches, *features), dtype=np.int64), minlength=counted.num_embeddings
        )
        np.testing.assert_array_equal(dense_counts(counted), expected)
        assert counted.num_lookups == expected.sum()
        assert counted.num_rows_seen == np.count_nonzero(expected)
        assert counted.rows_U.dtype == counted.counts_U.dtype == torch.int64
    assert (stats.num_batches, stats.num_samples) == (len(batches), 3 * len(batches))


def test_batches_of_every_kind_count_alike() -> None:
    features = kjt(**FULL, unused=[[99]])
    kinds = [
        features,
        SimpleNamespace(sparse_features=features),
        Batch(dense_features=torch.zeros(1, 1), sparse_features=features, labels=torch.zeros(1)),
    ]
    collected = [FrequencyStats.collect([batch], TwoCollections()) for batch in kinds]
    assert collected[0] == collected[1] == collected[2]
    assert collected[0].tables["a"].rows_U.tolist() == [0, 9]


def test_int32_ids_and_empty_batches() -> None:
    features = kjt(**FULL)
    small = KeyedJaggedTensor(features.keys(), features.values().int(), lengths=features.lengths())
    empty = kjt(f0=[], shared=[], f1=[])
    both = FrequencyStats.collect([small, empty], TwoCollections())
    assert both.tables == FrequencyStats.collect([features], TwoCollections()).tables
    assert (both.num_batches, both.num_samples) == (2, 1)


def test_num_batches_takes_no_more() -> None:
    stream = iter([kjt(**FULL)] * 3)
    assert FrequencyStats.collect(stream, TwoCollections(), num_batches=2).num_batches == 2
    assert len(list(stream)) == 1


@pytest.mark.parametrize("name", ["num_batches", "max_rows_counted"])
@pytest.mark.parametrize("number", [0, -1, 1.5, True])
def test_numbers_must_be_positive_integers(name: str, number: int) -> None:
    with pytest.raises(PicassoError, match=f"{name} is {number}.*at least 1"):
        FrequencyStats.collect([kjt(**FULL)], TwoCollections(), **{name: number})


@pytest.mark.parametrize("wrong", [-1, 10, 2**40])
def test_an_id_outside_its_table_is_refused(wrong: int) -> None:
    batch = kjt(**{**FULL, "f0": [[0, wrong, 9]]})
    with pytest.raises(InputError, match=rf"'f0' holds id {wrong},.*table 'a' are 0\.\.9"):
        FrequencyStats.collect([batch], TwoCollections())


def test_a_missing_feature_is_named() -> None:
    with pytest.raises(InputError, match=r"feature 'f1' of table 'b' .* \['f0', 'shared'\]"):
        FrequencyStats.collect([kjt(f0=[[0]], shared=[[1]])], TwoCollections())


def test_ids_must_be_integers() -> None:
    features = kjt(**FULL)
    floats = KeyedJaggedTensor(list(FULL), features.values().float(), lengths=features.lengths())
    with pytest.raises(InputError, match=r"'f0' of table 'a' holds torch\.float32 values"):
        FrequencyStats.collect([floats], TwoCollections())


def test_a_batch_of_another_kind_is_refused() -> None:
    with pytest.raises(InputError, match="a batch is a dict, expected a KeyedJaggedTensor"):
        FrequencyStats.collect([{"f0": 1}], TwoCollections())


def test_a_model_without_tables_is_refused() -> None:
    with pytest.raises(PlanError, match="Linear contains no EmbeddingBagCollection"):
        FrequencyStats.collect([], nn.Linear(1, 1))


def test_two_tables_of_one_name_are_refused() -> None:
    twice = nn.ModuleDict({"left": TwoCollections(), "right": TwoCollections()})
    with pytest.raises(PlanError, match=r"'a' exists in module 'left\.pooled' and .*'right\.pool"):
        FrequencyStats.collect([], twice)


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
