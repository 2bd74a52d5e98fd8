"""MMoE: several tasks over shared experts.

Source: Ma et al., Modeling Task Relationships in Multi-task Learning with Multi-gate
Mixture-of-Experts (KDD 2018).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from torchrec_picasso.app.zoo.feature_groups import FeatureGroups, Found, Reads
from torchrec_picasso.app.zoo.layers.mixture_of_experts import MixtureOfExperts
from torchrec_picasso.app.zoo.layers.tower import tower

__all__ = ["MMoE"]


class MMoE(nn.Module):
    """Reads the group ``fields``.

    Args:
        embeddings: Tell the dims.
        num_dense: Dense features, read beside the fields.
        num_experts: Shared experts.
        expert_hidden: Layers of each.
        tower_hidden: Layers of each task.
        num_tasks: Tasks.
    """

    reads: ClassVar[Mapping[str, Reads]] = {
        "fields": Reads("fields"),
    }

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
            tower(self.experts.out_size, tower_hidden) for _ in range(num_tasks)
        )

    def forward(self, found: Found, dense_BI: Tensor) -> Tensor:
        """Gives the logits, shape ``(B, num_tasks)``, or ``(B,)`` of one task."""
        mixtures = self.experts(torch.cat([dense_BI, *found["fields"]], dim=1))
        logits_B1 = [task(mixture) for task, mixture in zip(self.towers, mixtures)]
        if len(logits_B1) == 1:
            return logits_B1[0].squeeze(1)  # as the labels of one task
        return torch.cat(logits_B1, dim=1)
