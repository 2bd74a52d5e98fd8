"""Names of checkpoint folders, and the newest checkpoint of a run.

A folder ``step_00000100`` is a complete checkpoint, ``step_00000100.tmp`` an unfinished one, and
``step_00000100.damaged`` one whose files differ from what was written.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from torchrec_picasso.errors import ConfigError, PicassoError

UNFINISHED_SUFFIX = ".tmp"
"""Suffix of a checkpoint that is being written."""
DAMAGED_SUFFIX = ".damaged"
"""Suffix of a damaged checkpoint."""

_STEP_NAME = re.compile(r"step_(\d{8,})")
_DCP_METADATA = ".metadata"


def folder_of_step(folder: str | Path, step: int) -> Path:
    """Path of the complete checkpoint of a step."""
    return Path(folder) / f"step_{step:08d}"


def step_of(name: str) -> int | None:
    """Trained steps of a checkpoint of this name; ``None`` for other names."""
    match = _STEP_NAME.fullmatch(name)
    return int(match[1]) if match else None


def whole_name(unfinished: Path) -> Path:
    """Path of an unfinished checkpoint once it is complete."""
    return unfinished.with_name(unfinished.name.removesuffix(UNFINISHED_SUFFIX))


def is_whole(path: Path) -> bool:
    """Whether a folder is a complete checkpoint."""
    return step_of(path.name) is not None and holds_checkpoint(path)


def holds_checkpoint(path: Path) -> bool:
    """Whether a folder of any name has the metadata file, which torch writes last."""
    return (path / _DCP_METADATA).is_file()


def has_checkpoint(folder: str | Path) -> bool:
    """Whether a folder has an entry with the name of a complete checkpoint."""
    return any(step_of(path.name) is not None for path in Path(folder).glob("step_*"))


def newest_checkpoint(folder: str | Path) -> tuple[Path, list[Path]]:
    """Finds the complete checkpoint with the highest step, and lists unfinished ones.

    Raises:
        PicassoError: If there is no complete checkpoint, or the newest has another format.
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
    """Raises PicassoError if a folder holds the checkpoints of another run."""
    folder = Path(folder)
    if folder.exists() and not folder.is_dir():
        raise PicassoError(f"{folder}: is a file; expected a folder for the checkpoints")
    used = [path.name for path in folder.glob("step_*") if step_of(path.name) is not None]
    if used:
        raise PicassoError(
            f"{folder}: holds checkpoints already (newest {max(used)}); pass --resume to continue "
            "that run, or set checkpoint.folder to another folder"
        )


def check_run_folder(folder: str | Path | None, resume: bool) -> None:
    """Checks the checkpoint folder of a run, ``None`` without checkpoints.

    Raises:
        PicassoError: If ``resume`` is set and there is no checkpoint to resume from, or a new run
            would use the folder of another run.
    """
    if folder is None:
        if resume:
            raise ConfigError(
                "--resume: the configuration names no checkpoint.folder to resume from; set it"
            )
    elif resume:
        newest_checkpoint(folder)
    else:
        refuse_used_folder(folder)


def last_line(error: BaseException) -> str:
    """Returns the last line of torch's error for a checkpoint, which has the reason."""
    return (str(error).strip().splitlines() or [repr(error)])[-1]


def write_synced(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Writes a file by a function of the opened file, and flushes it to disk."""
    with path.open("wb") as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Flushes the directory entries of a folder to disk; files are flushed by their writers."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
