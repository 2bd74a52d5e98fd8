"""Packed ids are as wide as they have to be, of rows of any integer type."""

from __future__ import annotations

import torch

from torchrec_picasso.ops.ids import IdSpace, PackedTable

CPU = torch.device("cpu")


def test_ids_widen_when_the_space_does() -> None:
    hot = torch.empty(0, dtype=torch.int64)
    for rows, dtype in ((2**31 - 1, torch.int32), (2**31, torch.int64)):
        table = PackedTable(
            name="t", pack=0, dim=4, block_rows_W=(rows,), hot_rows_H=hot, feature_names=("f",)
        )
        space = IdSpace.build([table], CPU)
        assert space.id_dtype == dtype
        packed_N, _ = space.pack_ids(torch.tensor([rows - 1]), torch.tensor([1]))
        assert packed_N.tolist() == [rows - 1]


def test_any_integer_type_of_rows() -> None:
    hot = torch.tensor([1])
    tables = [
        PackedTable(name=n, pack=0, dim=4, block_rows_W=(2, 1), hot_rows_H=hot, feature_names=(n,))
        for n in "ab"
    ]
    space = IdSpace.build(tables, CPU)
    for dtype in (torch.int16, torch.int32, torch.int64):
        rows_N = torch.tensor([2, torch.iinfo(dtype).max, torch.iinfo(dtype).min, 2], dtype=dtype)
        packed_N, num_outside = space.pack_ids(rows_N, torch.tensor([1, 3]))
        assert num_outside == 2
        assert packed_N.tolist() == [2, 0, 0, 5]
        inside_N, num_outside = space.pack_ids(rows_N[[0, 3]], torch.tensor([1, 1]))
        assert num_outside == 0
        assert inside_N.tolist() == [2, 5]
