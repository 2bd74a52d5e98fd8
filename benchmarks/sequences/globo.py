"""Globo.com's news clicks: the next article a user clicks, after those clicked before.

Each click is a sample with label 1, followed by one with label 0: the same user and history, and an
article that somebody clicked among the thousands of clicks before, so that what is popular now is
drawn often. The history is the user's latest clicks, over all sessions. Where the drawn article is
the clicked one, there is no second sample.

Source: Globo.com / CHAMELEON, *News Portal User Interactions*; de Souza Pereira Moreira et al.,
CHAMELEON, DLRS 2018.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd

from torchrec_picasso.errors import InputError
from torchrec_picasso.zoo.clicks import Clicks
from torchrec_picasso.zoo.history import History, Ids

__all__ = ["COLUMNS", "read_globo"]

_PROFILES = ("user", "environment", "device", "os", "country", "region", "referrer")
_TIME, _ARTICLE = "ts_ms", "article"
COLUMNS = (_TIME, _ARTICLE, *_PROFILES)

_MOST_CLICKS = 50
_RECENT_CLICKS = 5000
"""Clicks before a click that its negative is drawn from."""


def read_globo(path: str | Path, seed: int = 0) -> Clicks:
    """Reads a Parquet file.

    Args:
        path: With :data:`COLUMNS`. Ids count from 1 afterwards.
        seed: Draws the articles that were not clicked.

    Raises:
        InputError: If the file has less than 2 clicks.
    """
    frame = pd.read_parquet(path, columns=list(COLUMNS))
    if len(frame) < 2:
        raise InputError(
            f"{path}: expected at least 2 clicks, since what was not clicked is drawn from those "
            f"before, got {len(frame)}; give a longer file"
        )
    frame = frame.sort_values(_TIME, kind="stable")
    ids = {column: frame[column].to_numpy(np.int64) + 1 for column in (_ARTICLE, *_PROFILES)}
    articles = ids[_ARTICLE]
    click_n, negative_n = _draw_negatives(articles, np.random.default_rng(seed))
    is_click_m = np.tile([True, False], len(click_n))
    target_m = np.stack([articles[click_n], negative_n], axis=1).reshape(-1)
    click_m = np.repeat(click_n, 2)
    kept_m = is_click_m | (target_m != articles[click_m])
    return Clicks(
        targets={_ARTICLE: target_m[kept_m]},
        histories={
            _ARTICLE: History.before(ids["user"], articles, _MOST_CLICKS).of(click_m[kept_m])
        },
        profiles={column: ids[column][click_m[kept_m]] for column in _PROFILES},
        clicked=is_click_m[kept_m].astype(np.float32),
        in_time_order=True,
    )


def _draw_negatives(articles: Ids, rng: np.random.Generator) -> tuple[Ids, Ids]:
    """Every click that has one before it, and an article clicked shortly before."""
    click_n = np.arange(1, len(articles))
    reach_n = np.minimum(click_n, _RECENT_CLICKS)
    back_n = 1 + (rng.random(len(click_n)) * reach_n).astype(np.int64)
    return click_n, articles[click_n - back_n]
