"""The hot set of a run beside its checkpoint, and what was counted: a resumed run goes on with it.

It is no part of the checkpoint's state: any plan loads that without it.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from torchrec.distributed.types import ShardingPlan

from torchrec_picasso.errors import PicassoError
from torchrec_picasso.placement import HotColdParams

__all__ = ["adopt_hot_rows", "read_hot_rows", "read_uses", "write_hot_rows", "write_uses"]

_NAME, _USES = "hot_rows.pt", "uses.pt"
_BATCHES = "batches"


def write_hot_rows(checkpoint: Path, hot_rows: Mapping[str, Tensor]) -> None:
    """Writes the hot rows of each table into the folder of a checkpoint. One rank calls this."""
    if not hot_rows:
        return
    _write(checkpoint / _NAME, {name: rows.cpu() for name, rows in hot_rows.items()})


def write_uses(
    checkpoint: Path, num_batches: float, of_tables: Mapping[str, tuple[Tensor, Tensor]]
) -> None:
    """Writes how often rows were used into the folder of a checkpoint. One rank calls this.

    Args:
        checkpoint: Its folder.
        num_batches: Batches that were counted, fading.
        of_tables: By table, rows, ascending int64, and their uses, float32.
    """
    tables = {name: list(of_table) for name, of_table in of_tables.items()}
    _write(checkpoint / _USES, {_BATCHES: float(num_batches), "tables": tables})


def read_uses(checkpoint: Path) -> tuple[float, dict[str, tuple[Tensor, Tensor]]] | None:
    """Reads batches and uses; ``None`` where the checkpoint has none.

    Raises:
        PicassoError: If the file is damaged.
    """
    path = checkpoint / _USES
    if not path.is_file():
        return None
    found = _read(path)
    most_rows = path.stat().st_size // 8
    if not isinstance(found, dict) or found.keys() != {_BATCHES, "tables"}:
        raise _damaged(path)
    num_batches, tables = found[_BATCHES], found["tables"]
    if not isinstance(num_batches, float) or not 0 <= num_batches < math.inf:
        raise _damaged(path)
    if not isinstance(tables, dict) or not all(
        isinstance(name, str) and _are_uses(of_table, most_rows)
        for name, of_table in tables.items()
    ):
        raise _damaged(path)
    return num_batches, {name: (rows, uses) for name, (rows, uses) in tables.items()}


def _are_uses(of_table: object, most_rows: int) -> bool:
    """Whether something is what :func:`write_uses` wrote of a table."""
    if not isinstance(of_table, list) or len(of_table) != 2:
        return False
    rows, uses = of_table
    if not _are_rows(rows, most_rows) or not isinstance(uses, Tensor):
        return False
    if uses.dtype != torch.float32 or uses.layout != torch.strided or uses.shape != rows.shape:
        return False
    return bool((uses.isfinite() & (uses >= 0)).all())


def _write(path: Path, document: dict[str, object]) -> None:
    with path.open("wb") as file:
        torch.save(document, file)
        file.flush()
        os.fsync(file.fileno())


def _read(path: Path) -> object:
    try:
        return torch.load(path, weights_only=True)
    except Exception as error:  # unpickling what is no pickle raises nearly anything
        raise _damaged(path) from error


def read_hot_rows(checkpoint: Path) -> dict[str, Tensor] | None:
    """Reads them; ``None`` where the checkpoint has none.

    Raises:
        PicassoError: If the file is damaged.
    """
    path = checkpoint / _NAME
    if not path.is_file():
        return None
    found = _read(path)
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
        f"{path}: cannot be read as hot rows; delete the file, then they are chosen anew"
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
