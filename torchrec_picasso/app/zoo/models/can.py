"""CAN: a target's second embedding is a network that reads the history.

Source: Bian et al., CAN: Feature Co-Action for Click-Through Rate Prediction (arXiv 2011.05625).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from torchrec_picasso.app.zoo.feature_groups import SEQUENCE, FeatureGroups, Found, Reads
from torchrec_picasso.app.zoo.layers.attention_unit import AttentionUnit
from torchrec_picasso.app.zoo.layers.co_action import CoAction
from torchrec_picasso.app.zoo.layers.padded import mask_of, padded
from torchrec_picasso.app.zoo.layers.tower import tower
from torchrec_picasso.errors import ConfigError

__all__ = ["CAN"]


class CAN(nn.Module):
    """Reads ``target`` and ``history`` as DIN does, ``network`` and ``read``, and ``profile``.

    ``network`` has the target's ids in tables as wide as the networks have weights, ``read`` the
    history's in tables that these read.

    Args:
        embeddings: Tell the dims and the longest history.
        num_dense: Dense features, read beside the profile.
        sizes: Columns of the networks' input and of each of their layers.
        orders: Powers of their input.
        attention_hidden: Units of the layer that weighs a click.
        hidden: Last layers.
        activation: Of the last layers.

    Raises:
        ConfigError: If the tables' dims are not those of the networks.
    """

    reads: ClassVar[Mapping[str, Reads]] = {
        "target": Reads("target"),
        "history": Reads("history", SEQUENCE, tables_of="target"),
        "profile": Reads("profile"),
        "network": Reads("target", dim=160),  # the weights of networks of the sizes below
        "read": Reads("history", SEQUENCE, dim=16),
    }

    def __init__(
        self,
        embeddings: FeatureGroups,
        num_dense: int,
        sizes: Sequence[int] = (16, 8, 4),
        orders: int = 2,
        attention_hidden: int = 36,
        hidden: Sequence[int] = (200, 80),
        activation: str = "prelu",
    ) -> None:
        super().__init__()
        self.max_length = embeddings.groups["read"].max_length
        self.co_action = CoAction(sizes, orders, has_bias=False)
        for name, wanted in (
            ("network", self.co_action.num_weights),
            ("read", self.co_action.in_size),
        ):
            if set(embeddings.dims(name)) != {wanted}:
                raise ConfigError(
                    f"group {name!r} has dims {list(embeddings.dims(name))}; networks of sizes "
                    f"{list(sizes)} need {wanted}"
                )
        dims = embeddings.dims("target")
        self.attention = nn.ModuleList(AttentionUnit(dim, attention_hidden) for dim in dims)
        num_pairs = len(embeddings.dims("network")) * len(embeddings.dims("read"))
        width = num_dense + 2 * sum(dims) + sum(embeddings.dims("profile"))
        width += num_pairs * self.co_action.out_size
        self.over_arch = tower(width, hidden, 1, activation)

    def forward(self, found: Found, dense_BI: Tensor) -> Tensor:
        """Gives the logits, shape ``(B,)``."""
        parts = [dense_BI, *found["target"], *found["profile"]]
        parts += [
            attend(target, history)
            for attend, target, history in zip(self.attention, found["target"], found["history"])
        ]
        for column in found["read"]:
            read, is_there = padded(column, self.max_length), mask_of(column, self.max_length)
            parts += [self.co_action(network, read, is_there) for network in found["network"]]
        logits_B: Tensor = self.over_arch(torch.cat(parts, dim=1)).squeeze(1)
        return logits_B
