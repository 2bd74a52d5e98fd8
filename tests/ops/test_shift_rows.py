"""Rows in one numbering against a loop, whether any lies outside its table or none."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torchrec_picasso.ops.ids import shift_rows

TABLES = ((0, 3), (3, 1), (4, 50))
"""First number and rows of each."""


@pytest.mark.parametrize("dtype", [torch.int16, torch.int32, torch.int64])
@pytest.mark.parametrize("result", [torch.int32, torch.int64])
@given(data=st.data(), slack=st.sampled_from([0, 2]))
def test_is_that_of_a_loop(
    dtype: torch.dtype, result: torch.dtype, data: st.DataObject, slack: int
) -> None:
    lookups = [
        data.draw(st.lists(st.integers(-slack, rows - 1 + slack), max_size=6)) for _, rows in TABLES
    ]
    rows_N = torch.tensor([row for of in lookups for row in of], dtype=dtype)
    first_F, limit_F = torch.tensor(TABLES).unbind(1)
    lookups_F = torch.tensor(list(map(len, lookups)))
    shifted_N, num_outside = shift_rows(rows_N, lookups_F, first_F, limit_F, result)
    expected = [
        first + row if 0 <= row < rows else 0
        for (first, rows), of in zip(TABLES, lookups)
        for row in of
    ]
    assert shifted_N.dtype == result
    assert shifted_N.tolist() == expected
    assert int(num_outside) == sum(
        not 0 <= row < rows for (_, rows), of in zip(TABLES, lookups) for row in of
    )
