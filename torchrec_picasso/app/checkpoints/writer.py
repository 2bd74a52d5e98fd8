"""Writes a run's checkpoints one after another: while training waits, or while it goes on.

To go on, training leaves a copy of each rank's state in host memory, and a thread writes that with
a process group of its own. At most one checkpoint is being written, and old ones are deleted only
after a newer one is whole.
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
    Beside,
    CheckpointFiles,
    begin_checkpoint,
    complete_checkpoint,
    save_checkpoint,
    with_step,
)
from torchrec_picasso.app.config import CheckpointConfig

__all__ = ["CheckpointWriter"]


class CheckpointWriter:
    """Writes checkpoints into one folder. Collective, as are its methods.

    Args:
        config: Folder, how many to keep, and whether training goes on meanwhile.
        say: Prints a line; called on rank 0 only.
    """

    def __init__(self, config: CheckpointConfig, say: Callable[[str], None]) -> None:
        self._config = config
        self._say = say
        self._copies: _HostCopies | None = None
        if config.folder is not None and config.async_save:
            # training's own collectives run at the same time
            self._copies = _HostCopies(dist.new_group(backend="gloo"))
        self._pending: tuple[Path, Future[None]] | None = None

    def save(
        self,
        step: int,
        state: Callable[[], dict[str, Any]],
        beside: Beside | None = None,
    ) -> None:
        """Writes a checkpoint if any are asked for, or begins to.

        Args:
            step: Steps trained so far.
            state: Gives state dicts, sharded as they are in the model; they may change once this
                returns.
            beside: Writes what else belongs there.

        Raises:
            PicassoError: If that step has a checkpoint already, or the one before could not be
                written.
        """
        self.finish()
        folder = self._config.folder
        if folder is None:
            return
        if self._copies is None:
            self._is_whole(save_checkpoint(folder, step, state(), beside))
            return
        unfinished = begin_checkpoint(folder, step, beside)
        written = dcp.async_save(
            with_step(state(), step),
            storage_writer=CheckpointFiles(unfinished),
            process_group=self._copies.group,
            async_stager=self._copies,
        )
        assert isinstance(written, Future), "copies are made before async_save returns"
        self._pending = unfinished, _then_named(written, unfinished, self._copies.group)

    def finish(self) -> None:
        """Waits until what is being written is whole.

        Raises:
            PicassoError: On all ranks, if it could not be written; what is there stays unfinished.
        """
        if self._pending is None:
            return
        (unfinished, named), self._pending = self._pending, None
        named.result()
        self._is_whole(whole_name(unfinished))

    def _is_whole(self, path: Path) -> None:
        """Says so, and deletes old ones."""
        if dist.get_rank() == 0:
            self._say(f"step {step_of(path.name)}: wrote {path}")
            for problem in delete_old_checkpoints(path, self._config.keep_last):
                self._say(problem)


def _then_named(written: Future[Any], unfinished: Path, group: Any) -> Future[None]:
    """Done once the checkpoint has its name, which it gets as soon as all ranks have written."""
    named: Future[None] = Future()

    def give_name(written: Future[Any]) -> None:
        try:
            complete_checkpoint(unfinished, written.exception(), group)
            named.set_result(None)
        except BaseException as error:  # raised where somebody waits for it
            named.set_exception(error)

    written.add_done_callback(give_name)
    return named


class _HostCopies(AsyncStager):
    """Copies what a rank has to host memory, and nothing else.

    torch's own stager does not know TorchRec's ShardedTensor, and its older one copies the memory
    behind a shard, which is all tables of a kernel, once for each of them.

    Args:
        group: A process group on the CPU, for the copies' metadata.
    """

    _synchronize_after_execute = False

    def __init__(self, group: Any) -> None:
        self.group = group

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Copies; returns when that is done."""
        return {key: self._copy(value) for key, value in state_dict.items()}

    def synchronize_staging(self) -> None:
        """Nothing to wait for."""

    def close(self) -> None:
        """Nothing is kept."""

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
