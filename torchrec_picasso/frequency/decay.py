"""Counts that forget: every window of time weighs less the older it is.

A hot set for the next hour should follow the last hours, not the last week. All counts are halved
per half-life, so the sum of weights, and with it the memory of the counts, stays bounded.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby

from torchrec_picasso.errors import InputError
from torchrec_picasso.frequency.accumulate import MAX_ROWS_COUNTED, CountAccumulator
from torchrec_picasso.frequency.stats import FrequencyStats
from torchrec_picasso.frequency.table import ModelTable
from torchrec_picasso.frequency.windows import TimedIds

__all__ = ["decayed_stats"]


def decayed_stats(
    pieces: Iterable[TimedIds],
    tables: Sequence[ModelTable],
    half_life: float,
    *,
    max_rows_counted: int = MAX_ROWS_COUNTED,
) -> FrequencyStats:
    """Statistics of the newest window, older ones weighing less.

    Args:
        pieces: Windows in order of time, see :mod:`torchrec_picasso.frequency.windows`.
        tables: The tables, each with its ``num_embeddings``.
        half_life: Windows after which a lookup counts half.
        max_rows_counted: Rows of a table that are counted one by one, about.

    Returns:
        Statistics with float64 counts, unless all is of one window.

    Raises:
        InputError: If ``half_life`` is not above 0, or a table's size is not known.
    """
    if not half_life > 0:
        raise InputError(f"half_life is {half_life!r}, expected a number of windows above 0")
    unknown = [table.name for table in tables if table.num_embeddings is None]
    if unknown:
        raise InputError(
            f"tables {unknown} have no num_embeddings; windows add up only for tables of a known "
            "size"
        )
    stats, newest = None, 0
    for number, of_window in groupby(pieces, key=lambda piece: piece.window):
        counters = {table.name: CountAccumulator(table, max_rows_counted) for table in tables}
        num_samples = 0
        for piece in of_window:
            num_samples += piece.num_samples
            for (name, feature), ids_N in piece.ids.items():
                counters[name].add(feature, ids_N, piece.num_samples)
        of_now = FrequencyStats(
            tables={name: counter.result() for name, counter in counters.items()},
            num_samples=num_samples,
        )
        if stats is not None:
            faded = stats.decayed(0.5 ** ((number - newest) / half_life))
            of_now = faded.merge(of_now, max_rows_counted=max_rows_counted)
        stats, newest = of_now, number
    if stats is None:
        return FrequencyStats(
            tables={table.name: CountAccumulator(table, 1).result() for table in tables}
        )
    return stats
