"""TBSM: a small DLRM over the target and each step of the history, joined by a time series layer.

Source: Ishkhanov et al., Time-based Sequence Model for Personalization and Recommendation Systems
(arXiv 2008.11922).

Shape letters: B samples, D embedding columns, T positions of a history.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from torchrec_picasso.app.zoo.feature_groups import SEQUENCE, FeatureGroups, Found, Reads
from torchrec_picasso.app.zoo.layers import mask_of, padded, tower


class TimeSeriesLayer(nn.Module):
    """Weights the steps of a history by layers over their cosines with the target, section 3.

    Args:
        num_steps: Steps T of a history.
        hidden: Units of the layers over the cosines.
    """

    def __init__(self, num_steps: int, hidden: Sequence[int]) -> None:
        super().__init__()
        self.weigh = tower(num_steps, hidden, num_steps)

    def forward(self, target_BD: Tensor, history_BTD: Tensor) -> Tensor:
        """Returns the weighted sum of a history ``(B, T, D)``, shape ``(B, D)``."""
        unit_BTD = nn.functional.normalize(history_BTD, dim=2)
        unit_BD = nn.functional.normalize(target_BD, dim=1)
        cosines_BT = torch.einsum("btd,bd->bt", unit_BTD, unit_BD)
        return torch.einsum("bt,btd->bd", self.weigh(cosines_BT), history_BTD)


class TBSM(nn.Module):
    """Reads ``target`` and ``history`` from the same tables, and ``profile``, all of one dim.

    The profile is the same in every step, and is looked up once.

    Args:
        step_hidden: Units of the layers over the fields and products of a step.
        series_hidden: Units of the layers that weight the steps.
    """

    reads: ClassVar[Mapping[str, Reads]] = {
        "target": Reads("target"),
        "history": Reads("history", SEQUENCE, tables_of="target"),
        "profile": Reads("profile"),
    }

    def __init__(
        self,
        embeddings: FeatureGroups,
        num_dense: int,
        step_hidden: Sequence[int] = (15,),
        series_hidden: Sequence[int] = (15,),
        hidden: Sequence[int] = (60,),
    ) -> None:
        super().__init__()
        self.max_length = embeddings.groups["history"].max_length
        dims = [*embeddings.dims("target"), *embeddings.dims("profile")]
        (dim,) = set(dims)
        self.num_fields = len(dims)
        num_pairs = self.num_fields * (self.num_fields - 1) // 2
        self.step_arch = tower(self.num_fields * dim + num_pairs, step_hidden, dim)
        self.series = TimeSeriesLayer(self.max_length, series_hidden)
        self.over_arch = tower(num_dense + 2 * dim, hidden)

    def forward(self, found: Found, dense_BI: Tensor) -> Tensor:
        """Returns the logits, shape ``(B,)``."""
        target = torch.stack(found["target"], dim=1)[:, None]  # (B, 1, columns, D)
        history = [padded(column, self.max_length) for column in found["history"]]
        clicks = torch.cat([target, torch.stack(history, dim=2)], dim=1)
        profile = torch.stack(found["profile"], dim=1)[:, None].expand(-1, clicks.size(1), -1, -1)
        fields = torch.cat([clicks, profile], dim=2)  # (B, 1 + T, num_fields, D)
        one, other = torch.triu_indices(self.num_fields, self.num_fields, 1, device=fields.device)
        products = (fields @ fields.transpose(2, 3))[:, :, one, other]
        steps = self.step_arch(torch.cat([fields.flatten(2), products], dim=2))
        is_there = mask_of(found["history"][0], self.max_length)
        target_BD, history_BTD = steps[:, 0], steps[:, 1:] * is_there[:, :, None]
        joined = torch.cat([dense_BI, target_BD, self.series(target_BD, history_BTD)], dim=1)
        logits_B: Tensor = self.over_arch(joined).squeeze(1)
        return logits_B
