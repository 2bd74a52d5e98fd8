"""The rows that the batch of one rank looks up: a configuration's samples, or drawn from counts.

Shape letters: N lookups, U counted rows; n places.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from torchrec_picasso.app.zoo.data.source import BatchSource
from torchrec_picasso.frequency import FrequencyStats, ModelTable, TableCounts
from torchrec_picasso.frequency.collect import batch_features, batch_ids

Ids = NDArray[np.int64]

ReadBatch = Callable[[int, int], Iterator[tuple[Ids, Ids]]]
"""Gives, by rank and step, for each table the row and the sample of each lookup, both ``(N,)``."""


def from_source(source: BatchSource, tables: Sequence[ModelTable], world_size: int) -> ReadBatch:
    """Reads the batches of a run on ``world_size`` ranks."""

    def read(rank: int, step: int) -> Iterator[tuple[Ids, Ids]]:
        features = batch_features(next(source.batches(rank, world_size, step)))
        for table in tables:
            lengths = [features[name].lengths().numpy() for name in table.feature_names]
            samples = [np.repeat(np.arange(each.size), each) for each in lengths]
            yield batch_ids(features, table), np.concatenate(samples)

    return read


def from_counts(
    stats: FrequencyStats, tables: Sequence[ModelTable], batch_size: int, seed: int
) -> ReadBatch:
    """Draws batches with as many lookups per sample as were counted.

    Rows that were looked up several times keep their share. The other lookups are of rare rows,
    drawn alike often from as many as were seen once and as Chao's bound says that were not seen: so
    batches have as many distinct rows as the sample has, and many of them share few rare ones. Rare
    rows are near those seen once, where the planner's home blocks expect them. Lookups are
    independent, or as many as ``effective_share`` says, each repeated.
    """
    draws = [_Draw.from_counts(stats.tables[table.name]) for table in tables]

    def read(rank: int, step: int) -> Iterator[tuple[Ids, Ids]]:
        rng = np.random.default_rng([seed, step, rank])
        for draw in draws:
            num = round(batch_size * draw.num_lookups / max(1, stats.num_samples))
            yield draw.rows(rng, num), np.arange(num) * batch_size // max(1, num)

    return read


@dataclass(frozen=True, kw_only=True, eq=False)
class _Draw:
    """The distribution of one table's lookups."""

    num_lookups: int
    effective_share: float
    rows_U: Ids
    """Rows that are not rare."""
    below_U: NDArray[np.float64]
    """Probability of these rows up to each one."""
    num_rare: int
    num_others: int
    """Rows that are not in ``rows_U``."""
    start_n: Ids
    """Places among them: 0, and each row seen once."""
    before_n: NDArray[np.float64]
    """Number of rare rows before each place."""
    stride_n: NDArray[np.float64]
    """Distance between rare rows from there to the next place."""

    @staticmethod
    def from_counts(counts: TableCounts) -> _Draw:
        spectrum, is_rare_U = counts.spectrum, counts.counts_U.numpy() == 1
        rows_U = counts.rows_U.numpy()[~is_rare_U]
        others, once_n = counts.num_embeddings - rows_U.size, counts.rows_U.numpy()[is_rare_U]
        rare = float(spectrum.rows_K.sum()) + spectrum.num_unseen - rows_U.size
        num_rare = min(others, round(rare))
        start_n = np.append(0, once_n - np.searchsorted(rows_U, once_n))
        # as many behind each place, as far as there are rows; those left over where there are
        gap_n = np.diff(start_n, append=others)
        num_n = np.minimum(gap_n, num_rare / start_n.size)
        free_n = gap_n - num_n
        num_n += (num_rare - num_n.sum()) * free_n / max(1e-9, free_n.sum())
        shares_U = counts.counts_U.numpy()[~is_rare_U] / max(1, counts.num_lookups)
        return _Draw(
            num_lookups=counts.num_lookups,
            effective_share=counts.effective_share,
            rows_U=rows_U,
            below_U=shares_U.cumsum(),
            num_rare=num_rare,
            num_others=others,
            start_n=start_n,
            before_n=num_n.cumsum() - num_n,
            stride_n=gap_n / np.maximum(1e-9, num_n),
        )

    def rows(self, rng: np.random.Generator, num: int) -> Ids:
        """Draws the rows of ``num`` lookups."""
        independent = int(np.ceil(num * self.effective_share))
        place = np.searchsorted(self.below_U, rng.random(independent), "right")
        if self.num_rare == 0:
            place = place.clip(max=self.rows_U.size - 1)  # the last sum may be below 1 by rounding
        is_rare = place == self.rows_U.size
        rare = rng.integers(max(1, self.num_rare), size=independent)
        last = np.searchsorted(self.before_n, rare, "right") - 1
        further = (rare - self.before_n[last]) * self.stride_n[last]
        # the place of a rare row among others, plus the rows of rows_U below it
        rows = (self.start_n[last] + further.astype(np.int64)).clip(max=self.num_others - 1)
        rows += np.searchsorted(self.rows_U - np.arange(self.rows_U.size), rows, "right")
        rows[~is_rare] = self.rows_U[place[~is_rare]]
        return rows[np.arange(num) * independent // max(1, num)]  # each is repeated
