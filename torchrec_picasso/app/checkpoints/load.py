"""Reads a checkpoint into a model, whatever plan and number of ranks wrote it."""

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

from torchrec_picasso.app.checkpoints.folder import DAMAGED_SUFFIX, newest_checkpoint, sync_folder
from torchrec_picasso.app.checkpoints.safe_reader import load_safely
from torchrec_picasso.app.checkpoints.sums import damages
from torchrec_picasso.errors import PicassoError

__all__ = ["load_checkpoint", "newest_undamaged"]

_OTHER_ROW_STATE = re.compile(
    r"Size mismatch between saved torch\.Size\(\[(\d+)\]\) and current: torch\.Size\(\[(\d+)\]\) "
    r"for optim\.state\.(\S+?)\.weight\."
)
"""One value a row on both sides, but of other numbers of rows while the weights are of one size."""


def newest_undamaged(folder: str | Path, say: Callable[[str], None]) -> Path:
    """Finds the checkpoint to resume from; one whose files are damaged loses its name.

    Collective: every rank of the default process group calls this. Each looks at some of the files.

    Args:
        folder: Where a run wrote its checkpoints.
        say: Gets a line for every one that was passed over.

    Returns:
        The newest whole checkpoint whose files are what was written.

    Raises:
        PicassoError: On all ranks, if there is none.
    """
    while True:
        newest, unfinished = _told_by_first_rank(lambda: newest_checkpoint(folder))
        damaged = _found_damages(newest)
        if not damaged:
            for left in unfinished:
                say(f"passed over {left}: a checkpoint that was not finished")
            return Path(newest)
        aside = _told_by_first_rank(partial(_put_aside, newest))
        say(f"passed over {newest}: {', '.join(damaged)}; it is {aside} now")


def _found_damages(path: Path) -> list[str]:
    """What is wrong with the files of a checkpoint, each rank looking at some. Collective."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, damages(path, dist.get_rank(), len(found)))
    return sorted({phrase for of_rank in found for phrase in of_rank})


def _put_aside(path: Path) -> str:
    """Takes a damaged checkpoint its name, so that its step may be written again; gives the new."""
    aside = path.with_name(path.name + DAMAGED_SUFFIX)
    shutil.rmtree(aside, ignore_errors=True)
    path.replace(aside)
    sync_folder(path.parent)
    return aside.name


def load_checkpoint(
    path: Path,
    state: dict[str, Any],
    load_state: Callable[[dict[str, Any]], None],
    *,
    is_checked: bool = False,
) -> int:
    """Reads a checkpoint into a model and its optimizers.

    Collective: every rank of the default process group calls this, in the same order.

    Args:
        path: A whole checkpoint.
        state: State dicts of the freshly built model; overwritten in place.
        load_state: Takes over the filled state dicts.
        is_checked: Whether the files were found to be what was written, just now.

    Returns:
        Steps that the checkpoint had trained.

    Raises:
        PicassoError: If the checkpoint is of another model, or damaged.
    """
    if not is_checked and (damaged := _found_damages(path)):
        raise PicassoError(f"{path}: {', '.join(damaged)}; load another checkpoint")
    filled = _without_empty({**state, "step": torch.tensor(0)})
    try:
        load_safely(path, filled)
    except (
        Exception,
        dcp.CheckpointException,
    ) as error:  # reading a file that is damaged raises nearly anything
        reason = (str(error).strip().splitlines() or [repr(error)])[-1]
        raise PicassoError(
            f"{path}: cannot be loaded into this model ({reason}); {_advice(reason)}"
        ) from error
    load_state({key: _with_empty(filled.get(key, {}), state[key]) for key in state})
    return int(filled["step"])


def _without_empty(state: Mapping[str, Any]) -> dict[str, Any]:
    """Nested dicts without those that hold nothing, such as the state that SGD keeps of a table.

    torch writes them on rank 0 alone, so other ranks, with other tables, would miss theirs.
    """
    nested = {
        key: _without_empty(value) if isinstance(value, Mapping) else value
        for key, value in state.items()
    }
    return {key: value for key, value in nested.items() if not _is_empty(value)}


def _is_empty(value: Any) -> bool:
    return isinstance(value, Mapping) and not value


def _with_empty(filled: Any, state: Any) -> Any:
    """Puts back what :func:`_without_empty` left out."""
    if not isinstance(state, Mapping):
        return filled
    return {key: _with_empty(filled.get(key, {}), value) for key, value in state.items()}


def _advice(reason: str) -> str:
    """What to do about a checkpoint that does not fit, by the words of torch's complaint."""
    rows = _OTHER_ROW_STATE.search(reason)
    if rows is None or rows[1] == rows[2]:
        return "resume with the data, model and optimizer settings it was written with"
    return (
        f"row-wise Adagrad keeps a value per row of each column shard, {rows[1]} in the checkpoint "
        f"and {rows[2]} in this plan, which none of TorchRec's plans can turn into each other: cut "
        f"{rows[3]} into as many column shards as when it was written"
    )


def _told_by_first_rank(question: Callable[[], Any]) -> Any:
    """Rank 0's answer on every rank, or its error, so that no rank goes another way. Collective."""
    answer: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            answer[0] = question()
        except (PicassoError, OSError) as error:
            answer[1] = str(error)
    dist.broadcast_object_list(answer, src=0)
    if answer[1] is not None:
        raise PicassoError(answer[1])
    return answer[0]
