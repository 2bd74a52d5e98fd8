"""What a container holds beside its fields is part of the batch, or is made of its fields.

Copies share no memory with what they copy.
"""

import dataclasses
import functools
import threading
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._pytree import tree_leaves

from tests.train_pipeline.batches import Frozen, Open, Pair, assert_same, batches, kjt_of
from torchrec_picasso.batches.join import join_outputs
from torchrec_picasso.batches.members import copy_batch
from torchrec_picasso.batches.split import children_of, split_batch
from torchrec_picasso.errors import CompatError


class _Labels(dict):  # a container that takes attributes too
    pass


class _Pair(Pair):
    pass


@dataclasses.dataclass
class _Derived:
    labels: torch.Tensor
    total: torch.Tensor = dataclasses.field(init=False)
    features: Any = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.total = self.labels.sum().view(1)  # one number, however many samples
        self.features = kjt_of({"f": [[int(label)] for label in self.labels]})
        self.doubled = self.labels * 2
        self.array = self.labels.numpy()

    @functools.cached_property
    def count(self) -> int:
        return len(self.labels)


@pytest.mark.parametrize(
    "batch",
    [
        Open(torch.arange(5)),
        Frozen(torch.arange(5), None),
        _Labels(x=torch.arange(5)),
        _Pair(torch.arange(5), 1),
    ],
)
def test_attributes_that_were_assigned_are_cut_as_fields_are(batch: Any) -> None:
    weights, owners = torch.rand(5), kjt_of({"owner": [[1], [], [2, 3], [4], [5]]})
    for name, value in {"weights": weights, "more": [owners, "name"]}.items():
        object.__setattr__(batch, name, value)
    parts = split_batch(batch, [2, 3])
    assert [type(part) for part in parts] == [type(batch)] * 2
    assert torch.equal(torch.cat([part.weights for part in parts]), weights)
    assert [part.more[0].stride() for part in parts] == [2, 3]
    assert parts[1].more[1] == "name"
    assert torch.equal(copy_batch(batch).weights, weights)
    assert torch.equal(join_outputs(parts, [2, 3]).weights, weights)
    batch.__dict__["more"] = np.zeros(5)
    with pytest.raises(CompatError, match=r"batch\.more: do not know how to cut ndarray"):
        split_batch(batch, [2, 3])


def test_what_a_constructor_makes_is_made_again_unless_somebody_changed_it() -> None:
    batch = _Derived(torch.arange(4))
    assert batch.count == 4
    first, second = split_batch(batch, [1, 3])
    assert (first.total, second.total) == (0, 6)
    assert (first.count, second.count) == (1, 3)
    assert second.array.tolist() == [1, 2, 3]
    batch.doubled = torch.arange(10, 14)
    batch.features = kjt_of({"f": [[9]] * 4})
    first, second = split_batch(batch, [1, 3])
    assert second.doubled.tolist() == [11, 12, 13]
    assert second.features.values().tolist() == [9, 9, 9]
    assert (first.total, second.total) == (0, 6)


@given(st.integers(0, 3).flatmap(batches))
def test_a_copy_is_the_same(batch: object) -> None:
    assert_same(copy_batch(batch), batch)


@given(st.integers(1, 3).flatmap(batches))
def test_a_copy_shares_nothing(batch: object) -> None:
    before, after = _memory(batch), _memory(copy_batch(batch))
    assert not before & after


def _memory(value: object) -> set[int]:
    members = children_of(value)
    if members is not None:
        return {place for _, member in members for place in _memory(member)}
    tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor) and leaf.numel()]
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}


def test_what_cannot_be_copied_stays() -> None:
    lock = threading.Lock()
    assert copy_batch([lock]) == [lock]
