"""A copy of a batch is the same, and shares no memory with it."""

from __future__ import annotations

import threading

from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._pytree import tree_leaves

from tests.train_pipeline.batches import assert_same, batches
from torchrec_picasso.batches.members import copy_batch
from torchrec_picasso.batches.split import children_of


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
