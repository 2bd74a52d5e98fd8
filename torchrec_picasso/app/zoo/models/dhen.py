"""DHEN: stacked layers of self-attention beside a linear map, over many fields.

Source: Zhang et al., DHEN: A Deep and Hierarchical Ensemble Network for Large-Scale Click-Through
Rate Prediction (arXiv 2203.11014).

Shape letters: B samples, D embedding columns, F fields.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from torchrec_picasso.app.zoo.feature_groups import FeatureGroups, Found, Reads
from torchrec_picasso.app.zoo.layers import tower


class DHENLayer(nn.Module):
    """``Norm(concat(self-attention(X), linear(X)) + shortcut(X))``, section 3 of the paper.

    Args:
        in_fields: Input fields F.
        dim: Columns D of a field.
        out_fields: Fields of each of the two branches.
        num_heads: Attention heads.
    """

    def __init__(self, in_fields: int, dim: int, out_fields: int, num_heads: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(dim, num_heads, batch_first=True)
        self.compress_attended = nn.Linear(in_fields, out_fields)
        self.linear = nn.Linear(in_fields, out_fields)
        is_same = in_fields == 2 * out_fields
        self.shortcut = nn.Identity() if is_same else nn.Linear(in_fields, 2 * out_fields)
        self.norm = nn.LayerNorm(dim)

    def forward(self, fields_BFD: Tensor) -> Tensor:
        """Maps fields ``(B, F, D)`` to ``(B, 2 * out_fields, D)``."""
        attended, _ = self.attention(fields_BFD, fields_BFD, fields_BFD, need_weights=False)
        by_column_BDF = fields_BFD.transpose(1, 2)
        branches = torch.cat(
            [self.compress_attended(attended.transpose(1, 2)), self.linear(by_column_BDF)], dim=2
        )
        out: Tensor = self.norm((branches + self.shortcut(by_column_BDF)).transpose(1, 2))
        return out


class DHEN(nn.Module):
    """Reads ``fields``, all of one dim; the dense features become one more field.

    Args:
        num_layers: DHEN layers.
        layer_fields: Output fields of each branch of a layer.
        num_heads: Attention heads.
    """

    reads: ClassVar[Mapping[str, Reads]] = {"fields": Reads("fields")}

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
        self.layers = nn.Sequential(
            *(
                DHENLayer(out_fields if index else in_fields, dim, layer_fields, num_heads)
                for index in range(num_layers)
            )
        )
        self.over_arch = tower(out_fields * dim, hidden, 1, activation)

    def forward(self, found: Found, dense_BI: Tensor) -> Tensor:
        """Returns the logits, shape ``(B,)``."""
        fields_BFD = torch.stack([self.dense_arch(dense_BI), *found["fields"]], dim=1)
        logits_B: Tensor = self.over_arch(self.layers(fields_BFD).flatten(1)).squeeze(1)
        return logits_B
