"""Loads a checkpoint into a model; plan and number of ranks may differ from the writer's."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from torchrec_picasso.app.checkpoints.folder import (
    DAMAGED_SUFFIX,
    last_line,
    newest_checkpoint,
    sync_folder,
)
from torchrec_picasso.app.checkpoints.safe_reader import load_safely
from torchrec_picasso.app.checkpoints.sums import damages
from torchrec_picasso.errors import PicassoError

_OTHER_ROW_STATE = re.compile(
    r"Size mismatch between saved torch\.Size\(\[(\d+)\]\) and current: torch\.Size\(\[(\d+)\]\) "
    r"for optim\.state\.(\S+?)\.weight\."
)
"""torch's error for row-wise optimizer state of another number of column shards."""


def newest_undamaged(folder: str | Path, say: Callable[[str], None]) -> Path:
    """Finds the newest complete checkpoint whose files are intact; damaged ones are renamed.

    Collective: every rank of the default process group calls this, and checks some of the files.

    Args:
        folder: Folder of the run's checkpoints.
        say: Called with a line for each checkpoint that is skipped.

    Raises:
        PicassoError: On all ranks, if there is none.
    """
    while True:
        newest, unfinished = _on_first_rank(lambda: newest_checkpoint(folder))
        damaged = _found_damages(newest)
        if not damaged:
            for left in unfinished:
                say(f"passed over {left}: a checkpoint that was not finished")
            return Path(newest)
        renamed = _on_first_rank(partial(_put_aside, newest))
        say(f"passed over {newest}: {', '.join(damaged)}; it is {renamed} now")


def _found_damages(path: Path) -> list[str]:
    """Checks the files of a checkpoint, each rank some of them. Collective."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, damages(path, dist.get_rank(), len(found)))
    return sorted({phrase for phrases in found for phrase in phrases})


def _put_aside(path: Path) -> str:
    """Renames a damaged checkpoint, so its step can be written again; returns the new name."""
    renamed = path.with_name(path.name + DAMAGED_SUFFIX)
    shutil.rmtree(renamed, ignore_errors=True)
    path.replace(renamed)
    sync_folder(path.parent)
    return renamed.name


def load_checkpoint(
    path: Path,
    state: dict[str, Any],
    load_state: Callable[[dict[str, Any]], None],
    *,
    is_checked: bool = False,
) -> int:
    """Loads a checkpoint into a model and its optimizers; returns its number of trained steps.

    Collective: every rank of the default process group calls this, in the same order.

    Args:
        path: A complete checkpoint.
        state: State dicts of the new model; overwritten in place.
        load_state: Called with the loaded state dicts.
        is_checked: Whether the checksums of the files were verified already.

    Raises:
        PicassoError: If the checkpoint is of another model, or damaged.
    """
    if not is_checked and (damaged := _found_damages(path)):
        raise PicassoError(f"{path}: {', '.join(damaged)}; load another checkpoint")
    filled = _without_empty({**state, "step": torch.tensor(0)})
    try:
        load_safely(path, filled)
    except (Exception, dcp.CheckpointException) as error:  # a damaged file raises nearly anything
        reason = last_line(error)
        raise PicassoError(
            f"{path}: cannot be loaded into this model ({reason}); {_advice(reason)}"
        ) from error
    load_state({key: _with_empty(filled.get(key, {}), state[key]) for key in state})
    return int(filled["step"])


def _without_empty(state: Mapping[str, Any]) -> dict[str, Any]:
    """Removes empty nested dicts, such as SGD's state of a table.

    torch writes them on rank 0 alone, so ranks with other tables would not find theirs.
    """
    nested = {
        key: _without_empty(value) if isinstance(value, Mapping) else value
        for key, value in state.items()
    }
    return {key: value for key, value in nested.items() if not _is_empty(value)}


def _is_empty(value: Any) -> bool:
    return isinstance(value, Mapping) and not value


def _with_empty(filled: Any, state: Any) -> Any:
    """Restores the empty dicts that :func:`_without_empty` removed."""
    if not isinstance(state, Mapping):
        return filled
    return {key: _with_empty(filled.get(key, {}), value) for key, value in state.items()}


def _advice(reason: str) -> str:
    """Advice for a checkpoint that does not fit, by torch's error message."""
    rows = _OTHER_ROW_STATE.search(reason)
    if rows is None or rows[1] == rows[2]:
        return "resume with the data, model and optimizer settings it was written with"
    return (
        f"row-wise Adagrad keeps a value per row of each column shard, {rows[1]} in the checkpoint "
        f"and {rows[2]} in this plan, which cannot be converted: cut {rows[3]} into as many column "
        "shards as when it was written"
    )


def _on_first_rank(function: Callable[[], Any]) -> Any:
    """Calls a function on rank 0; every rank returns its result or raises its error. Collective."""
    outcome: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            outcome[0] = function()
        except (PicassoError, OSError) as error:
            outcome[1] = str(error)
    dist.broadcast_object_list(outcome, src=0)
    if outcome[1] is not None:
        raise PicassoError(outcome[1])
    return outcome[0]
