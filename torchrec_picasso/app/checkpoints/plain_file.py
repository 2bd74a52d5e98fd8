"""The weights of a training checkpoint as one unsharded state dict, read by one process.

``torch.distributed.checkpoint.format_utils.dcp_to_torch_save`` unpickles metadata and values
without restriction and adds the optimizer state; here checksums are verified first, and
:class:`.SafeReader` runs no code of the file.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from torchrec_picasso.app.checkpoints.folder import (
    UNFINISHED_SUFFIX,
    holds_checkpoint,
    last_line,
    newest_checkpoint,
)
from torchrec_picasso.app.checkpoints.safe_reader import SafeReader, load_safely
from torchrec_picasso.app.checkpoints.sums import damages
from torchrec_picasso.errors import PicassoError

_MODEL = "model."
"""Prefix of weights in a checkpoint; others are ``optim.`` and ``step``."""


def find_checkpoint(folder: str | Path) -> Path:
    """The folder itself if it is a checkpoint, else the newest checkpoint of the run in it.

    Raises:
        PicassoError: If there is none.
    """
    folder = Path(folder)
    if holds_checkpoint(folder) and not folder.name.endswith(UNFINISHED_SUFFIX):
        return folder
    return newest_checkpoint(folder)[0]


def read_plain(path: Path) -> dict[str, Tensor]:
    """Reads the weights of a complete checkpoint of any plan, by name in the unsharded model.

    Raises:
        PicassoError: If a file is damaged or cannot be read.
    """
    if damaged := damages(path):
        raise PicassoError(f"{path}: {', '.join(damaged)}; name another checkpoint")
    try:
        stored = SafeReader(path).read_metadata().state_dict_metadata
        plain = {
            name.removeprefix(_MODEL): torch.empty(tensor.size, dtype=tensor.properties.dtype)
            for name, tensor in stored.items()
            if name.startswith(_MODEL) and isinstance(tensor, TensorStorageMetadata)
        }
        load_safely(path, {_MODEL.rstrip("."): plain}, no_dist=True)
    except (Exception, dcp.CheckpointException) as error:  # a damaged file raises nearly anything
        raise PicassoError(
            f"{path}: cannot be read ({last_line(error)}); name another checkpoint"
        ) from error
    return plain


def write_plain(plain: Mapping[str, Tensor], out: str | Path) -> None:
    """Writes a state dict for ``torch.load(..., weights_only=True)`` atomically."""
    unfinished = f"{out}{UNFINISHED_SUFFIX}"
    try:
        torch.save(dict(plain), unfinished)
        os.replace(unfinished, out)
    except (OSError, RuntimeError) as error:
        Path(unfinished).unlink(missing_ok=True)
        raise PicassoError(f"{out}: cannot be written ({error}); name another file") from error
