"""Runs a function on spawned ranks, or on the ranks of torchrun."""

from __future__ import annotations

import argparse
import datetime
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from torchrec_picasso.app.launch.fresh_store import fresh_store
from torchrec_picasso.app.launch.rank_order import agreed_rank
from torchrec_picasso.app.launch.run_ranks import run_ranks
from torchrec_picasso.app.launch.torchrun import under_torchrun
from torchrec_picasso.errors import ConfigError

_TORCHRUN_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def join_torchrun(timeout_s: float, rank_order: str | None) -> torch.device:
    """Initialises the default process group of torchrun's ranks; returns this rank's device.

    Args:
        timeout_s: Timeout of collectives.
        rank_order: File with the order of hosts in which ranks are numbered; ``None`` = torchrun's.

    Raises:
        ConfigError: If torchrun's variables are incomplete, or on all ranks if the order does not
            fit them.
    """
    missing = [name for name in _TORCHRUN_VARIABLES if name not in os.environ]
    if missing:
        raise ConfigError(
            f"RANK is set, as torchrun does, but {', '.join(missing)} is not; start with torchrun, "
            "or unset RANK to let this command spawn its ranks"
        )
    device, backend = torch.device("cpu"), "gloo"
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
        backend = "cpu:gloo,cuda:nccl"
    timeout = datetime.timedelta(seconds=timeout_s)
    store, rank, world_size = next(dist.rendezvous("env://", timeout=timeout))
    store = fresh_store(store, rank, world_size, timeout_s)
    rank = agreed_rank(store, rank, world_size, rank_order, timeout_s)
    os.environ["RANK"] = str(rank)
    dist.init_process_group(
        backend,
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=timeout,
    )
    return device


def run_on_ranks(
    fn: Callable[..., Any], args: argparse.Namespace, *fn_args: Any, timeout_s: float
) -> Any:
    """Runs ``fn(rank, world_size, *fn_args)`` on every rank.

    Args:
        fn: A function at the top level of a module.
        args: Arguments of the command, with ``ranks`` and ``rank_order``.
        *fn_args: Further arguments of ``fn``.
        timeout_s: Seconds until every rank must have returned.

    Returns:
        Rank 0's result; ``None`` on the other ranks of torchrun.

    Raises:
        ConfigError: If torchrun's variables or ``--rank-order`` cannot be used.
        RankError: If a spawned rank fails.
    """
    if not under_torchrun():
        return run_ranks(fn, args.ranks, *fn_args, timeout_s=timeout_s)[0]
    join_torchrun(timeout_s, args.rank_order)
    try:
        result = fn(dist.get_rank(), dist.get_world_size(), *fn_args)
        return result if dist.get_rank() == 0 else None
    finally:
        dist.destroy_process_group()
