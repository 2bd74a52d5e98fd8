"""Generated ids in order of time, of which others are popular every hour.

How often the most popular row, the second, ... is looked up stays as it is; which rows these are
changes, so that a hot set goes stale and another one, as good, could take its place.
"""

from __future__ import annotations

import numpy as np

from torchrec_picasso.app.zoo.data.generated import zipf_cdf
from torchrec_picasso.app.zoo.data.history import Ids
from torchrec_picasso.errors import InputError

__all__ = ["generate_drifting"]


def generate_drifting(
    hours: int,
    ids_per_hour: int,
    *,
    num_rows: int = 20_000,
    exponent: float = 1.0,
    turnover: float = 0.2,
    seed: int = 0,
) -> tuple[Ids, Ids]:
    """Draws ids hour by hour.

    Args:
        hours: Of the stream.
        ids_per_hour: Ids drawn in each.
        num_rows: Rows that there are.
        exponent: The k-th most popular row is drawn with probability proportional to
            ``k ** -exponent``.
        turnover: Part of the rows that change popularity among themselves when an hour ends; 0 is a
            stream that does not drift.
        seed: Draws everything.

    Returns:
        Ids and the hour of each, from 0 on, int64, both ``(hours * ids_per_hour,)``.

    Raises:
        InputError: If ``turnover`` is not from 0 to 1.
    """
    if not 0 <= turnover <= 1:
        raise InputError(f"turnover is {turnover}, expected a part of the rows, from 0 to 1")
    rng = np.random.default_rng(seed)
    cdf = zipf_cdf(num_rows, exponent)
    row_by_rank = rng.permutation(num_rows)
    ids = []
    for _ in range(hours):
        rank_n = np.searchsorted(cdf, rng.random(ids_per_hour), "right")
        ids.append(row_by_rank[rank_n].astype(np.int64))
        changed = np.flatnonzero(rng.random(num_rows) < turnover)
        row_by_rank[changed] = row_by_rank[rng.permutation(changed)]
    return np.concatenate(ids), np.repeat(np.arange(hours, dtype=np.int64), ids_per_hour)
