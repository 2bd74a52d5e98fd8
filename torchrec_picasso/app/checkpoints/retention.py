"""Deletes old checkpoints so that a crash at any moment leaves none that only looks complete.

A checkpoint is first renamed, ``step_00000100`` to ``step_00000100.deleted``, then its files are
deleted. The next deletion removes what a crash left.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from torchrec_picasso.app.checkpoints.folder import (
    UNFINISHED_SUFFIX,
    is_whole,
    step_of,
    sync_folder,
)

_DELETED_SUFFIX = ".deleted"


def delete_old_checkpoints(newest: Path, keep_last: int | None) -> list[str]:
    """Deletes a run's checkpoints older than the last few, and remains of interrupted writes.

    Not collective: one rank calls this when ``newest`` is complete and none is being written.
    Links and folders that are no checkpoint are kept and not counted.

    Args:
        newest: The checkpoint that was just written; it is kept.
        keep_last: Checkpoints to keep, ``newest`` included; ``None`` = delete nothing.

    Returns:
        A sentence for each folder that could not be deleted.
    """
    if keep_last is None:
        return []
    newest_step = step_of(newest.name)
    if newest_step is None or not is_whole(newest):
        return [f"{newest} is not a whole checkpoint; nothing is deleted before it is"]
    folders = [path for path in newest.parent.iterdir() if path.is_dir() and not path.is_symlink()]
    problems: list[str] = []
    for path in folders:
        if _is_left_over(path.name, newest_step):
            _try(shutil.rmtree, path, problems)
    steps = {path: step_of(path.name) for path in folders if is_whole(path)}
    older = [path for path, step in steps.items() if step is not None and step < newest_step]
    older.sort(key=lambda path: steps[path] or 0)
    for path in older[: max(0, len(older) + 1 - keep_last)]:
        _try(_delete, path, problems)
    return problems


def _is_left_over(name: str, newest_step: int) -> bool:
    """Whether a folder was left by a crash while it was deleted or written."""
    if name.endswith(_DELETED_SUFFIX):
        return step_of(name.removesuffix(_DELETED_SUFFIX)) is not None
    step = (
        step_of(name.removesuffix(UNFINISHED_SUFFIX)) if name.endswith(UNFINISHED_SUFFIX) else None
    )
    return step is not None and step <= newest_step


def _delete(path: Path) -> None:
    renamed = path.with_name(path.name + _DELETED_SUFFIX)
    os.replace(path, renamed)
    sync_folder(path.parent)  # the rename reaches the disk before the first deletion
    shutil.rmtree(renamed)


def _try(delete: Callable[[Path], None], path: Path, problems: list[str]) -> None:
    try:
        delete(path)
    except OSError as error:
        problems.append(
            f"could not delete {path}: {error.strerror or error}; training continues, delete it by "
            "hand"
        )
