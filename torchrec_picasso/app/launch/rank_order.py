"""Numbers torchrun's ranks by an order of hosts, before the process group is made.

torchrun numbers hosts as they are started, or as they join. Here they get the order of a file, by
host name, so it fits later starts too. The ranks of a host stay neighbours in their own order.
"""

from __future__ import annotations

import datetime
import json
import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from torchrec_picasso.errors import ConfigError

_PREFIX = "picasso/order/"


def agreed_rank(
    store: dist.Store, rank: int, world_size: int, file: str | None, timeout_s: float
) -> int:
    """Returns this rank's number in the order of hosts of a file. Collective.

    Rank 0 decides for all ranks, so a file that is missing or different on some is refused on all.

    Args:
        store: Store that only this start of the job uses.
        rank: Number by torchrun, in the order of starts.
        world_size: Number of ranks.
        file: JSON file of ``torchrec-picasso order``; ``None`` = torchrun's numbers stay.
        timeout_s: Seconds to wait for the other ranks.

    Raises:
        ConfigError: On all ranks, if they have different files, or the hosts are not the file's.
    """
    timeout = datetime.timedelta(seconds=timeout_s)
    store.set(f"{_PREFIX}of/{rank}", json.dumps(describe_rank(file)))
    if rank == 0:
        keys = [f"{_PREFIX}of/{number}" for number in range(world_size)]
        for key in keys:  # one by one, so that a timeout names the rank
            store.wait([key], timeout)
        try:
            answer: dict[str, Any] = {"ranks": new_ranks([json.loads(store.get(k)) for k in keys])}
        except ConfigError as error:
            answer = {"refused": str(error)}
        store.set(f"{_PREFIX}answer", json.dumps(answer))
    store.wait([f"{_PREFIX}answer"], timeout)
    answer = json.loads(store.get(f"{_PREFIX}answer"))
    if "refused" in answer:
        store.set(f"{_PREFIX}read/{rank}", "")
        if rank == 0:  # the store may be this process's, and ends with it
            store.wait([f"{_PREFIX}read/{number}" for number in range(world_size)], timeout)
        raise ConfigError(answer["refused"])
    return answer["ranks"][rank]


def new_ranks(infos_W: Sequence[dict[str, Any]]) -> list[int]:
    """Returns the new number of each rank from its :func:`describe_rank`.

    Raises:
        ConfigError: If a file cannot be read, files differ, or hosts are not those of the file.
    """
    for rank, info in enumerate(infos_W):
        if "problem" in info:
            raise ConfigError(f"--rank-order: rank {rank}: {info['problem']}")
        if info["order"] != infos_W[0]["order"]:
            raise ConfigError(
                f"--rank-order: rank {rank} has {_shown(info['order'])}, rank 0 "
                f"{_shown(infos_W[0]['order'])}; give all ranks the same file"
            )
    order = infos_W[0]["order"]
    if order is None:
        return list(range(len(infos_W)))
    places = host_places(infos_W)
    # of the file or of the job alone
    differing = [host for host in (*order, *places) if host not in order or host not in places]
    if differing:
        raise ConfigError(
            f"--rank-order: the file orders {', '.join(order)}, but this job "
            f"{'has' if differing[0] in places else 'lacks'} {differing[0]}; run `torchrec-picasso "
            "order` on the hosts at hand"
        )
    first_of, size = {}, 0
    for host in order:
        first_of[host] = size
        size += len(places[host])
    return [first_of[info["host"]] + info["place"] for info in infos_W]


def host_places(infos_W: Sequence[dict[str, Any]]) -> dict[str, list[int]]:
    """Returns the ``LOCAL_RANK`` of each host's ranks, by host, from :func:`describe_rank`.

    Raises:
        ConfigError: If hosts have the same name, or a rank has no ``LOCAL_RANK``.
    """
    places: dict[str, list[int]] = {}
    for info in infos_W:
        places.setdefault(info["host"], []).append(info["place"])
    for host, found in places.items():
        if sorted(found) != list(range(len(found))):
            raise ConfigError(
                f"order of hosts: ranks of host {host} have LOCAL_RANK {sorted(found)}, expected 0 "
                f"to {len(found) - 1}; start them with torchrun, and give each host a name of its "
                "own"
            )
    return places


def _shown(order: list[str] | None) -> str:
    return "no order" if order is None else ", ".join(order)


def describe_rank(file: str | None) -> dict[str, Any]:
    """Returns what a rank tells the others: host, number on it, and order of hosts or problem."""
    try:
        order = None if file is None else _read_order(Path(file))
    except (OSError, ValueError) as error:
        return {"problem": f"{file}: {error}"}
    place = int(value) if (value := os.environ.get("LOCAL_RANK", "")).isdecimal() else -1
    return {"host": socket.gethostname(), "place": place, "order": order}


def _read_order(file: Path) -> list[str]:
    content = json.loads(file.read_text(encoding="utf-8"))
    order = content.get("order") if isinstance(content, dict) else None
    if not isinstance(order, list) or not order or not all(isinstance(h, str) for h in order):
        raise ValueError("has no list `order` of host names; write it by `torchrec-picasso order`")
    if len(set(order)) < len(order):
        raise ValueError("names a host twice")
    return order
