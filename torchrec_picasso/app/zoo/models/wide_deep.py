"""Wide & Deep: a linear model over ids, beside a tower over embeddings.

Source: Cheng et al., Wide & Deep Learning for Recommender Systems (arXiv 1606.07792), section 3.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from torchrec_picasso.app.zoo.feature_groups import FeatureGroups, Found, Reads
from torchrec_picasso.app.zoo.layers import tower


class WideDeep(nn.Module):
    """Reads ``deep`` and ``wide``.

    A wide weight is the sum of a table's columns, since FBGEMM has no tables of one column.
    """

    reads: ClassVar[Mapping[str, Reads]] = {
        "deep": Reads("fields"),
        "wide": Reads("fields", dim=4),
    }

    def __init__(
        self, embeddings: FeatureGroups, num_dense: int, hidden: Sequence[int] = (1024, 512, 256)
    ) -> None:
        super().__init__()
        self.wide_dense = nn.Linear(num_dense, 1)
        self.over_arch = tower(num_dense + sum(embeddings.dims("deep")), hidden)

    def forward(self, found: Found, dense_BI: Tensor) -> Tensor:
        """Returns the logits, shape ``(B,)``."""
        joined = torch.cat([dense_BI, *found["deep"]], dim=1)
        linear_B = torch.cat(found["wide"], dim=1).sum(dim=1)
        logits_B1 = self.over_arch(joined) + self.wide_dense(dense_BI)
        logits_B: Tensor = logits_B1.squeeze(1) + linear_B
        return logits_B
