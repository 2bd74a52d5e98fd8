"""A hierarchical ensemble: several ways for fields to interact, side by side, layer over layer.

Source: Zhang et al., DHEN: A Deep and Hierarchical Ensemble Network for Large-Scale Click-Through
Rate Prediction (arXiv 2203.11014), section 3.

Shape letters: B samples, D dim, F features.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

__all__ = ["DHENLayer"]


class DHENLayer(nn.Module):
    """``Norm(concat(self-attention(X), linear(X)) + shortcut(X))``.

    Args:
        in_fields: Fields F that come in.
        dim: Columns D of a field.
        out_fields: Fields that each of the two gives.
        num_heads: Heads of the attention.
    """

    def __init__(self, in_fields: int, dim: int, out_fields: int, num_heads: int) -> None:
        super().__init__()
        self.out_fields = 2 * out_fields
        self.attention = nn.MultiheadAttention(dim, num_heads, batch_first=True)
        self.compress_attended = nn.Linear(in_fields, out_fields)
        self.linear = nn.Linear(in_fields, out_fields)
        is_same = in_fields == self.out_fields
        self.shortcut = nn.Identity() if is_same else nn.Linear(in_fields, self.out_fields)
        self.norm = nn.LayerNorm(dim)

    def forward(self, fields_BFD: Tensor) -> Tensor:
        """Gives the next layer's fields.

        Args:
            fields_BFD: Shape ``(B, F, D)``.

        Returns:
            Shape ``(B, 2 * out_fields, D)``.
        """
        attended, _ = self.attention(fields_BFD, fields_BFD, fields_BFD, need_weights=False)
        by_column_BDF = fields_BFD.transpose(1, 2)
        found = torch.cat(
            [self.compress_attended(attended.transpose(1, 2)), self.linear(by_column_BDF)], dim=2
        )
        out: Tensor = self.norm((found + self.shortcut(by_column_BDF)).transpose(1, 2))
        return out
