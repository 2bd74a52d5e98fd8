"""DIN: the history is summed with attention weights that depend on the target.

Source: Zhou et al., Deep Interest Network (arXiv 1706.06978), section 4.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from torchrec_picasso.app.zoo.feature_groups import SEQUENCE, FeatureGroups, Found, Reads
from torchrec_picasso.app.zoo.layers import AttentionUnit, tower


class DIN(nn.Module):
    """Reads ``target`` and ``history`` from the same tables, and ``profile``.

    Args:
        attention_hidden: Units of the attention layer.
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
        attention_hidden: int = 36,
        hidden: Sequence[int] = (256, 128, 64),
        activation: str = "prelu",
    ) -> None:
        super().__init__()
        dims = embeddings.dims("target")
        self.attention = nn.ModuleList(AttentionUnit(dim, attention_hidden) for dim in dims)
        width = num_dense + 2 * sum(dims) + sum(embeddings.dims("profile"))
        self.over_arch = tower(width, hidden, 1, activation)

    def forward(self, found: Found, dense_BI: Tensor) -> Tensor:
        """Returns the logits, shape ``(B,)``."""
        interests = [
            attend(target, history)
            for attend, target, history in zip(self.attention, found["target"], found["history"])
        ]
        parts = [dense_BI, *found["target"], *interests, *found["profile"]]
        logits_B: Tensor = self.over_arch(torch.cat(parts, dim=1)).squeeze(1)
        return logits_B
