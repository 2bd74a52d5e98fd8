"""Logistic regression: one weight per id, the baseline of all models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor, nn

from torchrec_picasso.app.zoo.feature_groups import FeatureGroups, Found, Reads


class LogisticRegression(nn.Module):
    """Reads ``wide``; a weight is the sum of a table's columns (FBGEMM has no width of 1)."""

    reads: ClassVar[Mapping[str, Reads]] = {"wide": Reads("fields", dim=4)}

    def __init__(self, embeddings: FeatureGroups, num_dense: int) -> None:
        super().__init__()
        self.linear = nn.Linear(num_dense, 1)

    def forward(self, found: Found, dense_BI: Tensor) -> Tensor:
        """Returns the logits, shape ``(B,)``."""
        return torch.cat(found["wide"], dim=1).sum(dim=1) + self.linear(dense_BI).squeeze(1)
