"""Whole checkpoints or none: written aside, renamed when every rank is done.

A folder ``step_00000100`` exists only if its checkpoint is complete; ``step_00000100.tmp`` is one
that a run did not finish. The format is torch.distributed.checkpoint's. All ranks must see the same
file system. What becomes of old ones is up to :mod:`torchrec_picasso.runs.old_checkpoints`.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from torchrec_picasso.errors import PicassoError

__all__ = [
    "save_checkpoint",
    "begin_checkpoint",
    "finish_checkpoint",
    "whole_name",
    "newest_checkpoint",
    "load_checkpoint",
    "refuse_used_folder",
    "UNFINISHED_SUFFIX",
    "is_whole",
    "holds_checkpoint",
    "step_of",
    "sync_folder",
]

UNFINISHED_SUFFIX = ".tmp"
"""Behind the name of a checkpoint that is being written."""

_STEP_NAME = re.compile(r"step_(\d{8,})")
_DCP_METADATA = ".metadata"
_OTHER_ROW_STATE = re.compile(
    r"Size mismatch between saved torch\.Size\(\[(\d+)\]\) and current: torch\.Size\(\[(\d+)\]\) "
    r"for optim\.state\.(\S+?)\.weight\."
)
"""One value a row on both sides, but of other numbers of rows while the weights are of one size."""


def save_checkpoint(
    folder: str | Path,
    step: int,
    state: dict[str, Any],
    beside: Callable[[Path], None] | None = None,
) -> Path:
    """Writes one checkpoint.

    Collective: every rank of the default process group calls this, in the same order.

    Args:
        folder: Holds all checkpoints of a run; made if missing.
        step: Steps trained so far.
        state: State dicts, sharded as they are in the model.
        beside: Writes what else belongs there; called on rank 0 with the folder.

    Returns:
        The folder of the finished checkpoint.

    Raises:
        PicassoError: If that step has a checkpoint already.
    """
    unfinished = begin_checkpoint(folder, step)
    if beside is not None and dist.get_rank() == 0:
        beside(unfinished)
    dcp.save({**state, "step": torch.tensor(step)}, checkpoint_id=str(unfinished))
    dist.barrier()  # every rank's files are written
    final = finish_checkpoint(unfinished) if dist.get_rank() == 0 else whole_name(unfinished)
    dist.barrier()  # nobody goes on before the name stands
    return final


def begin_checkpoint(folder: str | Path, step: int) -> Path:
    """Makes the folder that a checkpoint is written into, to be finished later. Collective.

    Raises:
        PicassoError: If that step has a checkpoint already.
    """
    final = Path(folder) / f"step_{step:08d}"
    unfinished = final.with_name(final.name + UNFINISHED_SUFFIX)
    if _told_by_first_rank(final.exists):
        raise PicassoError(
            f"{final}: a checkpoint of step {step} exists already; choose another folder or move it"
        )
    if dist.get_rank() == 0:
        shutil.rmtree(unfinished, ignore_errors=True)  # what an earlier run left half-written
        unfinished.mkdir(parents=True)
    dist.barrier()
    return unfinished


def finish_checkpoint(unfinished: Path) -> Path:
    """Gives a checkpoint its name. One rank calls this, once every rank's files are written."""
    final = whole_name(unfinished)
    sync_folder(unfinished)
    os.replace(unfinished, final)
    sync_folder(final.parent)  # an older checkpoint may be deleted next
    return final


def whole_name(unfinished: Path) -> Path:
    """The name that an unfinished checkpoint gets when it is finished."""
    return unfinished.with_name(unfinished.name.removesuffix(UNFINISHED_SUFFIX))


def newest_checkpoint(folder: str | Path) -> tuple[Path, list[Path]]:
    """Finds the checkpoint to resume from.

    Args:
        folder: Where a run wrote its checkpoints.

    Returns:
        The whole checkpoint with the highest step, and the unfinished ones that were passed over.

    Raises:
        PicassoError: If there is no whole checkpoint, or the newest is of another format.
    """
    folder = Path(folder)
    entries = sorted(folder.iterdir()) if folder.is_dir() else []
    unfinished = [path for path in entries if path.name.endswith(UNFINISHED_SUFFIX)]
    whole = [path for path in entries if step_of(path.name) is not None]
    if not whole:
        left = f"; found only unfinished: {', '.join(path.name for path in unfinished)}"
        raise PicassoError(
            f"{folder}: no checkpoint to resume from; expected folders named step_<number>"
            f"{left if unfinished else ''}; train without --resume first, or name another folder"
        )
    newest = max(whole, key=lambda path: step_of(path.name) or 0)
    if not is_whole(newest):
        raise PicassoError(
            f"{newest}: not a checkpoint (no {_DCP_METADATA} file in it); move the folder away and "
            "resume again"
        )
    return newest, unfinished


def load_checkpoint(
    path: Path, state: dict[str, Any], load_state: Callable[[dict[str, Any]], None]
) -> int:
    """Reads a checkpoint into a model and its optimizers.

    Collective: every rank of the default process group calls this, in the same order.

    Args:
        path: A whole checkpoint.
        state: State dicts of the freshly built model; overwritten in place.
        load_state: Takes over the filled state dicts.

    Returns:
        Steps that the checkpoint had trained.

    Raises:
        PicassoError: If the checkpoint is of another model, or damaged.
    """
    filled = _without_empty({**state, "step": torch.tensor(0)})
    try:
        dcp.load(filled, checkpoint_id=str(path))
    except (dcp.CheckpointException, RuntimeError, ValueError, KeyError, OSError) as error:
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


def refuse_used_folder(folder: str | Path) -> None:
    """Refuses to start a new run in a folder that holds another run's checkpoints.

    Raises:
        PicassoError: If the folder holds a checkpoint.
    """
    folder = Path(folder)
    if folder.exists() and not folder.is_dir():
        raise PicassoError(f"{folder}: is a file; expected a folder for the checkpoints")
    used = [path.name for path in folder.glob("step_*") if step_of(path.name) is not None]
    if used:
        raise PicassoError(
            f"{folder}: holds checkpoints already (newest {max(used)}); pass --resume to continue "
            "that run, or set checkpoint.folder to another folder"
        )


def step_of(name: str) -> int | None:
    """Steps that a checkpoint of this name has trained; ``None`` for the names of other things."""
    match = _STEP_NAME.fullmatch(name)
    return int(match[1]) if match else None


def is_whole(path: Path) -> bool:
    """Whether a folder is a checkpoint that was finished."""
    return step_of(path.name) is not None and holds_checkpoint(path)


def holds_checkpoint(path: Path) -> bool:
    """Whether a folder, of any name, has what torch writes last into a checkpoint."""
    return (path / _DCP_METADATA).is_file()


def sync_folder(path: Path) -> None:
    """Brings the names in a folder onto the disk; their files bring themselves."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _told_by_first_rank(question: Callable[[], bool]) -> bool:
    """Rank 0's answer on every rank, so that no rank goes another way. Collective."""
    answer: list[Any] = [question() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(answer, src=0)
    return bool(answer[0])
