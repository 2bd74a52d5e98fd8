"""The second-order term of a factorization machine: the sum of all products of two fields.

TorchRec's ``FactorizationMachine`` is another: over the flattened fields it also multiplies
different columns, of one field with itself too.

Source: Rendle, Factorization Machines (ICDM 2010), equation 5; Guo et al., DeepFM (arXiv
1703.04247), equation 2.
"""

from __future__ import annotations

from torch import Tensor, nn

__all__ = ["FactorizationMachine"]


class FactorizationMachine(nn.Module):
    """Sums the inner products of all pairs of fields, in time linear in the fields."""

    def forward(self, fields_BFD: Tensor) -> Tensor:
        """Gives ``sum_{i<j} <v_i, v_j>``.

        Args:
            fields_BFD: Embeddings of the fields, shape ``(B, F, D)``.

        Returns:
            Shape ``(B,)``.
        """
        square_of_sum_BD = fields_BFD.sum(dim=1).square()
        sum_of_squares_BD = fields_BFD.square().sum(dim=1)
        return 0.5 * (square_of_sum_BD - sum_of_squares_BD).sum(dim=1)
