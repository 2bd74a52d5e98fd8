"""A prefix of a store that no earlier start of the same job has written to.

torchrun keeps one store over its restarts, so ranks would read addresses that gloo wrote for ranks
of an earlier start, and fail or hang. Restart counts differ between hosts, so the ranks agree on a
random prefix here.
"""

from __future__ import annotations

import datetime
import time
import uuid

import torch.distributed as dist

_PREFIX = "picasso/start/"
_POLL_S = 0.02


def fresh_store(store: dist.Store, rank: int, world_size: int, timeout_s: float) -> dist.Store:
    """Returns a store with a prefix that only this start of the job uses. Collective.

    Args:
        store: Store of all starts.
        rank: This rank.
        world_size: Number of ranks.
        timeout_s: Seconds to wait for the other ranks.

    Raises:
        RuntimeError: If a rank does not join in time.
    """
    if rank == 0:
        return dist.PrefixStore(_welcome(store, world_size, timeout_s), store)
    token = uuid.uuid4().hex
    store.set(f"{_PREFIX}hello/{rank}", token)
    store.wait([f"{_PREFIX}welcome/{token}"], datetime.timedelta(seconds=timeout_s))
    name = store.get(f"{_PREFIX}welcome/{token}").decode()
    store.set(f"{_PREFIX}here/{name}/{rank}", "")
    return dist.PrefixStore(name, store)


def _welcome(store: dist.Store, world_size: int, timeout_s: float) -> str:
    """Answers every hello with a new prefix, until all ranks of this start have confirmed it."""
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
                if answered.get(rank) != hello:  # a hello may be left from an earlier start
                    store.set(f"{_PREFIX}welcome/{hello.decode()}", name)
                    answered[rank] = hello
        if missing and time.monotonic() > until_s:
            raise RuntimeError(f"ranks {sorted(missing)} did not join within {timeout_s:g} s")
        time.sleep(_POLL_S if missing else 0)
    return name
