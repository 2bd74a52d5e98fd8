"""DHEN: layers of attention beside linear layers, over many fields.

Source: Zhang et al., DHEN: A Deep and Hierarchical Ensemble Network for Large-Scale Click-Through
Rate Prediction (arXiv 2203.11014).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from torchrec_picasso.app.zoo.feature_groups import FeatureGroups, Found, Reads
from torchrec_picasso.app.zoo.layers.dhen_layer import DHENLayer
from torchrec_picasso.app.zoo.layers.tower import tower

__all__ = ["DHEN"]


class DHEN(nn.Module):
    """Reads the group ``fields``, all of one dim; the dense features become one more field.

    Args:
        embeddings: Tell the dims.
        num_dense: Dense features.
        num_layers: Layers.
        layer_fields: Fields that each part of a layer gives.
        num_heads: Heads of the attention.
        hidden: Last layers.
        activation: Of these.
    """

    reads: ClassVar[Mapping[str, Reads]] = {
        "fields": Reads("fields"),
    }

    def __init__(
        self,
        embeddings: FeatureGroups,
        num_dense: int,
        num_layers: int = 2,
        layer_fields: int = 32,
        num_heads: int = 4,
        hidden: Sequence[int] = (512, 256),
        activation: str = "relu",
    ) -> None:
        super().__init__()
        (dim,) = set(embeddings.dims("fields"))
        self.dense_arch = nn.Linear(num_dense, dim)
        in_fields, out_fields = len(embeddings.dims("fields")) + 1, 2 * layer_fields
        ins = [in_fields, *[out_fields] * (num_layers - 1)]
        self.layers = nn.Sequential(*(DHENLayer(of, dim, layer_fields, num_heads) for of in ins))
        self.over_arch = tower(out_fields * dim, hidden, 1, activation)

    def forward(self, found: Found, dense_BI: Tensor) -> Tensor:
        """Gives the logits, shape ``(B,)``."""
        fields_BFD = torch.stack([self.dense_arch(dense_BI), *found["fields"]], dim=1)
        logits_B: Tensor = self.over_arch(self.layers(fields_BFD).flatten(1)).squeeze(1)
        return logits_B
