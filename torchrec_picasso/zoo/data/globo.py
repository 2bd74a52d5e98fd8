"""Globo.com's news clicks: the next article a user clicks, after those clicked before.

Each click is a sample, followed by one of an article that was not clicked but is as popular
(:func:`.samples_of_log`). The history is the user's latest clicks, over all sessions.

Source: Globo.com / CHAMELEON, *News Portal User Interactions*; de Souza Pereira Moreira et al.,
CHAMELEON, DLRS 2018.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd

from torchrec_picasso.errors import InputError
from torchrec_picasso.zoo.data.click_log import samples_of_log
from torchrec_picasso.zoo.data.clicks import Clicks

__all__ = ["COLUMNS", "read_globo"]

_PROFILES = ("user", "environment", "device", "os", "country", "region", "referrer")
_TIME, _ARTICLE = "ts_ms", "article"
COLUMNS = (_TIME, _ARTICLE, *_PROFILES)


def read_globo(path: str | Path) -> Clicks:
    """Reads a Parquet file.

    Args:
        path: With :data:`COLUMNS`. Ids count from 1 afterwards.

    Raises:
        InputError: If the file has less than 2 clicks.
    """
    frame = pd.read_parquet(path, columns=list(COLUMNS)).sort_values(_TIME, kind="stable")
    log = {column: frame[column].to_numpy(np.int64) + 1 for column in (_ARTICLE, *_PROFILES)}
    try:
        return samples_of_log(log, user="user", targets=[_ARTICLE], profiles=_PROFILES)
    except InputError as error:
        raise InputError(f"{path}: {error}") from error
