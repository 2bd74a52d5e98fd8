"""The setting that a run's trial chose, beside its checkpoint: a resumed run tries none.

It is of a number of ranks and a batch size; under others the fastest setting is another.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path

from torchrec_picasso.errors import PicassoError
from torchrec_picasso.schedule.schedule import Setting

__all__ = ["read_setting", "write_setting"]

_NAME = "setting.json"


def write_setting(checkpoint: Path, setting: Setting, ranks: int, batch_size: int) -> None:
    """Writes it into the folder of a checkpoint. One rank calls this.

    Args:
        checkpoint: Its folder.
        setting: What was chosen.
        ranks: That trained.
        batch_size: Samples per rank and step.
    """
    with (checkpoint / _NAME).open("w", encoding="utf-8") as file:
        json.dump({**asdict(setting), "ranks": ranks, "batch_size": batch_size}, file)
        file.flush()
        os.fsync(file.fileno())


def read_setting(checkpoint: Path, ranks: int, batch_size: int) -> Setting | None:
    """Reads it; ``None`` where the checkpoint has none, or one of other ranks or batches.

    Raises:
        PicassoError: If the file is damaged.
    """
    path = checkpoint / _NAME
    if not path.is_file():
        return None
    try:
        found = json.loads(path.read_bytes())
        setting = Setting(found["num_micro_batches"], found["lookahead"])
        is_alike = (found["ranks"], found["batch_size"]) == (ranks, batch_size)
    except (ValueError, KeyError, TypeError) as error:
        raise _damaged(path) from error
    if type(setting.num_micro_batches) is not int or type(setting.lookahead) is not bool:
        raise _damaged(path)
    return setting if is_alike else None


def _damaged(path: Path) -> PicassoError:
    return PicassoError(
        f"{path}: cannot be read as a setting; delete the file, then settings are tried anew"
    )
