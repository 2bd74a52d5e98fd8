"""A training checkpoint as one plain file, read by this process alone, whatever ranks wrote it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from torchrec_picasso.app.checkpoints.folder import UNFINISHED_SUFFIX, holds_checkpoint, step_of
from torchrec_picasso.app.checkpoints.safe_reader import SafeReader, load_safely
from torchrec_picasso.app.checkpoints.sums import damages
from torchrec_picasso.errors import ConfigError, PicassoError

__all__ = ["find_checkpoint", "read_plain", "write_plain"]

_MODEL = "model."
"""Before the names of weights in a checkpoint, where optimizer states are too."""


def find_checkpoint(folder: str | Path) -> Path:
    """The checkpoint that a folder is, or the newest whole one in it.

    Args:
        folder: One checkpoint, or where a run wrote its checkpoints.

    Raises:
        PicassoError: If there is none.
    """
    folder = Path(folder)
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "there is no such folder"
        raise PicassoError(
            f"{folder}: {what}; name the checkpoint.folder of a run, or one checkpoint in it"
        )
    if folder.name.endswith(UNFINISHED_SUFFIX):
        raise PicassoError(
            f"{folder}: a checkpoint that was not finished; name one without {UNFINISHED_SUFFIX}"
        )
    if holds_checkpoint(folder):
        return folder
    inside = sorted(path for path in folder.iterdir() if path.is_dir())
    whole = [path for path in inside if step_of(path.name) is not None and holds_checkpoint(path)]
    if whole:
        return max(whole, key=lambda path: step_of(path.name) or 0)
    unfinished = [path.name for path in inside if path.name.endswith(UNFINISHED_SUFFIX)]
    left = f" but unfinished ones ({', '.join(unfinished)})" if unfinished else ""
    raise PicassoError(
        f"{folder}: not a checkpoint, and none is in it{left}; name the checkpoint.folder of a "
        "run, or one checkpoint in it"
    )


def read_plain(path: Path, expected: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Reads a checkpoint's weights.

    Args:
        path: A whole checkpoint.
        expected: State dict of the unsharded model; sizes count, its tensors may be on the meta
            device.

    Returns:
        Whole tensors by the names in ``expected``.

    Raises:
        ConfigError: If the checkpoint is of another model.
        PicassoError: If it cannot be read.
    """
    if damaged := damages(path):
        raise PicassoError(f"{path}: {', '.join(damaged)}; name another checkpoint")
    try:
        stored = SafeReader(path).read_metadata().state_dict_metadata
    except Exception as error:  # whatever unpickling makes of a file that is none of ours
        raise PicassoError(f"{path}: not a checkpoint ({error!r}); name another") from error
    found = {
        name.removeprefix(_MODEL): of
        for name, of in stored.items()
        if name.startswith(_MODEL) and isinstance(of, TensorStorageMetadata)
    }
    _check_names(path, {name: of.size for name, of in found.items()}, expected)
    plain = {
        name: torch.empty(found[name].size, dtype=found[name].properties.dtype) for name in expected
    }
    try:
        load_safely(path, {_MODEL.rstrip("."): plain}, no_dist=True)
    except (
        Exception,
        dcp.CheckpointException,
    ) as error:  # reading a file that is damaged raises nearly anything
        reason = (str(error).strip().splitlines() or [repr(error)])[-1]
        raise PicassoError(f"{path}: cannot be read ({reason}); name another checkpoint") from error
    return plain


def write_plain(plain: Mapping[str, Tensor], out: str | Path) -> None:
    """Writes a state dict for ``torch.load(..., weights_only=True)``: the whole file or none."""
    unfinished = f"{out}{UNFINISHED_SUFFIX}"
    try:
        torch.save(dict(plain), unfinished)
        os.replace(unfinished, out)
    except (OSError, RuntimeError) as error:
        Path(unfinished).unlink(missing_ok=True)
        raise PicassoError(f"{out}: cannot be written ({error}); name another file") from error


def _check_names(
    path: Path, found: Mapping[str, torch.Size], expected: Mapping[str, Tensor]
) -> None:
    missing = [f"no {name}" for name in expected if name not in found]
    unknown = [f"{name}, which the model has not" for name in found if name not in expected]
    other = [
        f"{name} of size {tuple(found[name])} instead of {tuple(tensor.shape)}"
        for name, tensor in expected.items()
        if name in found and found[name] != tensor.shape
    ]
    problems = [*missing, *other, *unknown]
    if problems:
        more = f" and {len(problems) - 1} more such differences" if len(problems) > 1 else ""
        raise ConfigError(
            f"{path}: a checkpoint of another model, it has {problems[0]}{more}; pass the --config "
            "that it was trained with"
        )
