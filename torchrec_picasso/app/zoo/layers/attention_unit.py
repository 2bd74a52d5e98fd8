"""A local activation unit over jagged histories: each click weighs by what it has of the target.

Weights are not normalised, so that the strength of an interest stays. Nothing is padded: the work
is that of the clicks there are. What the first layer makes of the target alone is the same for all
clicks of a sample, and is computed once for them.

Source: Zhou et al., Deep Interest Network (arXiv 1706.06978), section 4.3.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import JaggedTensor

__all__ = ["AttentionUnit"]


class AttentionUnit(nn.Module):
    """Sums a history by its fit to a target.

    Args:
        dim: Columns D of both.
        hidden: Units of the layer that weighs.
    """

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        # of a click, the target and their product, side by side
        self.weigh = nn.Sequential(nn.Linear(3 * dim, hidden), nn.Tanh(), nn.Linear(hidden, 1))

    def forward(self, target_BD: Tensor, history: JaggedTensor) -> Tensor:
        """Gives the weighted sums, zero for an empty history.

        Args:
            target_BD: What may be clicked next, shape ``(B, D)``.
            history: Embeddings of the clicks before, ``(N, D)`` in B lists.

        Returns:
            Shape ``(B, D)``.
        """
        rows_ND, lengths_B = history.values(), history.lengths()
        sample_N = torch.repeat_interleave(
            torch.arange(lengths_B.numel(), device=lengths_B.device),
            lengths_B,
            output_size=rows_ND.size(0),
        )
        first, act, last = self.weigh
        assert isinstance(first, nn.Linear)
        of_click, of_target, of_product = first.weight.split(rows_ND.size(1), dim=1)
        hidden_BH = nn.functional.linear(target_BD, of_target, first.bias)
        product_ND = rows_ND * target_BD.index_select(0, sample_N)
        hidden_NH = (
            hidden_BH.index_select(0, sample_N)
            + nn.functional.linear(rows_ND, of_click)
            + nn.functional.linear(product_ND, of_product)
        )
        weighted_ND = rows_ND * last(act(hidden_NH))
        return torch.zeros_like(target_BD).index_add(0, sample_N, weighted_ND)
