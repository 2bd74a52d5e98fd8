"""Packs of one dim share memory, which returns when the last of them is done."""

from __future__ import annotations

import torch

from torchrec_picasso.sharding.row_matrix import RowMatrix, cut_by_pack
from torchrec_picasso.storage.row_buffers import RowBuffers

DIM = 4


def _matrix() -> tuple[RowBuffers, RowMatrix]:
    buffers = RowBuffers(DIM, torch.device("cpu"))
    return buffers, RowMatrix(buffers, [3, 0, 2])


def test_packs_lie_under_each_other_and_sums_start_at_zero() -> None:
    _, matrix = _matrix()
    assert matrix.place_P == [slice(0, 3), slice(3, 3), slice(3, 5)]
    assert matrix.rows.shape == matrix.sums.shape == (5, DIM)
    assert matrix.rows is matrix.rows
    assert not matrix.sums.any()


def test_memory_returns_with_the_last_pack() -> None:
    buffers, matrix = _matrix()
    held = {matrix.rows.data_ptr(), matrix.sums.data_ptr()}
    for _ in range(2):
        matrix.release()
        assert buffers.take(5).data_ptr() not in held
    matrix.release()
    assert {buffers.take(5).data_ptr(), buffers.take(5).data_ptr()} == held


def test_sums_in_used_memory_start_at_zero_too() -> None:
    buffers, matrix = _matrix()
    matrix.sums.fill_(1.0)
    for _ in range(3):
        matrix.release()
    assert not RowMatrix(buffers, [5]).sums.any()


def test_matrices_are_cut_into_their_packs() -> None:
    values_M = [torch.arange(6).view(3, 2), torch.arange(4).view(4, 1)]
    parts = cut_by_pack(values_M, [slice(0, 2), slice(2, 3)], [1, 2, 4])
    assert [part.tolist() for part in parts] == [[[0, 1]], [[2, 3], [4, 5]], [[0], [1], [2], [3]]]
