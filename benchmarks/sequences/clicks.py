"""Clicks with the history before them: real rows of the Alimama display advertising data, or
generated ones of the same shape.

Real rows: 58 % have a history, of 31 clicks on average and 50 at most; one table each for the
categories and brands of the target and of the history.

Source: Alimama, *Ad Display/Click Data on Taobao.com* (Tianchi, data set 56); Zhou et al., Deep
Interest Network, KDD 2018.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from torchrec_picasso.errors import InputError
from torchrec_picasso.zoo.generated import zipf_cdf

__all__ = ["Clicks", "HISTORIES", "PROFILES", "generate_clicks", "read_clicks"]

Ids = NDArray[np.int64]

HISTORIES = {"cate_id": "tag_category_list", "brand": "tag_brand_list"}
"""Columns of the target, and of the history that looks up the same table."""
PROFILES = (
    *("user_id", "adgroup_id", "campaign_id", "customer", "pid", "cms_segid", "cms_group_id"),
    *("final_gender_code", "age_level", "pvalue_level", "shopping_level", "occupation"),
    "new_user_class_level",
)
"""Columns with one id per sample."""

_NUM_GENERATED = 10_000
_EMPTY_SHARE, _MOST_CLICKS, _MEAN_CLICKS = 0.42, 50, 31
_GENERATED_ROWS = {
    **{"cate_id": 12_960, "brand": 461_321, "user_id": 1_057_973, "adgroup_id": 846_496},
    **{"campaign_id": 423_367, "customer": 255_866, "cms_segid": 96},
}
"""Largest ids of the real file; other columns have less than 13 ids."""
_FEW_ROWS = 12
_TASTES = 4  # distinct rows of a history, at most


@dataclass(frozen=True)
class Clicks:
    """Samples in columns; ids count from 1, and 0 is a missing one.

    Args:
        ids: One id per sample, by column.
        history: One list of ids per sample, by column; of a sample they are equally long.
        clicked: Labels, shape ``(n,)``.
    """

    ids: Mapping[str, Ids]
    history: Mapping[str, Sequence[Ids]]
    clicked: NDArray[np.float32]

    def hashed(self, max_rows: int) -> Clicks:
        """The same samples, with ids modulo a number of rows."""
        return Clicks(
            ids={column: ids % max_rows for column, ids in self.ids.items()},
            history={
                column: [ids % max_rows for ids in lists] for column, lists in self.history.items()
            },
            clicked=self.clicked,
        )

    def num_rows(self, column: str) -> int:
        """Rows of the table that a column looks up, with its history."""
        lists = self.history[HISTORIES[column]] if column in HISTORIES else ()
        largest = max((int(of.max()) for of in lists if of.size), default=0)
        return max(largest, int(self.ids[column].max())) + 1


def read_clicks(path: str | Path) -> Clicks:
    """Reads a Parquet file of Alimama's columns.

    Args:
        path: With columns ``clk``, those of :data:`PROFILES`, and those of :data:`HISTORIES`.

    Raises:
        InputError: If a column is missing.
    """
    frame = pd.read_parquet(path)
    wanted = ["clk", *PROFILES, *HISTORIES, *HISTORIES.values()]
    missing = [column for column in wanted if column not in frame]
    if missing:
        raise InputError(f"{path}: no column {missing[0]!r}; expected {', '.join(wanted)}")
    return Clicks(
        ids={
            column: frame[column].fillna(-1).to_numpy(np.int64) + 1
            for column in (*PROFILES, *HISTORIES)
        },
        history={
            column: [np.asarray(of, dtype=np.int64) + 1 for of in frame[column]]
            for column in HISTORIES.values()
        },
        clicked=frame["clk"].to_numpy(np.float32),
    )


def generate_clicks(seed: int = 0) -> Clicks:
    """Generates samples of that shape: Zipf ids, and histories that return to a few of them.

    Args:
        seed: Draws everything.
    """
    rng = np.random.default_rng(seed)

    def draw(column: str, num: int) -> Ids:
        rows = _GENERATED_ROWS.get(column, _FEW_ROWS)
        drawn: Ids = np.searchsorted(zipf_cdf(rows, 1.0), rng.random(num), "right") + 1
        return drawn

    lengths = np.minimum(rng.geometric(1 / _MEAN_CLICKS, _NUM_GENERATED), _MOST_CLICKS)
    lengths[rng.random(_NUM_GENERATED) < _EMPTY_SHARE] = 0
    history = {}
    for column, of_history in HISTORIES.items():
        tastes = draw(column, _TASTES * _NUM_GENERATED).reshape(_NUM_GENERATED, _TASTES)
        history[of_history] = [rng.choice(of, length) for of, length in zip(tastes, lengths)]
    return Clicks(
        ids={column: draw(column, _NUM_GENERATED) for column in (*PROFILES, *HISTORIES)},
        history=history,
        clicked=(rng.random(_NUM_GENERATED) < 0.05).astype(np.float32),
    )
