"""Memory that was given back is used again, and only then."""

import torch

from torchrec_picasso.rows.group import RowBuffers


def test_given_back_memory_is_used_again_also_by_a_smaller_matrix() -> None:
    buffers = RowBuffers(4, torch.device("cpu"))
    first = buffers.take(100)
    assert first.shape == (100, 4)
    address = first.data_ptr()
    buffers.release(first)
    again = buffers.take(90)
    assert again.shape == (90, 4)
    assert again.data_ptr() == address
