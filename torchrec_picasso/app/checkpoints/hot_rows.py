"""Hot set and access counts of a run, in the folder of a checkpoint; a resumed run continues both.

They are not part of the checkpoint's state: any plan loads that without them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torchrec.distributed.types import ShardingPlan

from torchrec_picasso.app.checkpoints.folder import write_synced
from torchrec_picasso.errors import PicassoError
from torchrec_picasso.placement import FORMS, HotColdParams
from torchrec_picasso.rows.hot_rows import SavedUses

_HOT_ROWS, _USES = "hot_rows.pt", "uses.pt"


def write_hot_rows(checkpoint: Path, hot_rows: Mapping[str, Tensor]) -> None:
    """Writes the hot rows of each table into the folder of a checkpoint. One rank calls this."""
    if hot_rows:
        document = {name: rows.cpu() for name, rows in hot_rows.items()}
        write_synced(checkpoint / _HOT_ROWS, partial(torch.save, document))


def write_uses(checkpoint: Path, saved: SavedUses) -> None:
    """Writes access counts into the folder of a checkpoint. One rank calls this."""
    tables = {name: list(rows_and_uses) for name, rows_and_uses in saved.uses_by_table.items()}
    document = {"batches": float(saved.num_batches), "tables": tables}
    write_synced(checkpoint / _USES, partial(torch.save, document))


def read_hot_rows(checkpoint: Path) -> dict[str, Tensor] | None:
    """Reads the hot rows; ``None`` if the checkpoint has none.

    Raises:
        PicassoError: If the file is damaged.
    """
    path = checkpoint / _HOT_ROWS
    if not path.is_file():
        return None
    hot_rows = _read(path)
    most_rows = path.stat().st_size // 8  # a tensor may claim more than the file holds
    if not isinstance(hot_rows, dict) or not all(
        isinstance(name, str) and _are_rows(rows, most_rows) for name, rows in hot_rows.items()
    ):
        raise _damaged(path)
    return hot_rows


def read_uses(checkpoint: Path) -> SavedUses | None:
    """Reads the access counts; ``None`` if the checkpoint has none.

    Raises:
        PicassoError: If the file is damaged.
    """
    path = checkpoint / _USES
    if not path.is_file():
        return None
    document = _read(path)
    if not isinstance(document, dict) or document.keys() != {"batches", "tables"}:
        raise _damaged(path)
    num_batches, tables = document["batches"], document["tables"]
    if not isinstance(num_batches, float) or not 0 <= num_batches < math.inf:
        raise _damaged(path)
    most_rows = path.stat().st_size // 8
    if not isinstance(tables, dict) or not all(
        isinstance(name, str) and _are_uses(value, most_rows) for name, value in tables.items()
    ):
        raise _damaged(path)
    return SavedUses(
        num_batches=num_batches,
        uses_by_table={name: (rows, uses) for name, (rows, uses) in tables.items()},
    )


def adopt_hot_rows(plan: ShardingPlan, hot_rows: Mapping[str, Tensor]) -> bool:
    """Replaces the hot set of a plan in place, if tables and total number of hot rows fit.

    Args:
        plan: A new plan.
        hot_rows: Hot rows by table.

    Returns:
        Whether they fit; if not, the plan is unchanged.
    """
    sharding_of_table = {
        name: sharding
        for module_plan in plan.plan.values()
        for name, sharding in dict(module_plan).items()
        if isinstance(params := sharding.cache_params, HotColdParams)
        and not FORMS[params.form].sends_bags
    }
    planned = sum(sharding.cache_params.num_hot_rows for sharding in sharding_of_table.values())
    if not hot_rows.keys() <= sharding_of_table.keys() or planned != sum(
        map(len, hot_rows.values())
    ):
        return False
    no_rows = torch.empty(0, dtype=torch.int64)
    for name, sharding in sharding_of_table.items():
        rows = hot_rows.get(name, no_rows)
        sharding.cache_params = replace(sharding.cache_params, hot_rows=rows)
    return True


def _are_rows(rows: object, most_rows: int) -> bool:
    if not isinstance(rows, Tensor) or rows.dtype != torch.int64 or rows.layout != torch.strided:
        return False
    if rows.dim() != 1 or rows.device.type != "cpu" or rows.numel() > most_rows:
        return False
    return not rows.numel() or bool(rows[0] >= 0 and (rows[1:] > rows[:-1]).all())


def _are_uses(rows_and_uses: object, most_rows: int) -> bool:
    if not isinstance(rows_and_uses, list) or len(rows_and_uses) != 2:
        return False
    rows, uses = rows_and_uses
    if not _are_rows(rows, most_rows) or not isinstance(uses, Tensor):
        return False
    if uses.dtype != torch.float32 or uses.layout != torch.strided or uses.shape != rows.shape:
        return False
    return bool((uses.isfinite() & (uses >= 0)).all())


def _read(path: Path) -> object:
    try:
        return torch.load(path, weights_only=True)
    except Exception as error:  # a damaged pickle raises nearly anything
        raise _damaged(path) from error


def _damaged(path: Path) -> PicassoError:
    return PicassoError(
        f"{path}: cannot be read as hot rows; delete the file, then they are chosen again"
    )
