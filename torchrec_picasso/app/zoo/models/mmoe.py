"""MMoE: several tasks over shared experts, each task with a gate of its own.

Source: Ma et al., Modeling Task Relationships in Multi-task Learning with Multi-gate
Mixture-of-Experts (KDD 2018).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from torchrec_picasso.app.zoo.feature_groups import FeatureGroups, Found, Reads
from torchrec_picasso.app.zoo.layers import tower


class MixtureOfExperts(nn.Module):
    """Shared experts and one linear gate per task, equations 5 to 7.

    Args:
        in_size: Columns of the input.
        num_experts: Shared experts.
        expert_hidden: Units of each expert's layers; the last one is its output.
        num_tasks: Tasks.
    """

    def __init__(
        self, in_size: int, num_experts: int, expert_hidden: Sequence[int], num_tasks: int
    ) -> None:
        super().__init__()
        self.experts = nn.ModuleList(
            tower(in_size, expert_hidden, None) for _ in range(num_experts)
        )
        self.gates = nn.ModuleList(
            nn.Linear(in_size, num_experts, bias=False) for _ in range(num_tasks)
        )

    def forward(self, input_BX: Tensor) -> list[Tensor]:
        """Returns the mixture of each task, shape ``(B, expert_hidden[-1])``."""
        outputs_BEO = torch.stack([expert(input_BX) for expert in self.experts], dim=1)
        return [
            torch.einsum("be,beo->bo", gate(input_BX).softmax(dim=1), outputs_BEO)
            for gate in self.gates
        ]


class MMoE(nn.Module):
    """Reads ``fields``.

    Args:
        num_experts: Shared experts.
        expert_hidden: Units of each expert's layers.
        tower_hidden: Units of each task's layers.
        num_tasks: Tasks.
    """

    reads: ClassVar[Mapping[str, Reads]] = {"fields": Reads("fields")}

    def __init__(
        self,
        embeddings: FeatureGroups,
        num_dense: int,
        num_experts: int = 4,
        expert_hidden: Sequence[int] = (256, 192, 128, 64),
        tower_hidden: Sequence[int] = (256, 192, 128, 64),
        num_tasks: int = 2,
    ) -> None:
        super().__init__()
        width = num_dense + sum(embeddings.dims("fields"))
        self.experts = MixtureOfExperts(width, num_experts, expert_hidden, num_tasks)
        self.towers = nn.ModuleList(
            tower(expert_hidden[-1], tower_hidden) for _ in range(num_tasks)
        )

    def forward(self, found: Found, dense_BI: Tensor) -> Tensor:
        """Returns the logits, shape ``(B, num_tasks)``, or ``(B,)`` for one task."""
        mixtures = self.experts(torch.cat([dense_BI, *found["fields"]], dim=1))
        logits_B1 = [task(mixture) for task, mixture in zip(self.towers, mixtures)]
        if len(logits_B1) == 1:
            return logits_B1[0].squeeze(1)  # labels of one task have no task dimension
        return torch.cat(logits_B1, dim=1)
