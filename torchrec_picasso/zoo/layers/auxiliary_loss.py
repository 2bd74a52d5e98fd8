"""The auxiliary loss of an interest extractor: each state tells the next click from another item.

The published code averages over the positions up to the batch's longest history, so a sample's loss
depends on its neighbours. Here a sample's is the sum over its positions by a fixed number of them,
and the loss is the mean over samples: equal however a batch is cut.

Source: Zhou et al., Deep Interest Evolution Network (arXiv 1809.03672), equation 5.

Shape letters: B samples, D dim, H hidden units, T positions.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from torchrec_picasso.zoo.layers.tower import tower

__all__ = ["AuxiliaryLoss"]


class AuxiliaryLoss(nn.Module):
    """Mean over samples of what the states lack to tell clicks from negatives.

    Args:
        hidden_size: Columns H of the states.
        dim: Columns D of the items.
        hidden: Units of the layers that tell.
    """

    def __init__(self, hidden_size: int, dim: int, hidden: Sequence[int] = (100, 50)) -> None:
        super().__init__()
        self.tell = tower(hidden_size + dim, hidden, 1, "sigmoid")

    def forward(
        self, states_BTH: Tensor, clicks_BTD: Tensor, negatives_BTD: Tensor, is_there_BT: Tensor
    ) -> Tensor:
        """Gives the loss.

        Args:
            states_BTH: After each click, shape ``(B, T, H)``.
            clicks_BTD: The clicks, shape ``(B, T, D)``.
            negatives_BTD: For each click an item that was not clicked, shape ``(B, T, D)``.
            is_there_BT: Where there are clicks, shape ``(B, T)``.

        Returns:
            A scalar.
        """
        states_BsH, follows_Bs = states_BTH[:, :-1], is_there_BT[:, 1:]
        loss_Bs = torch.zeros((), device=states_BTH.device)
        for items_BTD, sign in ((clicks_BTD, -1.0), (negatives_BTD, 1.0)):
            logits_Bs = self.tell(torch.cat([states_BsH, items_BTD[:, 1:]], dim=2)).squeeze(2)
            loss_Bs = loss_Bs + nn.functional.softplus(sign * logits_Bs)
        loss_B = (loss_Bs * follows_Bs).sum(dim=1) / is_there_BT.size(1)
        return loss_B.mean()
