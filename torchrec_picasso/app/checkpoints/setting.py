"""The tuned pipeline setting of a run, in the folder of a checkpoint: a resumed run does not tune.

It is valid for one number of ranks and one batch size.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from torchrec_picasso.app.checkpoints.folder import write_synced
from torchrec_picasso.errors import PicassoError
from torchrec_picasso.schedule.schedule import Setting

_NAME = "setting.json"


def write_setting(checkpoint: Path, setting: Setting, ranks: int, batch_size: int) -> None:
    """Writes the setting into the folder of a checkpoint. One rank calls this."""
    document = {**asdict(setting), "ranks": ranks, "batch_size": batch_size}
    content = json.dumps(document).encode()
    write_synced(checkpoint / _NAME, lambda file: file.write(content))


def read_setting(checkpoint: Path, ranks: int, batch_size: int) -> Setting | None:
    """Reads the setting; ``None`` if there is none for these ranks and this batch size.

    Raises:
        PicassoError: If the file is damaged.
    """
    path = checkpoint / _NAME
    if not path.is_file():
        return None
    try:
        found = json.loads(path.read_bytes())
        setting = Setting(found["num_micro_batches"], found["lookahead"])
        is_valid = (found["ranks"], found["batch_size"]) == (ranks, batch_size)
    except (ValueError, KeyError, TypeError) as error:
        raise _damaged(path) from error
    if type(setting.num_micro_batches) is not int or type(setting.lookahead) is not bool:
        raise _damaged(path)
    return setting if is_valid else None


def _damaged(path: Path) -> PicassoError:
    return PicassoError(
        f"{path}: cannot be read as a setting; delete the file, then it is tuned again"
    )
