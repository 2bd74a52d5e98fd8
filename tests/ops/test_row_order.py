"""Sorted as Python sorts, for every width of key, by vector words and without them."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torchrec_picasso.ops import row_order
from torchrec_picasso.ops.row_order import nonzero_indices, sort_with_tags, stable_order

DTYPES = (torch.int32, torch.int64)  # the second does not fit into a word with its place


@pytest.mark.parametrize("num_keys", [1, 9, 256, 257, 40_000])
@pytest.mark.parametrize("dtype", DTYPES)
def test_is_the_stable_order(num_keys: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(num_keys)
    keys_n = torch.randint(num_keys, (3000,), generator=generator).to(dtype)
    keys_n[:2] = num_keys - 1
    expected_n = sorted(range(3000), key=keys_n.tolist().__getitem__)
    assert stable_order(keys_n, num_keys).tolist() == expected_n


@pytest.mark.parametrize("dtype", DTYPES)
@given(keys=st.lists(st.one_of(st.integers(0, 5), st.integers(0, 2**31 - 1))))
def test_keys_carry_their_places(dtype: torch.dtype, keys: list[int]) -> None:
    keys_N = torch.tensor(keys, dtype=dtype)
    sorted_N, places_N = sort_with_tags(keys_N)
    assert (sorted_N.dtype, places_N.dtype) == (dtype, torch.int64)
    expected = sorted((key, place) for place, key in enumerate(keys))
    assert list(zip(sorted_N.tolist(), places_N.tolist())) == expected
    assert keys_N.tolist() == keys  # untouched


@pytest.mark.parametrize("dtype", DTYPES)
@given(counts=st.lists(st.integers(0, 4), min_size=1), data=st.data())
def test_keys_carry_tags(dtype: torch.dtype, counts: list[int], data: st.DataObject) -> None:
    tags = [tag for tag, count in enumerate(counts) for _ in range(count)]
    keys = data.draw(st.lists(st.integers(0, 3), min_size=len(tags), max_size=len(tags)))
    keys_N, tags_N = torch.tensor(keys, dtype=dtype), torch.tensor(tags, dtype=torch.int64)
    found = sort_with_tags(keys_N, tags_N)
    assert list(zip(*(of.tolist() for of in found))) == sorted(zip(keys, tags))


@pytest.mark.parametrize("is_intel", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_tags", [True, False])
def test_many_keys_are_sorted_alike_on_every_processor(
    is_intel: bool, dtype: torch.dtype, with_tags: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_order, "is_intel", lambda: is_intel)
    generator = torch.Generator().manual_seed(0)
    keys_N = torch.randint(5_000, (row_order._LEAST_RADIX + 7,), generator=generator).to(dtype)
    tags_N = torch.arange(len(keys_N)) // 3 if with_tags else None
    sorted_N, found_N = sort_with_tags(keys_N, tags_N)
    tags = range(len(keys_N)) if tags_N is None else tags_N.tolist()
    assert list(zip(sorted_N.tolist(), found_N.tolist())) == sorted(zip(keys_N.tolist(), tags))


@given(st.lists(st.booleans()))
def test_places_of_a_mask(mask: list[bool]) -> None:
    places_N = nonzero_indices(torch.tensor(mask, dtype=torch.bool))
    assert places_N.dtype == torch.int64
    assert places_N.tolist() == [place for place, is_it in enumerate(mask) if is_it]
