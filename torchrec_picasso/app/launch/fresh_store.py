"""A part of a store that no earlier start of the same job has written to.

torchrun keeps one store over its restarts. What ranks of an earlier start wrote there, such as the
addresses by which gloo connects, is then read by those of the next: they connect to ranks that are
gone, and fail or hang. Counts of restarts differ between hosts, so the ranks agree on a name here.
"""

from __future__ import annotations

import datetime
import time
import uuid

import torch.distributed as dist

__all__ = ["fresh_store"]

_PREFIX = "picasso/start/"
_POLL_S = 0.02


def fresh_store(store: dist.Store, rank: int, world_size: int, timeout_s: float) -> dist.Store:
    """Gives a part of a store of its own to the ranks that call this together. Collective.

    Args:
        store: Shared by the ranks, with whatever is in it.
        rank: This rank.
        world_size: Ranks.
        timeout_s: How long to wait for the others.

    Raises:
        RuntimeError: If they do not come.
    """
    if rank == 0:
        return dist.PrefixStore(_welcome(store, world_size, timeout_s), store)
    mine = uuid.uuid4().hex
    store.set(f"{_PREFIX}hello/{rank}", mine)
    store.wait([f"{_PREFIX}welcome/{mine}"], datetime.timedelta(seconds=timeout_s))
    name = store.get(f"{_PREFIX}welcome/{mine}").decode()
    store.set(f"{_PREFIX}here/{name}/{rank}", "")
    return dist.PrefixStore(name, store)


def _welcome(store: dist.Store, world_size: int, timeout_s: float) -> str:
    """Tells a new name to every rank that says hello, until all of this start have taken it."""
    name = uuid.uuid4().hex
    missing = set(range(1, world_size))
    answered: dict[int, bytes] = {}
    until_s = time.monotonic() + timeout_s
    while missing:
        for rank in sorted(missing):
            if store.check([f"{_PREFIX}here/{name}/{rank}"]):
                missing.remove(rank)
            elif store.check([f"{_PREFIX}hello/{rank}"]):
                hello = store.get(f"{_PREFIX}hello/{rank}")
                if answered.get(rank) != hello:  # the first may be of an earlier start
                    store.set(f"{_PREFIX}welcome/{hello.decode()}", name)
                    answered[rank] = hello
        if missing and time.monotonic() > until_s:
            raise RuntimeError(f"ranks {sorted(missing)} did not join within {timeout_s:g} s")
        time.sleep(_POLL_S if missing else 0)
    return name
