"""Pooling and its gradients against autograd through one-hot matrices."""

from dataclasses import replace
from unittest.mock import patch

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchrec_picasso.ops import segment_reduction
from torchrec_picasso.ops.segment_reduction import (
    PoolingIndex,
    gradient_of_rows,
    gradient_of_weights,
    mean_weights,
    pool_rows,
    sum_by_row,
)


def _index(row_of_lookup: list[int], sizes: list[int], num_rows: int, mean: bool) -> PoolingIndex:
    rows_N = torch.tensor(row_of_lookup, dtype=torch.int64)
    bags_N = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes, dtype=torch.int64))
    lookups_N = torch.argsort(rows_N, stable=True)
    counts_U = torch.bincount(rows_N, minlength=num_rows)
    zero = torch.zeros(1, dtype=torch.int64)
    return PoolingIndex(
        row_of_lookup_N=rows_N,
        bag_offsets_S1=torch.cat([zero, torch.tensor(sizes, dtype=torch.int64).cumsum(0)]),
        bags_by_row_N=bags_N[lookups_N],
        lookups_by_row_N=lookups_N,
        row_offsets_U1=torch.cat([zero, counts_U.cumsum(0)]),
        mean_S=torch.arange(len(sizes)) % 2 == 0 if mean else None,
    )


@settings(max_examples=80, deadline=None, derandomize=True, database=None)
@given(st.data(), st.booleans(), st.booleans())
def test_equals_a_matrix_product(data: st.DataObject, weighted: bool, mean: bool) -> None:
    sizes = data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=6))
    num_rows, num_lookups = data.draw(st.integers(1, 5)), sum(sizes)
    row = st.integers(0, num_rows - 1)
    rows = data.draw(st.lists(row, min_size=num_lookups, max_size=num_lookups))
    index = _index(rows, sizes, num_rows, mean)
    torch.manual_seed(num_lookups)
    rows_UD = torch.randn(num_rows, 3, requires_grad=True)
    weights_N = (torch.rand(num_lookups) + 0.5).requires_grad_() if weighted else None
    upstream_SD = torch.randn(len(sizes), 3)

    scaled_N = mean_weights(weights_N, index.bag_offsets_S1, index.mean_S, index.num_lookups)
    with torch.no_grad():
        pooled_SD = pool_rows(rows_UD, scaled_N, index)
        actual = [gradient_of_rows(upstream_SD, scaled_N, index)]
        with patch.object(segment_reduction, "_PIECE", 2):
            by_piece = replace(index, most_lookups=num_lookups)
            torch.testing.assert_close(gradient_of_rows(upstream_SD, scaled_N, by_piece), actual[0])
    if weights_N is not None:
        grad_N = gradient_of_weights(upstream_SD, rows_UD.detach(), index)
        actual += torch.autograd.grad(scaled_N, weights_N, grad_N)

    ones_N = torch.ones(num_lookups)
    used_N = weights_N if weights_N is not None else ones_N
    member_SN = torch.zeros(len(sizes), num_lookups)
    bags_N = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes, dtype=torch.int64))
    member_SN[bags_N, torch.arange(num_lookups)] = 1.0
    if mean:
        total_S = member_SN @ used_N.detach() + (1e-6 if weighted else 0.0)
        member_SN = torch.where(index.mean_S[:, None], member_SN / total_S[:, None], member_SN)
        member_SN = member_SN.nan_to_num(0.0)
    expected_SD = member_SN @ (used_N[:, None] * rows_UD[index.row_of_lookup_N])

    torch.testing.assert_close(pooled_SD, expected_SD)
    inputs = [rows_UD] + ([weights_N] if weights_N is not None else [])
    expected = torch.autograd.grad(expected_SD, inputs, upstream_SD)
    torch.testing.assert_close(actual, list(expected))


@settings(max_examples=60, deadline=None)
@given(st.data(), st.booleans(), st.booleans(), st.sampled_from([6, 2**32]))
def test_sums_by_row_equal_a_loop(
    data: st.DataObject, weighted: bool, in_bags: bool, num_rows: int
) -> None:
    sizes = data.draw(st.lists(st.integers(0, 4), max_size=6)) if in_bags else None
    num_lookups = sum(sizes) if sizes is not None else data.draw(st.integers(0, 9))
    some = st.sampled_from([*range(5), num_rows - 1])
    rows = data.draw(st.lists(some, min_size=num_lookups, max_size=num_lookups))
    bag_of = [bag for bag, size in enumerate(sizes or ()) for _ in range(size)]
    bag_of = bag_of if sizes is not None else list(range(num_lookups))
    grads_SD = torch.randn(num_lookups if sizes is None else len(sizes), 3)
    weights_N = torch.rand(num_lookups) if weighted and in_bags else None
    expected: dict[int, torch.Tensor] = {}
    for lookup, row in enumerate(rows):
        weight = 1.0 if weights_N is None else weights_N[lookup]
        expected[row] = expected.get(row, torch.zeros(3)) + weight * grads_SD[bag_of[lookup]]
    offsets_S1 = None
    if sizes is not None:
        offsets_S1 = torch.tensor([0, *sizes]).cumsum(0)
    rows_N = torch.tensor(rows, dtype=torch.int64)
    rows_U, sums_UD = sum_by_row(rows_N, grads_SD, num_rows, offsets_S1, weights_N)
    assert sorted(rows_U.tolist()) == sorted(expected)
    for row, found_D in zip(rows_U.tolist(), sums_UD):
        torch.testing.assert_close(found_D, expected[row])


def test_rows_that_are_there_once_stay_as_they_are() -> None:
    grads_SD = torch.randn(3, 2)
    rows_U, sums_UD = sum_by_row(torch.tensor([4, 0, 2]), grads_SD, num_rows=5)
    assert rows_U.tolist() == [4, 0, 2]
    assert sums_UD is grads_SD
