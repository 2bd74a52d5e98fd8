"""Jagged sequences as padded tensors of a fixed length.

Fixed, because a length that depends on the batch's longest list would make a model depend on which
samples share a batch.

Shape letters: B samples, D dim, N lookups.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import JaggedTensor

__all__ = ["mask_of", "padded"]


def padded(sequences: JaggedTensor, max_length: int) -> Tensor:
    """The first positions of each sequence, zeros behind its end.

    Args:
        sequences: Values of shape ``(N, D)`` in B lists.
        max_length: Positions; what is longer loses its end.

    Returns:
        Shape ``(B, max_length, D)``.
    """
    dense: Tensor = torch.ops.fbgemm.jagged_2d_to_dense(
        sequences.values(), sequences.offsets().long(), max_length
    )
    return dense


def mask_of(sequences: JaggedTensor, max_length: int) -> Tensor:
    """Where :func:`padded` holds values.

    Args:
        sequences: B lists.
        max_length: Positions.

    Returns:
        True at positions of the sequence, shape ``(B, max_length)``.
    """
    lengths_B = sequences.lengths()
    positions = torch.arange(max_length, device=lengths_B.device)
    return positions < lengths_B[:, None]
