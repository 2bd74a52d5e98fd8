"""A GRU whose update gate is scaled by attention: interests evolve where they fit the target.

Source: Zhou et al., Deep Interest Evolution Network (arXiv 1809.03672), equations 14 to 16.

Shape letters: B samples, D dim, H hidden units, T positions.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

__all__ = ["AUGRU", "InterestAttention"]


class InterestAttention(nn.Module):
    """How much each position has of a target: softmax over the positions that there are.

    Args:
        hidden_size: Columns H of the states.
        dim: Columns D of the target.
    """

    def __init__(self, hidden_size: int, dim: int) -> None:
        super().__init__()
        self.fit = nn.Linear(dim, hidden_size, bias=False)

    def forward(self, states_BTH: Tensor, target_BD: Tensor, is_there_BT: Tensor) -> Tensor:
        """Gives the weights, zero where there is no position.

        Args:
            states_BTH: Shape ``(B, T, H)``.
            target_BD: Shape ``(B, D)``.
            is_there_BT: Booleans, shape ``(B, T)``.

        Returns:
            Shape ``(B, T)``; they sum to 1, or to 0 without positions.
        """
        scores_BT = torch.einsum("bth,bh->bt", states_BTH, self.fit(target_BD))
        lowest = torch.finfo(scores_BT.dtype).min
        weights_BT = scores_BT.masked_fill(~is_there_BT, lowest).softmax(dim=1)
        return weights_BT * is_there_BT


class AUGRU(nn.Module):
    """Runs over the positions; past the end of a sequence its state stays.

    Args:
        in_size: Columns of the input.
        hidden_size: Columns H of the state.
    """

    def __init__(self, in_size: int, hidden_size: int) -> None:
        super().__init__()
        self._hidden_size = hidden_size
        self.from_input = nn.Linear(in_size, 3 * hidden_size)
        self.gates_from_state = nn.Linear(hidden_size, 2 * hidden_size)
        self.new_from_state = nn.Linear(hidden_size, hidden_size)

    def forward(self, inputs_BTD: Tensor, weights_BT: Tensor) -> Tensor:
        """Gives the last state.

        Args:
            inputs_BTD: Shape ``(B, T, D)``.
            weights_BT: What each position counts, shape ``(B, T)``; 0 leaves the state as it is.

        Returns:
            Shape ``(B, H)``; zero for an empty sequence.
        """
        size = self._hidden_size
        given_BTX = self.from_input(inputs_BTD)
        state_BH = inputs_BTD.new_zeros(inputs_BTD.size(0), size)
        for given_BX, weight_B in zip(given_BTX.unbind(1), weights_BT.unbind(1)):
            gates = given_BX[:, : 2 * size] + self.gates_from_state(state_BH)
            update_BH, reset_BH = gates.sigmoid().split(size, dim=1)
            new_BH = torch.tanh(given_BX[:, 2 * size :] + self.new_from_state(reset_BH * state_BH))
            update_BH = weight_B[:, None] * update_BH
            state_BH = state_BH + update_BH * (new_BH - state_BH)
        return state_BH
