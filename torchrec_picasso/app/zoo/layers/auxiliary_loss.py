"""The auxiliary loss of an interest extractor: each state tells the next click from another item.

The published code averages over the positions up to the batch's longest history, so a sample's loss
depends on its neighbours. Here a sample's is the sum over its positions by a fixed number of them,
and the loss is the mean over samples: equal however a batch is cut. Nothing is padded: the work is
that of the clicks there are.

Source: Zhou et al., Deep Interest Evolution Network (arXiv 1809.03672), equation 5.

Shape letters: B samples, D dim, H hidden units, N clicks, T positions.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import JaggedTensor

from torchrec_picasso.app.zoo.layers.tower import tower

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

    def forward(self, states_BTH: Tensor, clicks: JaggedTensor, negatives_ND: Tensor) -> Tensor:
        """Gives the loss.

        Args:
            states_BTH: After each click, shape ``(B, T, H)``; clicks from T on do not count.
            clicks: ``(N, D)`` in B lists.
            negatives_ND: For each click an item that was not clicked, shape ``(N, D)``.

        Returns:
            A scalar.
        """
        (num_samples, max_length, _), clicks_ND = states_BTH.shape, clicks.values()
        offsets, num_clicks = clicks.offsets().long(), clicks_ND.size(0)
        before_BTH = nn.functional.pad(states_BTH, (0, 0, 1, 0))[:, :-1]
        before_NH, _ = torch.ops.fbgemm.dense_to_jagged(before_BTH, [offsets], num_clicks)
        starts_N = torch.repeat_interleave(offsets[:-1], clicks.lengths(), output_size=num_clicks)
        place_N = torch.arange(num_clicks, device=offsets.device) - starts_N
        counts_N = (place_N > 0) & (place_N < max_length)  # no state comes before a first click
        loss_N = torch.zeros((), device=states_BTH.device)
        for items_ND, sign in ((clicks_ND, -1.0), (negatives_ND, 1.0)):
            logits_N = self.tell(torch.cat([before_NH, items_ND], dim=1)).squeeze(1)
            loss_N = loss_N + nn.functional.softplus(sign * logits_N)
        return (loss_N * counts_N).sum() / (max_length * num_samples)
