"""Alimama's display advertising data, and generated samples of the same shape.

58 % of the real rows have a history, of 31 clicks on average and 50 at most. Target and history
share a table of categories and one of brands. Rows are sorted by user, not by time.

Source: Alimama, *Ad Display/Click Data on Taobao.com* (Tianchi, data set 56); Zhou et al., Deep
Interest Network, KDD 2018.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from torchrec_picasso.app.zoo.data.clicks import Clicks
from torchrec_picasso.app.zoo.data.generated import zipf_cdf
from torchrec_picasso.app.zoo.data.history import History, Ids
from torchrec_picasso.app.zoo.data.stream import Stream

_HISTORIES = {"cate_id": "tag_category_list", "brand": "tag_brand_list"}
"""History column of each target column."""
_PROFILES = (
    *("user_id", "adgroup_id", "campaign_id", "customer", "pid", "cms_segid", "cms_group_id"),
    *("final_gender_code", "age_level", "pvalue_level", "shopping_level", "occupation"),
    "new_user_class_level",
)
"""Columns with one id per sample."""
COLUMNS = ("clk", *_PROFILES, *_HISTORIES, *_HISTORIES.values())
_CROSSES = {"cate_id_user": ("cate_id", "user_id"), "brand_user": ("brand", "user_id")}

_MISSING = -1
_NUM_GENERATED = 10_000
_EMPTY_SHARE, _MOST_CLICKS, _MEAN_CLICKS = 0.42, 50, 31
_GENERATED_ROWS = {
    **{"cate_id": 12_960, "brand": 461_321, "user_id": 1_057_973, "adgroup_id": 846_496},
    **{"campaign_id": 423_367, "customer": 255_866, "cms_segid": 96},
}
"""Largest ids of the real file; other columns have less than 13 ids."""
_FEW_ROWS = 12
_MOST_DISTINCT = 4  # rows of a history


def read_alimama(
    path: str | Path, row_groups: Sequence[int] | None = None, is_stream: bool = False
) -> Clicks:
    """Reads a Parquet file.

    Args:
        path: File with :data:`COLUMNS`; ids are shifted by 1, 0 is a missing id.
        row_groups: Row groups to read; ``None`` = all.
        is_stream: Whether samples are a stream, of the tasks click and purchase. There are no
            times: all clicks are of one second.
    """
    file = pq.ParquetFile(path)
    groups = range(file.num_row_groups) if row_groups is None else row_groups
    names = [*COLUMNS, *(["buy"] if is_stream else [])]
    table = file.read_row_groups(list(groups), columns=names)
    clicks = Clicks(
        targets={column: _ids(table[column]) for column in _HISTORIES},
        histories={target: _lists(table[column]) for target, column in _HISTORIES.items()},
        profiles={column: _ids(table[column]) for column in _PROFILES},
        clicked=np.asarray(table["clk"], dtype=np.float32),
    )
    if not is_stream:
        return clicks
    tasks = [clicks.clicked, np.asarray(table["buy"])]
    lists, no_time_n = clicks.histories["cate_id"], np.zeros(len(clicks), dtype=np.int64)
    earlier = replace(lists, values=np.zeros_like(lists.values))
    return Stream.from_clicks(
        clicks, np.stack(tasks, axis=1)[:, None], no_time_n, earlier, _CROSSES
    )


def columns_beside(column: str) -> list[str]:
    """Columns of the file that read the same table as a target or profile, itself included."""
    return [column, *([_HISTORIES[column]] if column in _HISTORIES else [])]


def _ids(column: pa.ChunkedArray) -> Ids:
    ids: Ids = np.asarray(column.fill_null(_MISSING).cast(pa.int64()), dtype=np.int64) + 1
    return ids


def _lists(column: pa.ChunkedArray) -> History:
    lengths = pc.list_value_length(column).fill_null(0)
    values = _ids(pc.list_flatten(column))
    return History.from_lengths(values, np.asarray(lengths, dtype=np.int64))


def generate_alimama(seed: int = 0) -> Clicks:
    """Generates samples of that shape: Zipf ids, histories of a few distinct rows each."""
    rng = np.random.default_rng(seed)

    def draw(column: str, num: int) -> Ids:
        rows = _GENERATED_ROWS.get(column, _FEW_ROWS)
        drawn: Ids = np.searchsorted(zipf_cdf(rows, 1.0), rng.random(num), "right") + 1
        return drawn

    lengths = np.minimum(rng.geometric(1 / _MEAN_CLICKS, _NUM_GENERATED), _MOST_CLICKS)
    lengths[rng.random(_NUM_GENERATED) < _EMPTY_SHARE] = 0
    histories = {}
    for target in _HISTORIES:
        rows = draw(target, _MOST_DISTINCT * _NUM_GENERATED).reshape(_NUM_GENERATED, -1)
        lists = [rng.choice(some_rows, length) for some_rows, length in zip(rows, lengths)]
        histories[target] = History.from_lists(lists)
    profiles = {column: draw(column, _NUM_GENERATED) for column in _PROFILES}
    return Clicks(
        targets={target: draw(target, _NUM_GENERATED) for target in _HISTORIES},
        histories=histories,
        profiles=profiles,
        clicked=(rng.random(_NUM_GENERATED) < 0.05).astype(np.float32),
    )
