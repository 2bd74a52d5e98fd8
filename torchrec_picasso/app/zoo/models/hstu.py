"""HSTU: candidates attend to a history by SiLU of scores and of relative position and time.

Sources: Zhai et al., Actions Speak Louder than Words (arXiv 2402.17152), section 3; MLPerf
Training's DLRMv4, whose crossed features, tasks and candidates per sample these are.

Shape letters: B samples, C candidates, D columns of a token, H heads, T tokens: one of the profile,
the positions of a history, the candidates.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import JaggedTensor

from torchrec_picasso.app.zoo.feature_groups import SEQUENCE, FeatureGroups, Found, Reads
from torchrec_picasso.app.zoo.layers import mask_of, padded, tower

_TIME_BUCKETS = 32  # powers of two, in seconds: 136 years
_PROFILE_AGE = 2.0**_TIME_BUCKETS  # seconds; the last bucket


class HSTULayer(nn.Module):
    """Pointwise aggregated attention with a gate, equations 1 to 3.

    Weights are divided by a fixed number of positions, so a sample's result does not depend on the
    longest history of its batch.

    Args:
        width: Columns D of a token.
        num_heads: Heads H.
        max_length: Longest history.
    """

    def __init__(self, width: int, num_heads: int, max_length: int) -> None:
        super().__init__()
        self.num_heads, self.max_length = num_heads, max_length
        self.norm, self.norm_attended = nn.LayerNorm(width), nn.LayerNorm(width)
        self.project = nn.Linear(width, 4 * width)
        self.position_bias = nn.Embedding(max_length + 2, num_heads)
        self.time_bias = nn.Embedding(_TIME_BUCKETS, num_heads)
        self.out = nn.Linear(width, width)
        for bias in (self.position_bias, self.time_bias):
            nn.init.normal_(bias.weight, std=0.02)

    def forward(
        self, tokens_BTD: Tensor, distance_BTT: Tensor, bucket_BTT: Tensor, sees_BTT: Tensor
    ) -> Tensor:
        """Maps tokens ``(B, T, D)`` to as many.

        Args:
            tokens_BTD: Shape ``(B, T, D)``.
            distance_BTT: Positions between query and key, at most ``max_length + 1``.
            bucket_BTT: Buckets of the seconds between them.
            sees_BTT: Whether the query attends to the key, bool.
        """
        projected = nn.functional.silu(self.project(self.norm(tokens_BTD)))
        gate_BTD, *parts = projected.chunk(4, dim=2)
        values, queries, keys = (part.unflatten(2, (self.num_heads, -1)) for part in parts)
        bias_BTTH = self.position_bias(distance_BTT) + self.time_bias(bucket_BTT)
        scores_BHTT = torch.einsum("bthd,bshd->bhts", queries, keys) + bias_BTTH.permute(0, 3, 1, 2)
        weights = nn.functional.silu(scores_BHTT) * sees_BTT[:, None] / self.max_length
        attended = torch.einsum("bhts,bshd->bthd", weights, values).flatten(2)
        moved: Tensor = tokens_BTD + self.out(self.norm_attended(attended) * gate_BTD)
        return moved


class HSTU(nn.Module):
    """Reads ``target`` and ``history`` from the same tables, ``cross`` and ``cross_history`` from
    others, and ``profile``. Dense features are the ages of the history's clicks in seconds.

    A candidate attends to the profile, the history and itself, so its result is the same beside any
    other candidates; a click attends to the clicks before it.

    Args:
        num_layers: HSTU layers.
        width: Columns D of a token.
        num_heads: Attention heads H.
        hidden: Units of each task's layers.
        num_tasks: Tasks.
        num_candidates: Candidates C of a sample.

    Raises:
        ValueError: If the dense features are not as many as the positions of a history.
    """

    reads: ClassVar[Mapping[str, Reads]] = {
        "target": Reads("target", SEQUENCE),
        "history": Reads("history", SEQUENCE, tables_of="target"),
        "cross": Reads("cross", SEQUENCE),
        "cross_history": Reads("cross_history", SEQUENCE, tables_of="cross"),
        "profile": Reads("profile"),
    }

    def __init__(
        self,
        embeddings: FeatureGroups,
        num_dense: int,
        num_layers: int = 3,
        width: int = 64,
        num_heads: int = 2,
        hidden: Sequence[int] = (128,),
        num_tasks: int = 2,
        num_candidates: int = 2,
    ) -> None:
        super().__init__()
        self.max_length = embeddings.groups["history"].max_length
        if num_dense != self.max_length:
            raise ValueError(f"{num_dense} ages of the {self.max_length} clicks of a history")
        self.num_candidates = num_candidates
        item = sum(embeddings.dims("target")) + sum(embeddings.dims("cross"))
        profile = sum(embeddings.dims("profile"))
        self.from_item, self.from_profile = nn.Linear(item, width), nn.Linear(profile, width)
        self.layers = nn.ModuleList(
            HSTULayer(width, num_heads, self.max_length) for _ in range(num_layers)
        )
        self.tasks = nn.ModuleList(
            tower(width + item + profile, hidden, activation="silu") for _ in range(num_tasks)
        )

    def forward(self, found: Found, dense_BI: Tensor) -> Tensor:
        """Returns the logits, shape ``(B, C, num_tasks)``."""
        columns = [*found["history"], *found["cross_history"]]
        clicks = _joined(columns, self.max_length)
        items = _joined([*found["target"], *found["cross"]], self.num_candidates)
        profile = torch.cat(found["profile"], dim=1)[:, None]
        tokens = torch.cat(
            [self.from_profile(profile), self.from_item(clicks), self.from_item(items)], dim=1
        )
        relations = self._relations(columns[0], dense_BI)
        for layer in self.layers:
            tokens = layer(tokens, *relations)
        candidates = tokens[:, -self.num_candidates :]
        profiles = profile.expand(-1, self.num_candidates, -1)
        judged = torch.cat([candidates, items, profiles], dim=2)
        return torch.cat([task(judged) for task in self.tasks], dim=2)

    def _relations(self, history: JaggedTensor, age_BL: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Distances in positions, buckets of times, and who sees whom, ``(B, T, T)`` each."""
        most, num_candidates, device = self.max_length, self.num_candidates, age_BL.device
        zero_B1 = torch.zeros_like(age_BL[:, :1])
        now_BC = zero_B1.expand(-1, num_candidates)
        ages_BT = torch.cat([zero_B1 + _PROFILE_AGE, age_BL, now_BC], dim=1)
        seconds_BTT = (ages_BT[:, None] - ages_BT[:, :, None]).clamp(min=0)
        bucket_BTT = (1 + seconds_BTT).log2().clamp(max=_TIME_BUCKETS - 1).long()
        ago_BL = history.lengths()[:, None] - torch.arange(most, device=device)
        ago_BT = torch.cat([zero_B1 + most + 1, ago_BL, now_BC], dim=1).clamp(min=0)
        distance_BTT = (ago_BT[:, None] - ago_BT[:, :, None]).clamp(min=0).long()
        is_there_BL = mask_of(history, most)
        is_there_BT = nn.functional.pad(is_there_BL, (1, num_candidates), value=True)
        num_tokens = 1 + most + num_candidates
        order_T = torch.arange(num_tokens, device=device)
        is_item_T = order_T > most
        sees_TT = (order_T[:, None] >= order_T) & ~(is_item_T[:, None] & is_item_T)
        sees_TT = sees_TT | (order_T[:, None] == order_T)
        return distance_BTT, bucket_BTT, is_there_BT[:, None] & sees_TT


def _joined(columns: Sequence[JaggedTensor], max_length: int) -> Tensor:
    """Concatenates the columns of each position: ``(B, max_length, sum of dims)``."""
    return torch.cat([padded(column, max_length) for column in columns], dim=2)
