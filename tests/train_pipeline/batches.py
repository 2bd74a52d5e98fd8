"""Batches of every type that can be cut, and what it means that two of them are the same."""

import dataclasses
from typing import Any, NamedTuple

import torch
from hypothesis import strategies as st
from torch import Tensor
from torchrec import JaggedTensor, KeyedJaggedTensor, KeyedTensor

Bag = list[int]


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclasses.dataclass(frozen=True)
class Frozen:
    features: Any
    label: Any


@dataclasses.dataclass
class Open:
    features: Any
    name: str = "open"


def kjt_of(
    bags: dict[str, list[Bag]],
    weighted: bool = False,
    id_dtype: torch.dtype = torch.int64,
    length_dtype: torch.dtype = torch.int32,
) -> KeyedJaggedTensor:
    """Built from Python lists; the weight of id i is i / 4."""
    ids = [row for bags_S in bags.values() for bag in bags_S for row in bag]
    lengths = [len(bag) for bags_S in bags.values() for bag in bags_S]
    return KeyedJaggedTensor(
        keys=list(bags),
        values=torch.tensor(ids, dtype=id_dtype),
        weights=torch.tensor([row / 4 for row in ids]) if weighted else None,
        lengths=torch.tensor(lengths, dtype=length_dtype),
        stride=len(next(iter(bags.values()))),
    )


sizes_of_parts = st.lists(st.integers(0, 3), min_size=1, max_size=5)
"""Sizes of micro-batches, some or all of them 0."""


def bags_of(num_samples: int) -> st.SearchStrategy[dict[str, list[Bag]]]:
    """One to four features, some bags empty."""
    bag = st.lists(st.integers(0, 99), max_size=4)
    bags = st.lists(bag, min_size=num_samples, max_size=num_samples)
    return st.dictionaries(st.sampled_from("abcd"), bags, min_size=1)


def kjts(num_samples: int) -> st.SearchStrategy[KeyedJaggedTensor]:
    integers = st.sampled_from([torch.int32, torch.int64])
    return st.builds(kjt_of, bags_of(num_samples), st.booleans(), integers, integers)


def batches(num_samples: int) -> st.SearchStrategy[Any]:
    """Nested containers of everything that has samples, and of things that have none."""
    leaves = st.one_of(
        kjts(num_samples),
        kjts(num_samples).map(lambda kjt: kjt[kjt.keys()[0]]),
        st.lists(st.integers(0, 3), max_size=2).map(lambda shape: torch.rand(num_samples, *shape)),
        st.just(torch.arange(num_samples)),
        st.just(KeyedTensor(["x", "y"], [1, 2], torch.arange(num_samples * 3).view(-1, 3))),
        st.just(torch.tensor(0.5)),
        st.just(torch.tensor(7)),
        st.sampled_from([None, "name", 3, 2.5, True, torch.float32]),
    )
    return st.recursive(leaves, _containers, max_leaves=6)


def _containers(members: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(
        st.lists(members, max_size=3),
        st.lists(members, max_size=3).map(tuple),
        st.dictionaries(st.one_of(st.sampled_from("xy"), st.integers(0, 2)), members),
        st.builds(Pair, members, members),
        st.builds(Frozen, members, members),
        st.builds(Open, members),
    )


def assert_same(found: Any, expected: Any) -> None:
    """Same types all the way down, same values to the bit, same dtypes and shapes."""
    assert type(found) is type(expected)
    if isinstance(expected, KeyedJaggedTensor):
        assert found.keys() == expected.keys()
        assert found.stride() == expected.stride()
        assert found.length_per_key() == expected.length_per_key()
        _assert_same_jagged(found, expected)
    elif isinstance(expected, JaggedTensor):
        _assert_same_jagged(found, expected)
    elif isinstance(expected, KeyedTensor):
        assert found.keys() == expected.keys()
        assert found.length_per_key() == expected.length_per_key()
        assert_same(found.values(), expected.values())
    elif isinstance(expected, Tensor):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
    elif dataclasses.is_dataclass(expected):
        assert_same(vars(found), vars(expected))
    elif isinstance(expected, dict):
        assert list(found) == list(expected)
        assert_same(list(found.values()), list(expected.values()))
    elif isinstance(expected, (tuple, list)):
        assert len(found) == len(expected)
        for one, other in zip(found, expected):
            assert_same(one, other)
    else:
        assert found == expected


def _assert_same_jagged(found: Any, expected: Any) -> None:
    assert_same(found.values(), expected.values())
    assert_same(found.weights_or_none(), expected.weights_or_none())
    assert_same(found.lengths(), expected.lengths())
    assert found.values().is_contiguous()
    assert found.lengths().is_contiguous()
