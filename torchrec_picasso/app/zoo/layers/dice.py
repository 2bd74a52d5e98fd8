"""Dice: an activation whose kink is where the batch has its mean.

Its statistics are those of a ``BatchNorm1d``, so whoever looks for layers that mix samples finds
them: a batch that has a Dice cannot be cut into micro-batches.

Source: Zhou et al., Deep Interest Network (arXiv 1706.06978), equations 3 and 4.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

__all__ = ["Dice"]


class Dice(nn.Module):
    """``p x + (1 - p) a x`` with ``p`` the sigmoid of the normalised input.

    Args:
        num_units: Units U of the layer before.
        eps: Added to the variance.
    """

    def __init__(self, num_units: int, eps: float = 1e-8) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(num_units, eps=eps, affine=False)
        self.slope_U = nn.Parameter(torch.zeros(num_units))

    def forward(self, values_BU: Tensor) -> Tensor:
        """Gives the activated values.

        Args:
            values_BU: Shape ``(B, U)``.

        Returns:
            Shape ``(B, U)``.
        """
        share_BU = torch.sigmoid(self.norm(values_BU))
        activated_BU: Tensor = values_BU * (share_BU + (1 - share_BU) * self.slope_U)
        return activated_BU
