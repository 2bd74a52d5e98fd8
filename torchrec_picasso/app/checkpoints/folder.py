"""Which folders are checkpoints, and which one a run goes on from.

A folder ``step_00000100`` exists only if its checkpoint is complete; ``step_00000100.tmp`` is one
that a run did not finish, ``step_00000100.damaged`` one whose files are not what was written.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from torchrec_picasso.errors import PicassoError

__all__ = [
    "DAMAGED_SUFFIX",
    "UNFINISHED_SUFFIX",
    "folder_of_step",
    "has_checkpoint",
    "holds_checkpoint",
    "is_whole",
    "newest_checkpoint",
    "refuse_used_folder",
    "step_of",
    "sync_folder",
    "whole_name",
]

UNFINISHED_SUFFIX = ".tmp"
"""Behind the name of a checkpoint that is being written."""
DAMAGED_SUFFIX = ".damaged"
"""Behind the name of one that was found damaged."""

_STEP_NAME = re.compile(r"step_(\d{8,})")
_DCP_METADATA = ".metadata"


def folder_of_step(folder: str | Path, step: int) -> Path:
    """Where the checkpoint of a step is, once it is whole."""
    return Path(folder) / f"step_{step:08d}"


def step_of(name: str) -> int | None:
    """Steps that a checkpoint of this name has trained; ``None`` for the names of other things."""
    match = _STEP_NAME.fullmatch(name)
    return int(match[1]) if match else None


def whole_name(unfinished: Path) -> Path:
    """The name that an unfinished checkpoint gets when it is finished."""
    return unfinished.with_name(unfinished.name.removesuffix(UNFINISHED_SUFFIX))


def is_whole(path: Path) -> bool:
    """Whether a folder is a checkpoint that was finished."""
    return step_of(path.name) is not None and holds_checkpoint(path)


def holds_checkpoint(path: Path) -> bool:
    """Whether a folder, of any name, has what torch writes last into a checkpoint."""
    return (path / _DCP_METADATA).is_file()


def has_checkpoint(folder: str | Path) -> bool:
    """Whether a folder holds a run's checkpoint, whole or not as it should be."""
    return any(step_of(path.name) is not None for path in Path(folder).glob("step_*"))


def newest_checkpoint(folder: str | Path) -> tuple[Path, list[Path]]:
    """Finds the newest checkpoint of a run.

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
        left = [*unfinished, *(path for path in entries if path.name.endswith(DAMAGED_SUFFIX))]
        found = f"; found only {', '.join(path.name for path in left)}" if left else ""
        raise PicassoError(
            f"{folder}: no checkpoint in it; expected folders named step_<number>{found}; name "
            "another folder, or train without --resume first"
        )
    newest = max(whole, key=lambda path: step_of(path.name) or 0)
    if not is_whole(newest):
        raise PicassoError(
            f"{newest}: not a checkpoint (no {_DCP_METADATA} file in it); move the folder away and "
            "resume again"
        )
    return newest, unfinished


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


def sync_folder(path: Path) -> None:
    """Brings the names in a folder onto the disk; their files bring themselves."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
