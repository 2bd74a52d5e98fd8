"""Pooling cut into micro-batches, against pooling each micro-batch's samples alone."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchrec_picasso.ops.bags import Bags
from torchrec_picasso.ops.micro_pooling import cut_pooling, micro_batch_of_lookup
from torchrec_picasso.ops.segment_reduction import gradient_of_rows, pool_rows
from torchrec_picasso.ops.unique import unique_rows

_ROWS = 5
_sizes = st.lists(st.integers(0, 3), min_size=1, max_size=4)
_features = st.lists(st.integers(1, 2), min_size=1, max_size=3)


@settings(max_examples=80, deadline=None, derandomize=True, database=None)
@given(st.data(), _sizes, _features)
def test_equals_each_micro_batch_alone(
    data: st.DataObject, sizes_K: list[int], features_M: list[int]
) -> None:
    # bags[place][sample * features + feature], ids of matrices do not overlap
    bag = st.lists(st.integers(0, _ROWS - 1), max_size=3)
    bags_M = [[data.draw(bag) for _ in range(sum(sizes_K) * features)] for features in features_M]
    lengths = [len(ids) for bags in bags_M for ids in bags]
    ids = [
        place * _ROWS + row
        for place, bags in enumerate(bags_M)
        for in_bag in bags
        for row in in_bag
    ]
    offsets_S1 = torch.tensor([0, *lengths]).cumsum(0)
    bags = Bags(ids_N=torch.tensor(ids, dtype=torch.int32), offsets_S1=offsets_S1, source_N=None)
    rows = unique_rows(bags.ids_N)
    torch.manual_seed(len(ids))
    # in the matrix, here of all its rows; gradients the other way round
    place_U = rows.ids_U.long() % _ROWS
    micro_batch_N = micro_batch_of_lookup(bags, features_M, sizes_K)
    pooling_KM = cut_pooling(
        bags,
        rows,
        micro_batch_N,
        place_U,
        _ROWS - 1 - place_U,
        features_M=features_M,
        sizes_K=sizes_K,
        mean_MF=[None] * len(features_M),
    )
    assert len(pooling_KM) == len(sizes_K)

    next_lookup_M = [
        sum(len(ids) for bags in bags_M[:place] for ids in bags) for place in range(len(features_M))
    ]
    first_sample = 0
    for size, pooling_M in zip(sizes_K, pooling_KM):
        for place, (features, pooling) in enumerate(zip(features_M, pooling_M)):
            own = bags_M[place][first_sample * features : (first_sample + size) * features]
            matrix = torch.randn(_ROWS, 2)
            upstream = torch.randn(len(own), 2)
            expected = [matrix[in_bag].sum(0) for in_bag in own]
            grads = torch.zeros(_ROWS, 2)
            for grad, in_bag in zip(upstream, own):
                for row in in_bag:
                    grads[row] += grad
            num_lookups = sum(map(len, own))

            assert pooling.lookups == slice(
                next_lookup_M[place], next_lookup_M[place] + num_lookups
            )
            next_lookup_M[place] += num_lookups
            used = _ROWS - 1 - pooling.gradient_place_U
            assert sorted(used.tolist()) == sorted({row for bag in own for row in bag})
            pooled = pool_rows(matrix, None, pooling.index)
            torch.testing.assert_close(list(pooled), expected)
            of_rows = gradient_of_rows(upstream, None, pooling.index)
            torch.testing.assert_close(of_rows, grads[used])
        first_sample += size
