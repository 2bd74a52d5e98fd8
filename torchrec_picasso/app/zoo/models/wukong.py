"""Wukong: stacked factorization machines.

Source: Zhang et al., Wukong: Towards a Scaling Law for Large-Scale Recommendation (arXiv
2403.02545).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from torchrec_picasso.app.zoo.feature_groups import FeatureGroups, Found, Reads
from torchrec_picasso.app.zoo.layers.tower import tower
from torchrec_picasso.app.zoo.layers.wukong_layer import WukongLayer

__all__ = ["Wukong"]


class Wukong(nn.Module):
    """Reads the group ``fields``, all of one dim; the dense features become one more field.

    Args:
        embeddings: Tell the dims.
        num_dense: Dense features.
        dense_hidden: Layers under them.
        num_layers: Wukong layers.
        num_interacted: Fields that a layer's factorization machines give.
        num_compressed: Fields that its linear compression gives.
        rank: Columns that pairwise products are projected to.
        layer_hidden: Layers over the products.
        hidden: Last layers.
    """

    reads: ClassVar[Mapping[str, Reads]] = {
        "fields": Reads("fields"),
    }

    def __init__(
        self,
        embeddings: FeatureGroups,
        num_dense: int,
        dense_hidden: Sequence[int] = (512, 256, 128),
        num_layers: int = 2,
        num_interacted: int = 16,
        num_compressed: int = 16,
        rank: int = 24,
        layer_hidden: Sequence[int] = (512,),
        hidden: Sequence[int] = (512, 64),
    ) -> None:
        super().__init__()
        (dim,) = set(embeddings.dims("fields"))
        self.dense_arch = tower(num_dense, dense_hidden, dim)
        in_fields, out_fields = len(embeddings.dims("fields")) + 1, num_interacted + num_compressed
        sizes = (dim, num_interacted, num_compressed, rank, layer_hidden)
        self.layers = nn.Sequential(
            *(
                WukongLayer(out_fields if index else in_fields, *sizes)
                for index in range(num_layers)
            )
        )
        self.over_arch = tower(out_fields * dim, hidden)

    def forward(self, found: Found, dense_BI: Tensor) -> Tensor:
        """Gives the logits, shape ``(B,)``."""
        fields_BFD = torch.stack([self.dense_arch(dense_BI), *found["fields"]], dim=1)
        logits_B: Tensor = self.over_arch(self.layers(fields_BFD).flatten(1)).squeeze(1)
        return logits_B
