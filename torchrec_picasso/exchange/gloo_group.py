"""Gloo groups with connections of their own, beside those of a process group.

Messages between two ranks of one group share a connection and arrive in start order: a small one
waits for every byte started before. On 1 Gbit/s between 2 ranks, flags took 49 ms behind 5 MB of
rows, 11 ms on a connection of their own, and DDP's sum of dense gradients held the main thread for
105 of 430 ms behind the gradients of rows.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from torchrec_picasso.exchange.gloo_threads import let_training_go_first

__all__ = ["new_gloo_group"]


def new_gloo_group(pg: dist.ProcessGroup, device: torch.device) -> dist.ProcessGroup:
    """Makes a gloo group with the ranks of ``pg`` and its timeout on ``device``. Collective."""
    group = dist.new_group(
        dist.get_process_group_ranks(pg),
        timeout=pg._get_backend(device).options._timeout,
        backend="gloo",
        use_local_synchronization=True,  # ranks of other groups do not call this
    )
    let_training_go_first()  # the group's threads exist by now
    return group
