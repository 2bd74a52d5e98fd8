"""What batches say as wholes, in their order: how lookups of a table depend on each other.

Bursts show in the distinct rows of a batch. Whether a hot set lasts shows when the rows that some
batches look up most are hot in the batches after them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from torchrec_picasso.frequency.counts import TableCounts
from torchrec_picasso.frequency.dependence import INDEPENDENT, SHARES_HOT, Dependence
from torchrec_picasso.frequency.spectrum import CountSpectrum
from torchrec_picasso.frequency.split import WinnersCurse
from torchrec_picasso.frequency.sums import sum_counts

__all__ = ["WholeBatches"]

_MOST_BATCHES = 16
_LEAST_BATCHES = 4  # to choose hot rows from, and to look at after that
_AS_LASTING, _SIGMAS = 0.05, 2.0
"""What hot sets may lack of what is expected of them, and in luck, and still pass for lasting."""


class WholeBatches:
    """The first batches of a sample, of one table.

    Cost:
        A sort per batch; memory of the distinct rows of 16 batches and of their counts.
    """

    def __init__(self) -> None:
        self._num_lookups = 0
        self._batches: list[tuple[Tensor, Tensor]] = []

    @property
    def are_enough(self) -> bool:
        """Whether more batches would tell little."""
        return len(self._batches) == _MOST_BATCHES

    def add(self, ids_of_features: Sequence[Tensor]) -> None:
        """Takes a batch.

        Args:
            ids_of_features: Row ids that each feature looks up, int32 or int64.
        """
        ids_N = torch.cat(list(ids_of_features))
        self._num_lookups += ids_N.numel()
        self._batches.append(ids_N.unique(return_counts=True))

    def told(self, counts: TableCounts) -> TableCounts:
        """Counts of the whole sample that know of it."""
        if len(self._batches) < 2:  # one batch is the whole sample, whose distinct rows are known
            return counts
        spectrum = self._in_bursts(counts.spectrum(), self._batches)
        return replace(
            counts,
            dependence=Dependence(
                effective_share=spectrum.dependence.effective_share,
                persistence=self._persistence(counts.num_embeddings),
            ),
        )

    def _in_bursts(
        self, spectrum: CountSpectrum, batches: Sequence[tuple[Tensor, Tensor]]
    ) -> CountSpectrum:
        """Counts of these batches, or of more, with bursts as these have them."""
        distinct = sum(rows_U.numel() for rows_U, _ in batches) / len(batches)
        return spectrum.with_distinct(self._lookups_per_batch, distinct, len(batches))

    @property
    def _lookups_per_batch(self) -> float:
        return self._num_lookups / len(self._batches)

    def _persistence(self, num_embeddings: int) -> tuple[float, ...]:
        """Of the hot rows that the later half is expected to use, the shares that it does use."""
        if len(self._batches) < _LEAST_BATCHES:
            return INDEPENDENT.persistence
        half = len(self._batches) // 2
        early, later = self._batches[:half], self._batches[half:]
        rows_U, counts_U = early[0]
        for rows_V, counts_V in early[1:]:
            rows_U, counts_U = sum_counts(rows_U, counts_U, rows_V, counts_V)
        if not rows_U.numel():
            return INDEPENDENT.persistence
        spectrum = self._in_bursts(CountSpectrum.of(counts_U, num_embeddings), early)
        curse = WinnersCurse(spectrum, self._lookups_per_batch)
        rank_U = torch.empty_like(counts_U)
        rank_U[counts_U.argsort(descending=True, stable=True)] = torch.arange(rows_U.numel())
        ranks = np.concatenate([_ranks(rows_U, rank_U, rows_V) for rows_V, _ in later])
        persistence = []
        for share in SHARES_HOT:
            num_hot = max(1, round(share * rows_U.numel()))
            expected = spectrum.expected_hot(self._lookups_per_batch, num_hot) - curse.of(num_hot)
            used = int((ranks < num_hot).sum())
            lasts = used / len(later) / max(expected, 1e-9)
            luck = _SIGMAS / max(1, used) ** 0.5
            persistence.append(1.0 if lasts > 1 - max(_AS_LASTING, luck) else lasts)
        return tuple(persistence)


def _ranks(rows_U: Tensor, rank_U: Tensor, rows_V: Tensor) -> np.ndarray:
    """Ranks of those of some rows that are among ascending ones."""
    place_V = torch.searchsorted(rows_U, rows_V).clamp(max=rows_U.numel() - 1)
    found: np.ndarray = rank_U[place_V[rows_U[place_V] == rows_V]].numpy()
    return found
