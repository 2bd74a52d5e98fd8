"""TBSM: one small DLRM reads the target and every step of the history; a time series layer joins.

Source: Ishkhanov et al., Time-based Sequence Model for Personalization and Recommendation Systems
(arXiv 2008.11922).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from torchrec_picasso.app.zoo.feature_groups import SEQUENCE, FeatureGroups, Found, Reads
from torchrec_picasso.app.zoo.layers.padded import mask_of, padded
from torchrec_picasso.app.zoo.layers.time_series_layer import TimeSeriesLayer
from torchrec_picasso.app.zoo.layers.tower import tower

__all__ = ["TBSM"]


class TBSM(nn.Module):
    """Reads ``target`` and ``history``, of the same tables, and ``profile``, all of one dim.

    The profile is the same in every step, and is looked up once.

    Args:
        embeddings: Tell the dims and the longest history.
        num_dense: Dense features, which the last layers read.
        step_hidden: Layers over the fields and products of a step.
        series_hidden: Layers that weigh the steps.
        hidden: Last layers.
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
        self.of_step = tower(self.num_fields * dim + num_pairs, step_hidden, dim)
        self.series = TimeSeriesLayer(self.max_length, series_hidden)
        self.over_arch = tower(num_dense + 2 * dim, hidden)

    def forward(self, found: Found, dense_BI: Tensor) -> Tensor:
        """Gives the logits, shape ``(B,)``."""
        now = torch.stack(found["target"], dim=1)[:, None]
        before = torch.stack([padded(of, self.max_length) for of in found["history"]], dim=2)
        clicks = torch.cat([now, before], dim=1)
        user = torch.stack(found["profile"], dim=1)[:, None].expand(-1, clicks.size(1), -1, -1)
        fields = torch.cat([clicks, user], dim=2)
        one, other = torch.triu_indices(self.num_fields, self.num_fields, 1, device=fields.device)
        products = (fields @ fields.transpose(2, 3))[:, :, one, other]
        steps = self.of_step(torch.cat([fields.flatten(2), products], dim=2))
        is_there = mask_of(found["history"][0], self.max_length)
        target_BD, history = steps[:, 0], steps[:, 1:] * is_there[:, :, None]
        joined = torch.cat([dense_BI, target_BD, self.series(target_BD, history)], dim=1)
        logits_B: Tensor = self.over_arch(joined).squeeze(1)
        return logits_B
