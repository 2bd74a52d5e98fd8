"""The order of small integers is the stable sort's, for every width of key."""

from __future__ import annotations

import pytest
import torch

from torchrec_picasso.ops.order import stable_order


@pytest.mark.parametrize("num_keys", [1, 9, 256, 257, 40_000])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_is_the_stable_order(num_keys: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(num_keys)
    keys_n = torch.randint(num_keys, (3000,), generator=generator).to(dtype)
    keys_n[:2] = num_keys - 1
    expected_n = sorted(range(3000), key=keys_n.tolist().__getitem__)
    assert stable_order(keys_n, num_keys).tolist() == expected_n


def test_nothing_to_sort() -> None:
    assert stable_order(torch.zeros(0, dtype=torch.int64), 4).shape == (0,)
