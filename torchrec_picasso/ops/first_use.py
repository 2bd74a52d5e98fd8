"""First-use chunks: each row belongs to the first micro-batch that looks it up.

Forward then needs the rows of chunk j not before micro-batch j; with backward running from the last
micro-batch to the first, the gradient of chunk j is complete right after micro-batch j. Every row
still travels once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torchrec_picasso.ops.unique import UniqueRows

__all__ = ["first_use_chunks"]


def first_use_chunks(rows: UniqueRows, micro_batch_N: Tensor, num_chunks: int) -> Tensor:
    """Chunk of every row.

    Args:
        rows: Unique rows of the whole batch.
        micro_batch_N: Micro-batch of each lookup, int64, shape ``(N,)``.
        num_chunks: Micro-batches.

    Returns:
        Lowest micro-batch among each row's lookups, int64, shape ``(U,)``.
    """
    chunk_U = torch.full_like(rows.ids_U, num_chunks - 1, dtype=torch.int64)
    return chunk_U.scatter_reduce_(0, rows.row_of_lookup_N, micro_batch_N, "amin")
