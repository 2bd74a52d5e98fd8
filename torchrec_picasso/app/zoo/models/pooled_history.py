"""A tower over the target and the mean of the history, the base model of the DIN paper.

Source: Covington et al., Deep Neural Networks for YouTube Recommendations (RecSys 2016); Zhou et
al., Deep Interest Network (arXiv 1706.06978), section 4.2.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import JaggedTensor

from torchrec_picasso.app.zoo.feature_groups import SEQUENCE, FeatureGroups, Found, Reads
from torchrec_picasso.app.zoo.layers import mask_of, padded, tower


class PooledHistory(nn.Module):
    """Reads ``target`` and ``history`` from the same tables, and ``profile``.

    Args:
        with_history: Whether the history is used; without it, the same model measures its gain.
    """

    reads: ClassVar[Mapping[str, Reads]] = {
        "target": Reads("target"),
        "history": Reads("history", SEQUENCE, tables_of="target"),
        "profile": Reads("profile"),
    }

    def __init__(
        self,
        embeddings: FeatureGroups,
        num_dense: int,
        hidden: Sequence[int] = (256, 128, 64),
        activation: str = "prelu",
        with_history: bool = True,
    ) -> None:
        super().__init__()
        self.max_length = embeddings.groups["history"].max_length
        self.with_history = with_history
        width = num_dense + 2 * sum(embeddings.dims("target")) + sum(embeddings.dims("profile"))
        self.over_arch = tower(width, hidden, 1, activation)

    def forward(self, found: Found, dense_BI: Tensor) -> Tensor:
        """Returns the logits, shape ``(B,)``."""
        means = [self._mean(column) for column in found["history"]]
        parts = [dense_BI, *found["target"], *means, *found["profile"]]
        logits_B: Tensor = self.over_arch(torch.cat(parts, dim=1)).squeeze(1)
        return logits_B

    def _mean(self, column: JaggedTensor) -> Tensor:
        num_clicks = mask_of(column, self.max_length).sum(dim=1, keepdim=True).clamp(min=1)
        mean_BD: Tensor = padded(column, self.max_length).sum(dim=1) / num_clicks
        return mean_BD if self.with_history else mean_BD * 0.0
