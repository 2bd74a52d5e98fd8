"""Writes the checkpoints of a run, synchronously or in the background.

In the background, a thread writes a copy of each rank's state in host memory, with a process group
of its own. At most one checkpoint is being written; old ones are deleted after it is complete.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.staging import AsyncStager
from torchrec.distributed.types import ShardedTensor

from torchrec_picasso.app.checkpoints.folder import step_of, whole_name
from torchrec_picasso.app.checkpoints.retention import delete_old_checkpoints
from torchrec_picasso.app.checkpoints.write import (
    CheckpointFiles,
    WriteExtra,
    begin_checkpoint,
    complete_checkpoint,
    save_checkpoint,
    with_step,
)
from torchrec_picasso.app.config import CheckpointConfig


class CheckpointWriter:
    """Writes checkpoints into one folder. Collective, as are its methods.

    Args:
        config: Folder, number of checkpoints to keep, and whether to write in the background.
        say: Prints a line; called on rank 0.
    """

    def __init__(self, config: CheckpointConfig, say: Callable[[str], None]) -> None:
        self._config = config
        self._say = say
        self._copies: _HostCopies | None = None
        if config.folder is not None and config.async_save:
            # a group of its own: training's collectives run at the same time
            self._copies = _HostCopies(dist.new_group(backend="gloo"))
        self._pending: tuple[Path, Future[None]] | None = None

    def save(
        self,
        step: int,
        state: Callable[[], dict[str, Any]],
        write_extra: WriteExtra | None = None,
    ) -> None:
        """Writes or begins a checkpoint, if a folder is configured.

        Args:
            step: Steps trained so far.
            state: Returns the sharded state dicts, which may change once ``save`` returns.
            write_extra: Writes further files.

        Raises:
            PicassoError: If the step has a checkpoint already, or the one before failed.
        """
        self.finish()
        folder = self._config.folder
        if folder is None:
            return
        if self._copies is None:
            self._report(save_checkpoint(folder, step, state(), write_extra))
            return
        unfinished = begin_checkpoint(folder, step, write_extra)
        written = dcp.async_save(
            with_step(state(), step),
            storage_writer=CheckpointFiles(unfinished),
            process_group=self._copies.group,
            async_stager=self._copies,
        )
        assert isinstance(written, Future), "async_save returns after staging"
        self._pending = unfinished, _renamed(written, unfinished, self._copies.group)

    def finish(self) -> None:
        """Waits for the checkpoint that is being written.

        Raises:
            PicassoError: On all ranks, if it could not be written.
        """
        if self._pending is None:
            return
        (unfinished, renamed), self._pending = self._pending, None
        renamed.result()
        self._report(whole_name(unfinished))

    def _report(self, path: Path) -> None:
        """Reports a complete checkpoint and deletes old ones."""
        if dist.get_rank() == 0:
            self._say(f"step {step_of(path.name)}: wrote {path}")
            for problem in delete_old_checkpoints(path, self._config.keep_last):
                self._say(problem)


def _renamed(written: Future[Any], unfinished: Path, group: Any) -> Future[None]:
    """Renames the folder as soon as all ranks have written; the future is done after that."""
    renamed: Future[None] = Future()

    def complete(written: Future[Any]) -> None:
        try:
            complete_checkpoint(unfinished, written.exception(), group)
            renamed.set_result(None)
        except BaseException as error:  # raised by finish()
            renamed.set_exception(error)

    written.add_done_callback(complete)
    return renamed


class _HostCopies(AsyncStager):
    """Stages a rank's state in host memory.

    torch's stager does not know TorchRec's ShardedTensor, and its older one copies the storage of a
    shard, which is that of all tables of a kernel, once per table.

    Args:
        group: A process group on the CPU, for the copies' metadata.
    """

    _synchronize_after_execute = False

    def __init__(self, group: Any) -> None:
        self.group = group

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Copies the state; returns when the copy is complete."""
        return {key: self._copy(value) for key, value in state_dict.items()}

    def synchronize_staging(self) -> None:
        """Does nothing: :meth:`stage` has copied already."""

    def close(self) -> None:
        """Does nothing: no buffer is kept."""

    def _copy(self, value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: self._copy(member) for key, member in value.items()}
        if isinstance(value, (list, tuple)):
            return [self._copy(member) for member in value]
        if isinstance(value, ShardedTensor):
            on_host = value.cpu(process_group=self.group)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)  # about ShardedTensor itself
                return value.clone() if on_host is value else on_host
        if isinstance(value, Tensor):
            return value.detach().to("cpu", copy=True)
        return value
