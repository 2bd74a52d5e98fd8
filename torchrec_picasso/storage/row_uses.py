"""How often the rows of a pack were used lately: what a change of its hot set is decided by.

A use is a batch of one rank that looks the row up, however often in it: so many times the row
travels, or would travel if it were not hot. Homes see the uses of cold rows, each rank its own of
the replicas; nothing is sent to count.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["RowUses"]

_MOST_WEIGHT = 2.0**20  # of a use, so that sums stay far from float32's end


class RowUses:
    """Counts that fade, on one rank.

    Args:
        num_home_rows: Rows at home here.
        num_hot_rows: Replicas.
        device: Where rows are.

    Cost:
        4 bytes for each row, a pass over a batch's rows to count them, over all to settle.
    """

    def __init__(self, num_home_rows: int, num_hot_rows: int, device: torch.device) -> None:
        self.homes_n = torch.zeros(num_home_rows, dtype=torch.float32, device=device)
        """Uses of home rows by all ranks, while they are cold; 0 for hot ones. As
        :meth:`settle` left them, later ones weigh more."""
        self.replicas_h = torch.zeros(num_hot_rows, dtype=torch.float32, device=device)
        """Uses of replicas by this rank, likewise."""
        self._weight = torch.ones(1, dtype=torch.float32, device=device)
        self._weight_on_host = 1.0
        self.num_cold = 0
        """Uses of cold rows at home here since :meth:`begin_window`."""
        self.num_hot = 0
        """Uses of replicas by this rank since then."""

    def count(self, rows_n: Tensor, slots_h: Tensor) -> None:
        """Counts a batch.

        Args:
            rows_n: Home rows that ranks asked for, each once by rank, integer.
            slots_h: Replicas that this rank's batch uses, integer.
        """
        self.homes_n.index_add_(0, rows_n, self._ones(rows_n))
        self.replicas_h.index_add_(0, slots_h, self._ones(slots_h))
        self.num_cold += rows_n.numel()
        self.num_hot += slots_h.numel()

    def begin_window(self) -> None:
        """Begins to count coverage anew."""
        self.num_cold = self.num_hot = 0

    def fade(self, factor: float) -> None:
        """Lets all that was counted weigh less than what comes: that weighs more instead."""
        self._weight /= factor
        self._weight_on_host /= factor
        if self._weight_on_host > _MOST_WEIGHT:
            self.settle()

    def settle(self) -> None:
        """Brings the counts to where the latest use counts 1."""
        self.homes_n /= self._weight
        self.replicas_h /= self._weight
        self._weight.fill_(1.0)
        self._weight_on_host = 1.0

    def _ones(self, of: Tensor) -> Tensor:
        return self._weight.expand(of.numel())
