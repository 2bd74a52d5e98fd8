"""Models, batches, streams of ids and statistics that the tests of frequency share."""

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import chain

import numpy as np
import torch
import torchrec
from hypothesis import strategies as st
from torch import nn

from tests.support.tables import Table, bags_of, sequences_of
from torchrec_picasso.frequency import FrequencyStats, ModelTable, TableCounts
from torchrec_picasso.frequency.counts import MAX_ROWS_COUNTED, LookupCounter

META = torch.device("meta")
ROWS = {"small": 3, "large": 40}
HUGE = 10_000_000
"""Rows of a table that no test counts densely."""


class TwoCollections(nn.Module):
    """A pooled and a sequence collection; feature ``shared`` looks up a table of each."""

    def __init__(self) -> None:
        super().__init__()
        pooled = [Table("a", 4, 10, ("f0", "shared")), Table("b", 8, 6, ("f1",))]
        self.pooled = bags_of(pooled, "meta")
        self.sequence = sequences_of([Table("c", 4, 10, ("shared",))], "meta")


def kjt(**bags: list[list[int]]) -> torchrec.KeyedJaggedTensor:
    """A batch from one list of bags per feature."""
    return torchrec.KeyedJaggedTensor.from_lengths_sync(
        list(bags),
        torch.tensor([i for feature in bags.values() for bag in feature for i in bag]).long(),
        torch.tensor([len(bag) for feature in bags.values() for bag in feature]).long(),
    )


def table_counts(num_embeddings: int, counts: dict[int, int]) -> TableCounts:
    rows = sorted(counts)
    return TableCounts(
        num_embeddings=num_embeddings,
        feature_names=("f",),
        rows_U=torch.tensor(rows, dtype=torch.int64),
        counts_U=torch.tensor([counts[row] for row in rows], dtype=torch.int64),
    )


def make_stats(rows: dict[str, int], counts: dict[str, dict[int, int]]) -> FrequencyStats:
    tables = {name: table_counts(rows[name], counts.get(name, {})) for name in rows}
    return FrequencyStats(tables=tables, num_batches=2, num_samples=7)


def stats_of(rows: dict[str, int]) -> st.SearchStrategy[FrequencyStats]:
    """Any counts of any rows of the tables, none at all included."""
    counts = {
        name: st.dictionaries(st.integers(0, size - 1), st.integers(1, 9))
        for name, size in rows.items()
    }
    return st.fixed_dictionaries(counts).map(lambda drawn: make_stats(rows, drawn))


def dense_counts(counts: TableCounts) -> np.ndarray:
    """Counts of every row, seen or not."""
    dense = np.zeros(counts.num_embeddings, dtype=np.int64)
    dense[counts.rows_U.numpy()] = counts.counts_U.numpy()
    return dense


def chunks_of(num_ids: int) -> st.SearchStrategy[list[list[int]]]:
    """Any stream of ids below ``num_ids`` in any chunks, empty ones included."""
    return st.lists(st.lists(st.integers(0, num_ids - 1), max_size=30), max_size=8)


def table_of(num_embeddings: int | None) -> ModelTable:
    return ModelTable(name="t", num_embeddings=num_embeddings, feature_names=("f",))


def counted(
    chunks: Iterable[Sequence[int] | np.ndarray],
    num_embeddings: int | None,
    max_rows_counted: int = MAX_ROWS_COUNTED,
) -> TableCounts:
    """Returns what an accumulator makes of the chunks."""
    counter = LookupCounter(table_of(num_embeddings), max_rows_counted)
    for chunk in chunks:
        counter.add(np.asarray(chunk, dtype=np.int64))
    return counter.result()


def true_counts(chunks: Iterable[Iterable[int]]) -> Counter[int]:
    return Counter(chain.from_iterable(chunks))


def as_dict(counts: TableCounts) -> dict[int, int]:
    return dict(zip(counts.rows_U.tolist(), counts.counts_U.tolist()))


def zipf_ids(num_lookups: int, num_rows: int, exponent: float, seed: int) -> np.ndarray:
    """Skewed ids: row r is drawn in proportion to ``(r + 1) ** -exponent``."""
    weights = np.arange(1, num_rows + 1, dtype=np.float64) ** -exponent
    ends = weights.cumsum()
    drawn = np.random.default_rng(seed).random(num_lookups) * ends[-1]
    return np.searchsorted(ends, drawn)
