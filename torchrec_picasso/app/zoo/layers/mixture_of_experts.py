"""Multi-gate mixture of experts: tasks share experts, and each weighs them by a gate of its own.

Source: Ma et al., Modeling Task Relationships in Multi-task Learning with Multi-gate
Mixture-of-Experts (KDD 2018), equations 5 to 7.

Shape letters: B samples.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from torchrec_picasso.app.zoo.layers.tower import tower

__all__ = ["MixtureOfExperts"]


class MixtureOfExperts(nn.Module):
    """Gives each task its mixture.

    Args:
        in_size: Columns of the input.
        num_experts: Experts that all tasks share.
        expert_hidden: Layers of each, the last one its output.
        num_tasks: Tasks, with a linear gate each.
    """

    def __init__(
        self, in_size: int, num_experts: int, expert_hidden: Sequence[int], num_tasks: int
    ) -> None:
        super().__init__()
        self.out_size = expert_hidden[-1]
        self.experts = nn.ModuleList(
            tower(in_size, expert_hidden, None) for _ in range(num_experts)
        )
        self.gates = nn.ModuleList(
            nn.Linear(in_size, num_experts, bias=False) for _ in range(num_tasks)
        )

    def forward(self, input_BX: Tensor) -> list[Tensor]:
        """Gives a mixture per task.

        Args:
            input_BX: Shape ``(B, in_size)``.

        Returns:
            Of each task, shape ``(B, out_size)``.
        """
        found = torch.stack([expert(input_BX) for expert in self.experts], dim=1)
        return [
            torch.einsum("be,beo->bo", gate(input_BX).softmax(dim=1), found) for gate in self.gates
        ]
