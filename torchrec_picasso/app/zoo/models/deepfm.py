"""DeepFM: a factorization machine and a tower over the same embeddings.

Source: Guo et al., DeepFM (arXiv 1703.04247), section 2.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from torchrec_picasso.app.zoo.feature_groups import FeatureGroups, Found, Reads
from torchrec_picasso.app.zoo.layers import tower


def factorization_machine(fields_BFD: Tensor) -> Tensor:
    """Sums the inner products of all pairs of fields, in time linear in the number of fields.

    ``torchrec.modules.deepfm.FactorizationMachine`` also multiplies different columns, within one
    field too.

    Args:
        fields_BFD: Embeddings of B samples and F fields, shape ``(B, F, D)``.

    Returns:
        ``sum_{i<j} <v_i, v_j>``, shape ``(B,)``.

    Source:
        Rendle, Factorization Machines (ICDM 2010), equation 5; DeepFM, equation 2.
    """
    square_of_sum_BD = fields_BFD.sum(dim=1).square()
    sum_of_squares_BD = fields_BFD.square().sum(dim=1)
    return 0.5 * (square_of_sum_BD - sum_of_squares_BD).sum(dim=1)


class DeepFM(nn.Module):
    """Reads ``deep``, all columns of one dim, and ``wide``, the first-order weights.

    A first-order weight is the sum of a table's columns, since FBGEMM has no tables of one column.

    Args:
        dropout: Dropout probability of these layers.
    """

    reads: ClassVar[Mapping[str, Reads]] = {
        "deep": Reads("fields"),
        "wide": Reads("fields", dim=4),
    }

    def __init__(
        self,
        embeddings: FeatureGroups,
        num_dense: int,
        hidden: Sequence[int] = (400, 400, 400),
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.linear = nn.Linear(num_dense, 1)
        width = num_dense + sum(embeddings.dims("deep"))
        self.over_arch = tower(width, hidden, dropout=dropout)

    def forward(self, found: Found, dense_BI: Tensor) -> Tensor:
        """Returns the logits, shape ``(B,)``."""
        first_B = torch.cat(found["wide"], dim=1).sum(dim=1) + self.linear(dense_BI).squeeze(1)
        second_B = factorization_machine(torch.stack(found["deep"], dim=1))
        joined = torch.cat([dense_BI, *found["deep"]], dim=1)
        logits_B: Tensor = first_B + second_B + self.over_arch(joined).squeeze(1)
        return logits_B
