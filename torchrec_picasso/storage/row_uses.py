"""Access counts of a pack's rows with exponential decay; refreshes of the hot set use them.

An access ("use") is a batch of one rank that looks the row up, however many times: an access is one
transfer of the row, or would be one if the row were not hot. Home ranks count accesses of cold
rows, each rank counts its own accesses of replicas; counting sends nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

_MOST_WEIGHT = 2.0**20  # weight of an access; keeps sums in float32's range


class RowUses:
    """Decayed access counts on one rank.

    Counts are not multiplied by the decay factor; new accesses get a larger weight instead, and
    :meth:`rescale` rescales all counts. 4 bytes per row; one pass over a batch's rows to count, one
    pass over all rows to rescale.
    """

    def __init__(self, num_home_rows: int, num_hot_rows: int, device: torch.device) -> None:
        self.homes_n = torch.zeros(num_home_rows, dtype=torch.float32, device=device)
        """Accesses of the n home rows by all ranks, float32, 0 for hot rows. Only after
        :meth:`rescale` the latest access has weight 1."""
        self.replicas_H = torch.zeros(num_hot_rows, dtype=torch.float32, device=device)
        """Accesses of the H replicas by this rank, float32, with the same weights."""
        self._one = torch.ones(1, dtype=torch.float32, device=device)
        self._weight = 1.0
        self.num_cold = 0
        """Accesses of cold home rows on this rank since :meth:`begin_window`."""
        self.num_hot = 0
        """Accesses of replicas by this rank since :meth:`begin_window`."""

    def count(self, rows_n: Tensor, slots_h: Tensor) -> None:
        """Counts the accesses of a batch. Home rows, integers, are those that ranks requested, at
        most once per rank; hot slots, int64, those that this rank's batch uses."""
        # Every entry adds the current weight; several ranks may request the same row.
        for counts, indices in ((self.homes_n, rows_n), (self.replicas_H, slots_h)):
            counts.index_add_(0, indices, self._one.expand(len(indices)), alpha=self._weight)
        self.num_cold += rows_n.numel()
        self.num_hot += slots_h.numel()

    def begin_window(self) -> None:
        """Resets the counts of the coverage window."""
        self.num_cold = self.num_hot = 0

    def decay(self, factor: float) -> None:
        """Decays all earlier counts by a factor below 1: raises the weight of later accesses."""
        self._weight /= factor
        if self._weight > _MOST_WEIGHT:
            self.rescale()

    def rescale(self) -> None:
        """Rescales the counts so that the latest access has weight 1."""
        self.homes_n /= self._weight
        self.replicas_H /= self._weight
        self._weight = 1.0
