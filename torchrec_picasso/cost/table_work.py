"""Expected rows of one table in a step, as a function of the number of hot rows.

Cumulative sums are computed once per (table, batch size, world size) from the table's spectrum;
each number of hot rows is then an interpolation. Hot rows are evaluated on the sample that they
were selected from, so with many hot rows the number of cold rows is a few percent too low.

Shape letters: K distinct counts, descending: the most frequent rows come first; Q summed
quantities; S first shares of a batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from torchrec_picasso.frequency.spectrum import CountSpectrum

__all__ = ["EARLY_SHARES", "HotSplit", "TableLoad", "TableWork"]

EARLY_SHARES = (1 / 46, 1 / 10, 1 / 3)
"""First shares of a batch with a known number of rows: the first micro-batch of 16 micro-batches,
of 4, and a larger share."""


@dataclass(frozen=True, kw_only=True)
class TableLoad:
    """One table and the lookups of a rank's batch in it.

    Args:
        name: Table name.
        num_embeddings: Number of rows.
        dim: Number of columns.
        lookups: Lookups per rank and step: samples x pooling factor, over all features.
        bags: Bags per rank and step: samples x features; for sequences, the number of lookups.
        num_features: Number of features.
        spectrum: Distribution of lookups over rows; ``None`` = uniform.
        element_bytes: Bytes of a stored element.
        optimizer_share: Bytes of optimizer state divided by bytes of weights.
    """

    name: str
    num_embeddings: int
    dim: int
    lookups: float
    bags: float
    num_features: int = 1
    spectrum: CountSpectrum | None = None
    element_bytes: int = 4
    optimizer_share: float = 0.0

    @property
    def row_bytes(self) -> float:
        """Bytes of a row, including its optimizer state."""
        return self.dim * self.element_bytes * (1 + self.optimizer_share)


@dataclass(frozen=True, kw_only=True)
class HotSplit:
    """Expected distinct rows of a table per step, with its most frequent rows hot.

    Args:
        coverage: Share of lookups of hot rows.
        hot_used: Hot rows in one rank's batch.
        hot_touched: Hot rows in any rank's batch.
        cold_used: Cold rows in one rank's batch.
        cold_touched: Cold rows in any rank's batch.
        cold_early: Cold rows in each of :data:`EARLY_SHARES` of one rank's batch.
        dirty: Cold rows in one rank's batch that are also in any rank's batch before.
        dirty_early: Dirty rows in each of :data:`EARLY_SHARES` of the batch.
    """

    coverage: float
    hot_used: float
    hot_touched: float
    cold_used: float
    cold_touched: float
    cold_early: tuple[float, ...]
    dirty: float
    dirty_early: tuple[float, ...]


class TableWork:
    """Expected rows of one table at one batch size and world size.

    Args:
        load: The table and the lookups of a rank's batch.
        world_size: Number of ranks, each with such a batch.
    """

    def __init__(self, load: TableLoad, world_size: int) -> None:
        self.load = load
        self.world_size = world_size
        all_lookups = load.lookups * world_size
        early = [share * load.lookups for share in EARLY_SHARES]
        # probabilities that a row is in one rank's batch (used), in any rank's batch (touched), and
        # in the first shares of one rank's batch (early)
        if load.spectrum is None or not load.spectrum.num_lookups:
            rows = float(load.num_embeddings)
            self.rows_K = np.array([rows])
            share_K = np.array([1.0])
            self.used_K = np.array([_chance_of_row(rows, load.lookups)])
            self.touched_K = np.array([_chance_of_row(rows, all_lookups)])
            early_SK = [np.array([_chance_of_row(rows, lookups)]) for lookups in early]
            self._unseen_used = self._unseen_touched = 0.0
        else:
            spectrum = load.spectrum
            self.rows_K = spectrum.rows_K.numpy()
            share_K = (spectrum.counts_K * spectrum.rows_K / spectrum.num_lookups).numpy()
            self.used_K = spectrum.presence(load.lookups).numpy()
            self.touched_K = spectrum.presence(all_lookups).numpy()
            early_SK = [spectrum.presence(lookups).numpy() for lookups in early]
            self._unseen_used = spectrum.expected_unseen(load.lookups)
            self._unseen_touched = spectrum.expected_unseen(all_lookups)
        # quantities per row: share of lookups, used, touched, early, dirty, early dirty
        by_rows_QK = [share_K / self.rows_K, self.used_K, self.touched_K, *early_SK]
        # a row is dirty if this batch uses it and, independently, any rank's batch before uses it
        by_rows_QK += [used_K * self.touched_K for used_K in (self.used_K, *early_SK)]
        # sums over the most frequent rows: a row of zeros, then one row of sums per distinct count
        self._end_K = np.concatenate([[0.0], self.rows_K.cumsum()])
        self._sums_KQ = np.zeros((self._end_K.size, len(by_rows_QK)))
        np.cumsum(self.rows_K[:, None] * np.stack(by_rows_QK, 1), axis=0, out=self._sums_KQ[1:])

    @property
    def unique(self) -> float:
        """Expected distinct rows of one rank's batch."""
        return float(self._sums_KQ[-1, 1]) + self._unseen_used

    @property
    def unique_anywhere(self) -> float:
        """Expected distinct rows of all ranks' batches together."""
        return float(self._sums_KQ[-1, 2]) + self._unseen_touched

    def split(self, num_hot: float) -> HotSplit:
        """Computes the expected hot and cold rows of a step.

        Args:
            num_hot: Number of hot rows, the most frequent rows.
        """
        coverage, hot_used, hot_touched, *hot_rest = self._sums_of_first(num_hot)
        # the other quantities of cold rows are those of all rows minus those of hot rows
        total_rest = self._sums_KQ[-1, 3:].tolist()
        cold = [max(0.0, total - hot) for total, hot in zip(total_rest, hot_rest)]
        num_early = len(EARLY_SHARES)
        unseen = [share * self._unseen_used for share in EARLY_SHARES]
        return HotSplit(
            coverage=coverage,
            hot_used=hot_used,
            hot_touched=hot_touched,
            cold_used=max(0.0, self.unique - hot_used),
            cold_touched=max(0.0, self.unique_anywhere - hot_touched),
            cold_early=tuple(seen + new for seen, new in zip(cold[:num_early], unseen)),
            dirty=cold[num_early],
            dirty_early=tuple(cold[num_early + 1 :]),
        )

    def _sums_of_first(self, num_hot: float) -> list[float]:
        """Sums the quantities over the most frequent rows; rows of equal count are interpolated."""
        if num_hot <= 0:
            return [0.0] * self._sums_KQ.shape[1]
        right = int(np.searchsorted(self._end_K, num_hot, side="left"))
        if right >= self._end_K.size:
            return self._sums_KQ[-1].tolist()
        start, end = self._end_K[right - 1], self._end_K[right]
        low, high = self._sums_KQ[right - 1], self._sums_KQ[right]
        sums: list[float] = (low + (high - low) * ((num_hot - start) / (end - start))).tolist()
        return sums


def _chance_of_row(num_rows: float, num_lookups: float) -> float:
    """Computes the probability that uniform lookups contain a row: ``1 - (1 - 1 / R)^n``."""
    return float(-np.expm1(num_lookups * np.log1p(-1 / num_rows))) if num_rows > 1 else 1.0
