"""The hot set of a run beside its checkpoint: a resumed run goes on with it.

It is no part of the checkpoint's state: any plan loads that without it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from torchrec.distributed.types import ShardingPlan

from torchrec_picasso.errors import PicassoError
from torchrec_picasso.placement import HotColdParams

__all__ = ["adopt_hot_rows", "read_hot_rows", "write_hot_rows"]

_NAME = "hot_rows.pt"


def write_hot_rows(checkpoint: Path, hot_rows: Mapping[str, Tensor]) -> None:
    """Writes the hot rows of each table into the folder of a checkpoint. One rank calls this."""
    if not hot_rows:
        return
    with (checkpoint / _NAME).open("wb") as file:
        torch.save({name: rows.cpu() for name, rows in hot_rows.items()}, file)
        file.flush()
        os.fsync(file.fileno())


def read_hot_rows(checkpoint: Path) -> dict[str, Tensor] | None:
    """Reads them; ``None`` where the checkpoint has none.

    Raises:
        PicassoError: If the file is damaged.
    """
    path = checkpoint / _NAME
    if not path.is_file():
        return None
    try:
        found = torch.load(path, weights_only=True)
    except Exception as error:  # unpickling what is no pickle raises nearly anything
        raise _damaged(path) from error
    most_rows = path.stat().st_size // 8  # a tensor may claim more than the file holds
    if not isinstance(found, dict) or not all(
        isinstance(name, str) and _are_rows(rows, most_rows) for name, rows in found.items()
    ):
        raise _damaged(path)
    return found


def _are_rows(rows: object, most_rows: int) -> bool:
    """Whether something is what :func:`write_hot_rows` wrote of a table."""
    if not isinstance(rows, Tensor) or rows.dtype != torch.int64 or rows.layout != torch.strided:
        return False
    if rows.dim() != 1 or rows.device.type != "cpu" or rows.numel() > most_rows:
        return False
    return not rows.numel() or bool(rows[0] >= 0 and (rows[1:] > rows[:-1]).all())


def _damaged(path: Path) -> PicassoError:
    return PicassoError(
        f"{path}: cannot be read as hot rows; delete the file, then hot rows are chosen anew"
    )


def adopt_hot_rows(plan: ShardingPlan, hot_rows: Mapping[str, Tensor]) -> bool:
    """Puts a hot set into a plan of the same tables and as many hot rows, in place.

    Args:
        plan: Made anew.
        hot_rows: Of each table by name.

    Returns:
        Whether it fits; else the plan stays as it is.
    """
    placed = {
        name: sharding
        for of_module in plan.plan.values()
        for name, sharding in dict(of_module).items()
        if isinstance(sharding.cache_params, HotColdParams) and sharding.cache_params.form == "rows"
    }
    planned = sum(sharding.cache_params.num_hot_rows for sharding in placed.values())
    if not hot_rows.keys() <= placed.keys() or planned != sum(map(len, hot_rows.values())):
        return False
    nothing = torch.empty(0, dtype=torch.int64)
    for name, sharding in placed.items():
        rows = hot_rows.get(name, nothing)
        sharding.cache_params = replace(sharding.cache_params, hot_rows=rows)
    return True
