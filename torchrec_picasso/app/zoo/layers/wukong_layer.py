"""A layer of stacked factorization machines beside a linear compression of the fields.

Source: Zhang et al., Wukong: Towards a Scaling Law for Large-Scale Recommendation (arXiv
2403.02545), section 3.

Shape letters: B samples, D dim, F features.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from torchrec_picasso.app.zoo.layers.tower import tower

__all__ = ["WukongLayer"]


class WukongLayer(nn.Module):
    """From some fields to others: ``LN(concat(FMB(X), LCB(X)) + residual(X))``.

    Args:
        in_fields: Fields F that come in.
        dim: Columns D of a field.
        num_interacted: Fields that the factorization machines give.
        num_compressed: Fields that the linear compression gives.
        rank: Columns that pairwise products are projected to.
        hidden: Layers over these.
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
        self._dim, self.out_fields = dim, num_interacted + num_compressed
        self.project = nn.Linear(in_fields, rank, bias=False)
        self.norm_of_products = nn.LayerNorm(in_fields * rank)
        self.over_products = tower(in_fields * rank, hidden, num_interacted * dim)
        self.compress = nn.Linear(in_fields, num_compressed, bias=False)
        is_same = in_fields == self.out_fields
        self.residual = nn.Identity() if is_same else nn.Linear(in_fields, self.out_fields, False)
        self.norm = nn.LayerNorm(dim)

    def forward(self, fields_BFD: Tensor) -> Tensor:
        """Gives the next layer's fields.

        Args:
            fields_BFD: Shape ``(B, F, D)``.

        Returns:
            Shape ``(B, num_interacted + num_compressed, D)``.
        """
        by_column_BDF = fields_BFD.transpose(1, 2)
        products = torch.bmm(fields_BFD, self.project(by_column_BDF)).flatten(1)
        interacted = self.over_products(self.norm_of_products(products)).unflatten(
            1, (-1, self._dim)
        )
        compressed = self.compress(by_column_BDF).transpose(1, 2)
        passed = self.residual(by_column_BDF).transpose(1, 2)
        out: Tensor = self.norm(torch.cat([interacted, compressed], dim=1) + passed)
        return out
