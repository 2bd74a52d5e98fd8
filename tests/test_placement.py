"""HotColdParams: one order, one identity, and a marker that survives TorchRec's planner."""

import ast
import copy
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torchrec.distributed.types import CacheAlgorithm, CacheParams, ParameterSharding

from torchrec_picasso import HotColdParams, PlanError

PROPERTY = settings(max_examples=100, deadline=None, derandomize=True, database=None)
ROWS = st.lists(st.integers(0, 2**40), unique=True, max_size=20)


@PROPERTY
@given(ROWS)
def test_rows_ascend_as_int64(rows: list[int]) -> None:
    params = HotColdParams(hot_rows=rows)
    assert params.hot_rows.dtype == torch.int64
    assert params.hot_rows.tolist() == sorted(rows)
    assert params.num_hot_rows == len(rows)


@pytest.mark.parametrize(
    "rows",
    [
        (3, 0, 2),
        {0, 2, 3},
        iter([2, 3, 0]),
        torch.tensor([3, 2, 0], dtype=torch.int32),
        torch.tensor([[0, 3, 2]]),
    ],
    ids=["tuple", "set", "iterator", "int32 tensor", "matrix"],
)
def test_any_sequence_of_integers_will_do(rows: object) -> None:
    assert HotColdParams(hot_rows=rows) == HotColdParams(hot_rows=[0, 2, 3])


def test_the_callers_tensor_stays_as_it_is() -> None:
    rows = torch.tensor([3, 1, 2])
    HotColdParams(hot_rows=rows)
    assert rows.tolist() == [3, 1, 2]


def test_long_hot_sets_differ_in_one_row() -> None:
    rows = torch.arange(0, 20_000, 2)
    other = rows.clone()
    other[5000] += 1
    params, changed = HotColdParams(hot_rows=rows), HotColdParams(hot_rows=other)
    assert params != changed
    assert hash(params) != hash(changed)
    assert repr(params) != repr(changed)


@pytest.mark.parametrize("rows", [[], [4, 1], range(1000)], ids=["none", "two", "thousand"])
def test_survives_pickle_and_deepcopy(rows: list[int]) -> None:
    """A plan is broadcast, and the enumerator copies options."""
    sharding = ParameterSharding("row_wise", "fused", cache_params=HotColdParams(hot_rows=rows))
    for twin in (pickle.loads(pickle.dumps(sharding)), copy.deepcopy(sharding)):
        assert isinstance(twin.cache_params, HotColdParams)
        assert isinstance(twin.cache_params, CacheParams)
        assert twin.cache_params == sharding.cache_params
        assert hash(twin.cache_params) == hash(sharding.cache_params)
        assert twin.cache_params.hot_rows is not sharding.cache_params.hot_rows


def test_defaults_do_not_share_a_tensor() -> None:
    assert HotColdParams().num_hot_rows == 0
    assert HotColdParams().hot_rows is not HotColdParams().hot_rows


def settings_apart() -> list[HotColdParams]:
    """Settings that all differ from each other."""
    return [
        HotColdParams(),
        HotColdParams(hot_rows=[1]),
        HotColdParams(hot_rows=[2]),
        HotColdParams(hot_rows=[1, 2]),
        HotColdParams(hot_rows=[1], wave=1),
        HotColdParams(form="bags"),
        HotColdParams(hot_rows=[1], num_micro_batches=1),
        HotColdParams(hot_rows=[1], num_micro_batches=4),
        HotColdParams(load_factor=0.5, hot_rows=[1]),
        HotColdParams(CacheAlgorithm.LFU, hot_rows=[1]),
    ]


def fingerprints() -> list[object]:
    return [params.stable_fingerprint() for params in settings_apart()]


def test_hot_sets_waves_forms_numbers_and_caches_are_told_apart() -> None:
    params, found = settings_apart(), fingerprints()
    assert len(set(found)) == len(set(map(hash, params))) == len(params)
    assert len(set(map(repr, params[:-2]))) == len(params) - 2  # which has no caches
    for i, one in enumerate(params):
        assert [one == other for other in settings_apart()] == [i == k for k in range(len(params))]
        assert pickle.loads(pickle.dumps(one)) == one
        assert one != CacheParams()
    assert found == fingerprints()
    # a plan's cache may be a file that another process reads: text, numbers and nothing else
    assert all(ast.literal_eval(repr(one)) == one for one in found)


def test_the_fingerprint_holds_the_parents_where_it_has_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def parent_key(self: CacheParams) -> tuple[object, ...]:
        return ("cache_params", 1, str(self.algorithm), self.load_factor)

    monkeypatch.setattr(CacheParams, "stable_fingerprint", parent_key, raising=False)
    found = fingerprints()
    assert len(set(found)) == len(found)
    half = HotColdParams(load_factor=0.5, hot_rows=[1])
    assert parent_key(half) in half.stable_fingerprint()
    assert half.stable_fingerprint() != parent_key(half)
    assert (
        half.stable_fingerprint()
        == HotColdParams(load_factor=0.5, hot_rows=[1]).stable_fingerprint()
    )


def test_unknown_forms_hot_bags_and_no_micro_batches_are_refused() -> None:
    with pytest.raises(PlanError, match="form 'columns' is unknown; the forms are 'rows', 'bags'"):
        HotColdParams(form="columns")  # type: ignore[arg-type]
    with pytest.raises(PlanError, match=r"2 hot rows were given with form='bags'.*leave out"):
        HotColdParams(hot_rows=[1, 2], form="bags")
    with pytest.raises(PlanError, match="num_micro_batches is 0; expected at least 1, or None"):
        HotColdParams(num_micro_batches=0)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([4, -1, 2], "hot row -1 is negative; row ids start at 0"),
        ([4, 2, 4], "hot row 4 is named twice; name each hot row once"),
    ],
)
def test_refused_rows(rows: list[int], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        HotColdParams(hot_rows=rows)
