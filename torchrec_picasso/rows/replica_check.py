"""Checks that replicas are bitwise identical to their home rows; too expensive for every step.

Replicas are equal by construction. A mismatch means faulty memory, a nondeterministic device, or a
write that bypassed torch's version counters (``storage/torchrec_kernel.py``).
"""

from __future__ import annotations

import torch

from torchrec_picasso.errors import PicassoError
from torchrec_picasso.rows.group import RowGroup
from torchrec_picasso.rows.routes.route import Route

__all__ = ["check_replicas"]

_NONE = -1


def check_replicas(group: RowGroup) -> None:
    """Compares the replicas on all ranks with the home rows. Collective: between steps.

    Raises PicassoError on all ranks, which names table, row and ranks of the first mismatch. The
    check is skipped if home rows were written since the replicas were filled. Every rank receives
    all hot rows, weights and optimizer state.
    """
    for route in group.routes:
        if route.hot.num_rows:
            _check_route(route)


def _check_route(route: Route) -> None:
    unlike_P = [storage.differing_homes() for storage in route.storages if storage.num_hot_rows]
    unlike_h = route.hot.ids_H[torch.cat(unlike_P)]
    first = int(unlike_h[0]) if len(unlike_h) else _NONE
    was_written = any(storage.was_written() for storage in route.storages)
    # Three numbers per rank: count of mismatches, packed id of the first one, written or not. All
    # ranks receive (W, 3), so all return or raise together.
    own = unlike_h.new_tensor([len(unlike_h), first, was_written])
    count_W, first_W, written_W = route.ranks.gather(own).t().tolist()
    if any(written_W) or not any(count_W):
        return
    rank = next(rank for rank, count in enumerate(count_W) if count)
    name, row = next(
        (table.name, first_W[rank] - base)
        for table, base, end in route.id_ranges()
        if base <= first_W[rank] < end
    )
    # The message names the home rank too, because either copy may be the faulty one.
    block, _ = route.space.find_blocks(torch.tensor([first_W[rank]], device=route.device))
    home = int(route.space.block_rank_TW[block])
    counts = ", ".join(f"{count} on rank {rank}" for rank, count in enumerate(count_W) if count)
    raise PicassoError(
        f"table {name!r}, row {row}: the replica on rank {rank} is not what its home on rank "
        f"{home} is; {counts} differ. Load the last checkpoint, and look for failing memory or "
        "writes past torch (by numpy, or through a storage)"
    )
