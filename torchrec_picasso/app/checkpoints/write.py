"""Writes a checkpoint into a temporary folder, which is renamed once every rank has written.

The format is torch.distributed.checkpoint's with a file of SHA-256 checksums. All ranks must see
the same file system.
"""

from __future__ import annotations

import os
import shutil
from collections import ChainMap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner

from torchrec_picasso.app.checkpoints.folder import (
    UNFINISHED_SUFFIX,
    folder_of_step,
    last_line,
    sync_folder,
    whole_name,
)
from torchrec_picasso.app.checkpoints.sums import sums_of_rank, write_sums
from torchrec_picasso.errors import PicassoError

WriteExtra = Callable[[Path], None]
"""Writes further files into the folder of a checkpoint; called on rank 0."""


def save_checkpoint(
    folder: str | Path, step: int, state: dict[str, Any], write_extra: WriteExtra | None = None
) -> Path:
    """Writes a checkpoint and returns its folder.

    Collective: every rank of the default process group calls this, in the same order.

    Args:
        folder: Folder of the run's checkpoints; created if missing.
        step: Steps trained so far.
        state: Sharded state dicts.
        write_extra: Writes further files.

    Raises:
        PicassoError: On all ranks, if the step has a checkpoint already, or a rank cannot write.
    """
    unfinished = begin_checkpoint(folder, step, write_extra)
    error: BaseException | None = None
    try:
        dcp.save(with_step(state, step), storage_writer=CheckpointFiles(unfinished))
    except (Exception, dcp.CheckpointException) as caught:  # raised on all ranks below
        error = caught
    return complete_checkpoint(unfinished, error)


def with_step(state: dict[str, Any], step: int) -> dict[str, Any]:
    """The saved state: state dicts, and the steps trained so far."""
    return {**state, "step": torch.tensor(step)}


class CheckpointFiles(dcp.FileSystemWriter):
    """torch's file writer, which raises the first error in a chain of errors.

    A full disk is followed by an error about a file that cannot be closed.
    """

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> torch.futures.Future[Any]:
        """Writes this rank's files."""
        try:
            return super().write_data(plan, planner)
        except Exception as error:
            first: BaseException = error
            while (before := first.__cause__ or first.__context__) is not None:
                first = before
            if first is error:
                raise
            raise first from None


def begin_checkpoint(folder: str | Path, step: int, write_extra: WriteExtra | None = None) -> Path:
    """Creates and returns the temporary folder of a checkpoint. Collective.

    Raises:
        PicassoError: On all ranks, if the step has a checkpoint already or the folder cannot be
            created.
    """
    final = folder_of_step(folder, step)
    unfinished = final.with_name(final.name + UNFINISHED_SUFFIX)

    def begin() -> str | None:
        if final.exists():
            return (
                f"{final}: a checkpoint of step {step} exists already; choose another folder or "
                "move it"
            )
        try:
            shutil.rmtree(unfinished, ignore_errors=True)  # left by an interrupted run
            unfinished.mkdir(parents=True)
            if write_extra is not None:
                write_extra(unfinished)
        except OSError as error:
            return _unwritten(unfinished, error)
        return None

    _refuse_on_all_ranks(begin)
    return unfinished


def complete_checkpoint(
    unfinished: Path, error: BaseException | None, group: dist.ProcessGroup | None = None
) -> Path:
    """Renames a checkpoint's folder once every rank has written; returns the new path. Collective.

    Args:
        unfinished: The temporary folder.
        error: Error of this rank's write.
        group: Process group of the writers; ``None`` = the default.

    Raises:
        PicassoError: On all ranks, if a rank could not write.
    """
    rank = dist.get_rank()
    sums: dict[str, str] = {}
    if error is None:
        try:
            sums = sums_of_rank(unfinished, rank)
        except OSError as caught:
            error = caught
    by_rank: list[Any] = [None] * dist.get_world_size()
    problem = None if error is None else _unwritten(unfinished, error)
    dist.all_gather_object(by_rank, (problem, sums), group=group)

    def complete() -> str | None:
        problems = [problem for problem, _ in by_rank if problem is not None]
        if problems:
            return str(problems[0])
        try:
            write_sums(unfinished, dict(ChainMap(*(sums for _, sums in by_rank))))
            sync_folder(unfinished)
            os.replace(unfinished, whole_name(unfinished))
            sync_folder(unfinished.parent)  # an older checkpoint may be deleted next
        except OSError as error:
            return _unwritten(unfinished, error)
        return None

    _refuse_on_all_ranks(complete, group)
    return whole_name(unfinished)


def _unwritten(unfinished: Path, error: BaseException) -> str:
    return (
        f"{unfinished}: could not be written ({last_line(error)}); mend that and continue with "
        "--resume from the checkpoint before"
    )


def _refuse_on_all_ranks(
    function: Callable[[], str | None], group: dist.ProcessGroup | None = None
) -> None:
    """Calls a function on rank 0; all ranks wait, and raise the problem it returns. Collective."""
    problem: list[Any] = [function() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(problem, src=0, group=group)
    if problem[0] is not None:
        raise PicassoError(problem[0])
