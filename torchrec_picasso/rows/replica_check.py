"""Whether replicas are what their homes are, to the bit: a check that training can afford seldom.

They are by construction. What else could part them is memory that fails, a device that computes
otherwise than another, or somebody's write past torch's version counters (``home_views.py``).
"""

from __future__ import annotations

from itertools import accumulate, pairwise

import torch

from torchrec_picasso.errors import PicassoError
from torchrec_picasso.rows.group import RowGroup

__all__ = ["check_replicas"]

_NONE = -1


def check_replicas(group: RowGroup) -> None:
    """Compares the replicas on all ranks with the homes. Collective: between steps.

    Args:
        group: The tables of one module, or of several.

    Where a home was written since the replicas were filled, there is nothing to compare.

    Raises:
        PicassoError: On all ranks; names table, row and ranks of the first that differs.

    Cost:
        Every rank receives all hot rows, weights and optimizer state.
    """
    if not group.hot.num_rows:
        return
    unlike_P = [storage.unlike_homes() for storage in group.row_storages if storage.num_hot_rows]
    unlike_h = group.hot.ids_H[torch.cat(unlike_P)]
    first = int(unlike_h[0]) if len(unlike_h) else _NONE
    mine = unlike_h.new_tensor([len(unlike_h), first, group.was_written()])
    count_W, first_W, written_W = group.ranks.gather(mine).t().tolist()
    if any(written_W) or not any(count_W):
        return
    rank = next(rank for rank, count in enumerate(count_W) if count)
    table, row = _row_of(group, first_W[rank])
    block, _ = group.space.find_blocks(torch.tensor([first_W[rank]], device=group.device))
    home = int(group.space.block_rank_TW[block])
    counts = ", ".join(f"{count} on rank {rank}" for rank, count in enumerate(count_W) if count)
    raise PicassoError(
        f"table {table!r}, row {row}: the replica on rank {rank} is not what its home on rank "
        f"{home} is; {counts} differ. Load the last checkpoint, and look for failing memory or "
        "writes past torch (by numpy, or through a storage)"
    )


def _row_of(group: RowGroup, packed_id: int) -> tuple[str, int]:
    """Table and row of a packed id."""
    of_rows = [table for table in group.tables if not table.as_bags]
    bases = accumulate((table.num_embeddings for table in of_rows), initial=0)
    return next(
        (table.name, packed_id - start)
        for table, (start, end) in zip(of_rows, pairwise(bases))
        if start <= packed_id < end
    )
