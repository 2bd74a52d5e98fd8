"""Streams of ids of one table, cut into chunks, and their true counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import chain

import numpy as np
import torch
from hypothesis import strategies as st

from torchrec_picasso.frequency import ModelTable, TableCounts
from torchrec_picasso.frequency.accumulate import CountAccumulator

HUGE = 10_000_000
"""Rows of a table that no test counts densely."""


def chunks_of(num_ids: int) -> st.SearchStrategy[list[list[int]]]:
    """Any stream of ids below ``num_ids`` in any chunks, empty ones included."""
    return st.lists(st.lists(st.integers(0, num_ids - 1), max_size=30), max_size=8)


def table_of(num_embeddings: int | None) -> ModelTable:
    return ModelTable(name="t", num_embeddings=num_embeddings, feature_names=("f",))


def counted(
    chunks: Iterable[Sequence[int] | np.ndarray], num_embeddings: int | None, **budget: int
) -> TableCounts:
    """What an accumulator makes of the chunks; every id is a sample of its own."""
    counter = CountAccumulator(table_of(num_embeddings), **budget)
    for chunk in chunks:
        counter.add("f", torch.tensor(np.asarray(chunk, dtype=np.int64)), len(chunk))
    return counter.result()


def true_counts(chunks: Iterable[Iterable[int]]) -> Counter[int]:
    return Counter(chain.from_iterable(chunks))


def as_dict(rows: torch.Tensor, counts: torch.Tensor) -> dict[int, float]:
    return dict(zip(rows.tolist(), counts.tolist()))


def zipf_ids(num_lookups: int, num_rows: int, exponent: float, seed: int) -> np.ndarray:
    """Skewed ids: row r is drawn in proportion to ``(r + 1) ** -exponent``."""
    weights = np.arange(1, num_rows + 1, dtype=np.float64) ** -exponent
    ends = weights.cumsum()
    drawn = np.random.default_rng(seed).random(num_lookups) * ends[-1]
    return np.searchsorted(ends, drawn)
