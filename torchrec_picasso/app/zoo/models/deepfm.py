"""DeepFM: a factorization machine and a tower over the same embeddings.

Source: Guo et al., DeepFM (arXiv 1703.04247), section 2.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from torchrec_picasso.app.zoo.feature_groups import FeatureGroups, Found, Reads
from torchrec_picasso.app.zoo.layers.factorization_machine import FactorizationMachine
from torchrec_picasso.app.zoo.layers.tower import tower

__all__ = ["DeepFM"]


class DeepFM(nn.Module):
    """Reads the groups ``deep``, all of one dim, and ``wide``, the first-order weights.

    A first-order weight is the sum of its table's columns: FBGEMM has no table of one.

    Args:
        embeddings: Tell the dims.
        num_dense: Dense features, which the linear term and the tower read.
        hidden: Layers of the tower.
        dropout: Of its layers.
    """

    reads: ClassVar[Mapping[str, Reads]] = {
        "deep": Reads("fields"),
        "wide": Reads("fields", dim=4),
    }

    def __init__(
        self,
        embeddings: FeatureGroups,
        num_dense: int,
        hidden: Sequence[int] = (400, 400, 400),
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.linear = nn.Linear(num_dense, 1)
        self.machine = FactorizationMachine()
        width = num_dense + sum(embeddings.dims("deep"))
        self.over_arch = tower(width, hidden, dropout=dropout)

    def forward(self, found: Found, dense_BI: Tensor) -> Tensor:
        """Gives the logits, shape ``(B,)``."""
        first_B = torch.cat(found["wide"], dim=1).sum(dim=1) + self.linear(dense_BI).squeeze(1)
        second_B = self.machine(torch.stack(found["deep"], dim=1))
        joined = torch.cat([dense_BI, *found["deep"]], dim=1)
        logits_B: Tensor = first_B + second_B + self.over_arch(joined).squeeze(1)
        return logits_B
