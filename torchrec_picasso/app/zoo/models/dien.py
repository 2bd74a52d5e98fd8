"""DIEN: a GRU reads the history, and a second one evolves what fits the target.

Source: Zhou et al., Deep Interest Evolution Network (arXiv 1809.03672), section 4.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import JaggedTensor

from torchrec_picasso.app.zoo.feature_groups import SEQUENCE, FeatureGroups, Found, Reads
from torchrec_picasso.app.zoo.layers.augru import AUGRU, InterestAttention
from torchrec_picasso.app.zoo.layers.auxiliary_loss import AuxiliaryLoss
from torchrec_picasso.app.zoo.layers.padded import mask_of, padded
from torchrec_picasso.app.zoo.layers.tower import tower

__all__ = ["DIEN"]


class DIEN(nn.Module):
    """Reads ``target``, ``history`` and ``negatives``, of the same tables, and ``profile``.

    The columns of a click are joined to one vector. Negatives are for each click of the history
    something that was not clicked.

    Args:
        embeddings: Tell the dims and the longest history.
        num_dense: Dense features, read beside the profile.
        hidden_size: Columns of the GRUs' states.
        hidden: Last layers.
        auxiliary_weight: Of the auxiliary loss.
        activation: Of the last layers.
    """

    reads: ClassVar[Mapping[str, Reads]] = {
        "target": Reads("target"),
        "history": Reads("history", SEQUENCE, tables_of="target"),
        "negatives": Reads("negatives", SEQUENCE, tables_of="target"),
        "profile": Reads("profile"),
    }

    def __init__(
        self,
        embeddings: FeatureGroups,
        num_dense: int,
        hidden_size: int = 32,
        hidden: Sequence[int] = (200, 80),
        auxiliary_weight: float = 1.0,
        activation: str = "prelu",
    ) -> None:
        super().__init__()
        self.max_length = embeddings.groups["history"].max_length
        self.auxiliary_weight = auxiliary_weight
        dim = sum(embeddings.dims("target"))
        self.extract = nn.GRU(dim, hidden_size, batch_first=True)
        self.auxiliary = AuxiliaryLoss(hidden_size, dim)
        self.attend = InterestAttention(hidden_size, dim)
        self.evolve = AUGRU(hidden_size, hidden_size)
        width = num_dense + 3 * dim + hidden_size + sum(embeddings.dims("profile"))
        self.over_arch = tower(width, hidden, 1, activation)

    def forward(self, found: Found, dense_BI: Tensor) -> tuple[Tensor, Tensor]:
        """Gives the logits, shape ``(B,)``, and the weighted auxiliary loss."""
        target_BD = torch.cat(found["target"], dim=1)
        history, negatives = (
            JaggedTensor(
                torch.cat([column.values() for column in found[name]], dim=1),
                lengths=found[name][0].lengths(),
            )
            for name in ("history", "negatives")
        )
        clicks, is_there = padded(history, self.max_length), mask_of(history, self.max_length)
        states, _ = self.extract(clicks)
        auxiliary = self.auxiliary(states, history, negatives.values())
        evolved = self.evolve(states, self.attend(states, target_BD, is_there))
        summed_BD = clicks.sum(dim=1)
        parts = [dense_BI, target_BD, summed_BD, target_BD * summed_BD, evolved, *found["profile"]]
        logits_B: Tensor = self.over_arch(torch.cat(parts, dim=1)).squeeze(1)
        return logits_B, self.auxiliary_weight * auxiliary
