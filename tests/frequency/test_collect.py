"""Collected counts equal numpy's, and what cannot be counted is refused by name."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torchrec import KeyedJaggedTensor
from torchrec.datasets.utils import Batch

from tests.frequency.samples import TwoCollections, dense_counts, kjt
from torchrec_picasso.errors import InputError, PicassoError, PlanError
from torchrec_picasso.frequency import FrequencyStats

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
    floats = KeyedJaggedTensor(
        features.keys(), features.values().float(), lengths=features.lengths()
    )
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
