"""Wukong: stacked factorization machines.

Source: Zhang et al., Wukong: Towards a Scaling Law for Large-Scale Recommendation (arXiv
2403.02545).

Shape letters: B samples, D embedding columns, F fields.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from torchrec_picasso.app.zoo.feature_groups import FeatureGroups, Found, Reads
from torchrec_picasso.app.zoo.layers import tower


class WukongLayer(nn.Module):
    """``LN(concat(FMB(X), LCB(X)) + residual(X))``, section 3 of the paper.

    Args:
        in_fields: Input fields F.
        dim: Columns D of a field.
        num_interacted: Output fields of the factorization machine block (FMB).
        num_compressed: Output fields of the linear compression block (LCB).
        rank: Columns that pairwise products are projected to.
        hidden: Units of the layers over the products.
    """

    def __init__(
        self,
        in_fields: int,
        dim: int,
        num_interacted: int,
        num_compressed: int,
        rank: int,
        hidden: Sequence[int],
    ) -> None:
        super().__init__()
        self._dim, out_fields = dim, num_interacted + num_compressed
        self.project = nn.Linear(in_fields, rank, bias=False)
        self.norm_of_products = nn.LayerNorm(in_fields * rank)
        self.over_products = tower(in_fields * rank, hidden, num_interacted * dim)
        self.compress = nn.Linear(in_fields, num_compressed, bias=False)
        is_same = in_fields == out_fields
        self.residual = nn.Identity() if is_same else nn.Linear(in_fields, out_fields, False)
        self.norm = nn.LayerNorm(dim)

    def forward(self, fields_BFD: Tensor) -> Tensor:
        """Maps fields ``(B, F, D)`` to ``(B, num_interacted + num_compressed, D)``."""
        by_column_BDF = fields_BFD.transpose(1, 2)
        products = torch.bmm(fields_BFD, self.project(by_column_BDF)).flatten(1)
        interacted = self.over_products(self.norm_of_products(products)).unflatten(
            1, (-1, self._dim)
        )
        compressed = self.compress(by_column_BDF).transpose(1, 2)
        residual = self.residual(by_column_BDF).transpose(1, 2)
        out: Tensor = self.norm(torch.cat([interacted, compressed], dim=1) + residual)
        return out


class Wukong(nn.Module):
    """Reads ``fields``, all of one dim; the dense features become one more field.

    Args:
        dense_hidden: Units of the layers over the dense features.
        num_layers: Wukong layers.
        num_interacted: Output fields of a layer's factorization machines.
        num_compressed: Output fields of a layer's linear compression.
        rank: Columns that pairwise products are projected to.
        layer_hidden: Units of the layers over the products.
    """

    reads: ClassVar[Mapping[str, Reads]] = {"fields": Reads("fields")}

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
        """Returns the logits, shape ``(B,)``."""
        fields_BFD = torch.stack([self.dense_arch(dense_BI), *found["fields"]], dim=1)
        logits_B: Tensor = self.over_arch(self.layers(fields_BFD).flatten(1)).squeeze(1)
        return logits_B
