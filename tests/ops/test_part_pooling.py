"""Pooling cut into parts, against pooling each part's samples alone."""

from __future__ import annotations

from itertools import accumulate, pairwise

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchrec_picasso.ops.bags import Bags
from torchrec_picasso.ops.part_pooling import count_lookups, cut_pooling, part_of_lookup
from torchrec_picasso.ops.request_order import LocatedRows
from torchrec_picasso.ops.segment_reduction import gradient_of_rows, pool_rows
from torchrec_picasso.ops.unique import unique_rows

_ROWS = 5
_sizes = st.lists(st.integers(0, 3), min_size=1, max_size=4)
_features = st.lists(st.integers(1, 2), min_size=1, max_size=3)


@settings(max_examples=80, deadline=None, derandomize=True, database=None)
@given(st.data(), _sizes, _features)
def test_equals_each_part_alone(
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
    matrices = range(len(features_M))
    # request order is, by pack, the order of ids turned round
    used_M = [[r % _ROWS for r in rows.ids_U.tolist() if r // _ROWS == m] for m in matrices]
    rows_M = list(map(len, used_M))
    ends = [0, *accumulate(rows_M)]
    order = [i for start, end in pairwise(ends) for i in reversed(range(start, end))]
    order_U = torch.tensor(order, dtype=torch.int64)
    located = LocatedRows(
        target_U=order_U,
        counts_PQ=order_U,
        order_U=order_U,
        position_U=order_U.argsort(),
        touched_H=order_U,
    )
    bags_MK = [[features * size for size in sizes_K] for features in features_M]
    lookups_J = count_lookups(bags, [num for bags_K in bags_MK for num in bags_K])
    num_parts = len(sizes_K)
    part_J = [*range(num_parts)] * len(features_M)
    several = num_parts > 1
    pooling_KM = cut_pooling(
        bags,
        rows,
        located,
        torch.arange(len(rows.ids_U)),  # fetched in the order of ids
        part_N=part_of_lookup(lookups_J, part_J, len(ids)) if several else None,
        bags_MK=bags_MK,
        lookups_MK=lookups_J.view(-1, num_parts).tolist(),
        rows_M=rows_M,
        mean_MK=[[None] * num_parts for _ in features_M],
        is_sequence_M=[False for _ in features_M],
    )
    assert len(pooling_KM) == len(sizes_K)

    next_lookup_M = [
        sum(len(ids) for bags in bags_M[:place] for ids in bags) for place in range(len(features_M))
    ]
    first_sample = 0
    for size, pooling_M in zip(sizes_K, pooling_KM):
        for place, (features, pooling) in enumerate(zip(features_M, pooling_M)):
            own = bags_M[place][first_sample * features : (first_sample + size) * features]
            table = torch.randn(_ROWS, 2)
            matrix = table[used_M[place]]
            upstream = torch.randn(len(own), 2)
            expected = [table[in_bag].sum(0) for in_bag in own]
            grads = torch.zeros(_ROWS, 2)
            for grad, in_bag in zip(upstream, own):
                for row in in_bag:
                    grads[row] += grad
            num_lookups = sum(map(len, own))

            assert pooling.lookups == slice(
                next_lookup_M[place], next_lookup_M[place] + num_lookups
            )
            next_lookup_M[place] += num_lookups
            in_request_order = torch.tensor(used_M[place], dtype=torch.int64).flip(0)
            used = in_request_order
            if several:
                used = in_request_order[pooling.gradient_position_U]
            assert sorted(used.tolist()) == sorted({row for bag in own for row in bag})
            pooled = pool_rows(matrix, None, pooling.index)
            torch.testing.assert_close(list(pooled), expected)
            of_rows = gradient_of_rows(upstream, None, pooling.index)
            torch.testing.assert_close(of_rows, grads[used])
        first_sample += size
