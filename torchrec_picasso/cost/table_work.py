"""What one table asks of a step: expected rows as a function of how many of its rows are hot.

Built once per (table, batch, world size) from the table's spectrum; every question afterwards is
an interpolation in cumulative sums, so trying thousands of hot sets costs nothing. Hot rows are
judged by the sample that chose them: cold rows are a few percent low where many rows are hot.

Shape letters: K distinct counts, descending: the hottest rows come first; Q quantities of rows that
add up; S first parts of a batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from torchrec_picasso.frequency.spectrum import CountSpectrum

__all__ = ["EARLY_SHARES", "HotSplit", "TableLoad", "TableWork"]

EARLY_SHARES = (1 / 46, 1 / 10, 1 / 3)
"""First parts of a batch whose rows are known: the first micro-batch of 16, of 4, and more."""


@dataclass(frozen=True, kw_only=True)
class TableLoad:
    """One table and what a rank's batch looks up in it.

    Args:
        name: Table name.
        num_embeddings: Rows.
        dim: Columns.
        lookups: Lookups per rank and step: samples x pooling factor, over all its features.
        bags: Bags per rank and step: samples x features; of sequences, lookups.
        num_features: Features that look it up.
        spectrum: How its lookups spread over rows; ``None`` = evenly.
        element_bytes: Bytes of a stored element.
        optimizer_share: Optimizer state as a share of the weights' bytes.
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
        """Bytes of a row with its optimizer state."""
        return self.dim * self.element_bytes * (1 + self.optimizer_share)


@dataclass(frozen=True, kw_only=True)
class HotSplit:
    """A table's expected rows per step when its ``num_hot`` most frequent rows are hot.

    Args:
        num_hot: Hot rows.
        coverage: Share of lookups that replicas serve.
        hot_used: Hot rows that one rank's batch uses.
        hot_touched: Hot rows that any rank's batch uses.
        cold_used: Cold rows that one rank's batch uses.
        cold_touched: Cold rows that any rank's batch uses.
        cold_early: Cold rows that the first :data:`EARLY_SHARES` of one rank's batch use.
        dirty: Cold rows that one rank's batch uses and any rank's batch before it.
        dirty_early: Likewise of the first parts of the batch.
    """

    num_hot: float
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
        load: The table.
        world_size: Ranks with a batch like this one's.
    """

    def __init__(self, load: TableLoad, world_size: int) -> None:
        self.load = load
        self.world_size = world_size
        all_lookups = load.lookups * world_size
        early = [share * load.lookups for share in EARLY_SHARES]
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
        by_rows_QK = [share_K / self.rows_K, self.used_K, self.touched_K, *early_SK]
        # a row is dirty if this batch uses it and, independently, some rank's batch before does
        by_rows_QK += [used_K * self.touched_K for used_K in (self.used_K, *early_SK)]
        self._end_K = np.concatenate([[0.0], self.rows_K.cumsum()])
        self._sums_KQ = np.zeros((self._end_K.size, len(by_rows_QK)))
        np.cumsum(self.rows_K[:, None] * np.stack(by_rows_QK, 1), axis=0, out=self._sums_KQ[1:])

    @property
    def unique(self) -> float:
        """Distinct rows of one rank's batch."""
        return float(self._sums_KQ[-1, 1]) + self._unseen_used

    @property
    def unique_anywhere(self) -> float:
        """Distinct rows of all ranks' batches together."""
        return float(self._sums_KQ[-1, 2]) + self._unseen_touched

    def split(self, num_hot: float) -> HotSplit:
        """What a hot set of the most frequent rows leaves to do.

        Args:
            num_hot: Hot rows; rows of equal count are taken in part.
        """
        coverage, hot_used, hot_touched, *rest = self._sums_of_first(num_hot)
        all_rest = self._sums_KQ[-1, 3:].tolist()
        left = [max(0.0, total - hot) for total, hot in zip(all_rest, rest)]
        num_early = len(EARLY_SHARES)
        unseen = [share * self._unseen_used for share in EARLY_SHARES]
        return HotSplit(
            num_hot=num_hot,
            coverage=coverage,
            hot_used=hot_used,
            hot_touched=hot_touched,
            cold_used=max(0.0, self.unique - hot_used),
            cold_touched=max(0.0, self.unique_anywhere - hot_touched),
            cold_early=tuple(cold + new for cold, new in zip(left[:num_early], unseen)),
            dirty=left[num_early],
            dirty_early=tuple(left[num_early + 1 :]),
        )

    def _sums_of_first(self, num_hot: float) -> list[float]:
        """The sums over the most frequent rows; rows of equal count in part."""
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
    return float(-np.expm1(num_lookups * np.log1p(-1 / num_rows))) if num_rows > 1 else 1.0
