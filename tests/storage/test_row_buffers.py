"""Memory that was given back is used again, and only then."""

from __future__ import annotations

import torch

from torchrec_picasso.storage.row_buffers import RowBuffers


def test_given_back_memory_is_used_again_also_by_a_smaller_matrix() -> None:
    buffers = RowBuffers(4, torch.device("cpu"))
    first = buffers.take(100)
    assert first.shape == (100, 4)
    address = first.data_ptr()
    buffers.release(first)
    again = buffers.take(90)
    assert again.shape == (90, 4)
    assert again.data_ptr() == address


def test_memory_in_use_is_not_given_out() -> None:
    buffers = RowBuffers(4, torch.device("cpu"))
    first, second = buffers.take(10), buffers.take(10)
    first.fill_(1.0)
    second.fill_(2.0)
    assert bool((first == 1.0).all())


def test_a_larger_matrix_gets_fresh_memory() -> None:
    buffers = RowBuffers(4, torch.device("cpu"))
    buffers.release(buffers.take(10))
    assert buffers.take(1000).shape == (1000, 4)
    assert buffers.take(0).shape == (0, 4)
