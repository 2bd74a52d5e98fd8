"""Linear ids as wide as they have to be, and the hot slots that any rank's batch uses."""

import random
from itertools import pairwise

import numpy as np
import pytest
import torch

from torchrec_picasso.ops.ids import HotSlots, IdSpace, PackedTable, bits_to_words

CPU = torch.device("cpu")


def test_ids_widen_when_the_space_does() -> None:
    hot = torch.empty(0, dtype=torch.int64)
    for rows, dtype in ((2**31 - 1, torch.int32), (2**31, torch.int64)):
        table = PackedTable(
            name="t", pack=0, dim=4, block_rows_W=(rows,), hot_rows_H=hot, feature_names=("f",)
        )
        space = IdSpace.build([table], CPU)
        assert space.id_dtype == dtype
        linear_N, _ = space.linearize(torch.tensor([rows - 1]), torch.tensor([1]))
        assert linear_N.tolist() == [rows - 1]


def test_any_integer_type_of_rows() -> None:
    hot = torch.tensor([1])
    tables = [
        PackedTable(name=n, pack=0, dim=4, block_rows_W=(2, 1), hot_rows_H=hot, feature_names=(n,))
        for n in "ab"
    ]
    space = IdSpace.build(tables, CPU)
    for dtype in (torch.int16, torch.int32, torch.int64):
        rows_N = torch.tensor([2, torch.iinfo(dtype).max, torch.iinfo(dtype).min, 2], dtype=dtype)
        linear_N, num_outside = space.linearize(rows_N, torch.tensor([1, 3]))
        assert num_outside == 2
        assert linear_N.tolist() == [2, 0, 0, 5]
        inside_N, num_outside = space.linearize(rows_N[[0, 3]], torch.tensor([1, 1]))
        assert num_outside == 0
        assert inside_N.tolist() == [2, 5]


@pytest.mark.parametrize("num_hot", [0, 1, 63, 64, 65, 200])
@pytest.mark.parametrize("num_ranks", [1, 3])
def test_the_union_of_all_ranks_slots_is_found_by_pack(num_hot: int, num_ranks: int) -> None:
    rng = random.Random(num_hot)
    touched_WH = torch.tensor(
        [[rng.random() < 0.1 for _ in range(num_hot)] for _ in range(num_ranks)], dtype=torch.bool
    ).view(num_ranks, num_hot)
    bits_WX = np.stack([bits_to_words(mask_H).numpy() for mask_H in touched_WH])
    assert bits_WX.shape == (num_ranks, -(-num_hot // 64))
    union_t = touched_WH.any(0).nonzero().flatten()
    for starts in ((0, num_hot), (0, num_hot // 3, num_hot)):
        found = HotSlots(torch.arange(num_hot), starts).touched(bits_WX)
        for (start, end), touched in zip(pairwise(starts), found, strict=True):
            expected = union_t[(union_t >= start) & (union_t < end)] - start
            assert touched.tolist() == expected.tolist()
