"""A time series layer: the history weighed by its products with the target.

Source: Ishkhanov et al., Time-based Sequence Model for Personalization and Recommendation Systems
(arXiv 2008.11922), section 3.

Shape letters: B samples, D dim, T positions.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from torchrec_picasso.app.zoo.layers.tower import tower

__all__ = ["TimeSeriesLayer"]


class TimeSeriesLayer(nn.Module):
    """Weighs the steps of a history by layers over their inner products with the target.

    Args:
        num_steps: Steps T of a history.
        hidden: Layers over the products.
    """

    def __init__(self, num_steps: int, hidden: Sequence[int]) -> None:
        super().__init__()
        self.weigh = tower(num_steps, hidden, num_steps)

    def forward(self, target_BD: Tensor, history_BTD: Tensor) -> Tensor:
        """Gives the weighted history.

        Args:
            target_BD: Shape ``(B, D)``.
            history_BTD: Shape ``(B, T, D)``.

        Returns:
            Shape ``(B, D)``.
        """
        unit_BTD = nn.functional.normalize(history_BTD, dim=2)
        unit_BD = nn.functional.normalize(target_BD, dim=1)
        products_BT = torch.einsum("btd,bd->bt", unit_BTD, unit_BD)
        return torch.einsum("bt,btd->bd", self.weigh(products_BT), history_BTD)
