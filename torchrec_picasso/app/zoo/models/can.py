"""CAN: the second embedding of a target is a small network that is applied to the history.

Source: Bian et al., CAN: Feature Co-Action for Click-Through Rate Prediction (arXiv 2011.05625).

Shape letters: B samples, D embedding columns, T positions of a history.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import ClassVar

import torch
from torch import Tensor, nn

from torchrec_picasso.app.zoo.feature_groups import SEQUENCE, FeatureGroups, Found, Reads
from torchrec_picasso.app.zoo.layers import AttentionUnit, mask_of, padded, tower
from torchrec_picasso.errors import ConfigError


class CoAction(nn.Module):
    """Applies a network per sample to a sequence; outputs of its layers are concatenated.

    Args:
        sizes: Columns of the network's input and of each layer; layers have no bias.
        orders: The input's powers 1 to ``orders`` are read, and the results summed.

    Source:
        Section 4.1.
    """

    def __init__(self, sizes: Sequence[int], orders: int = 1) -> None:
        super().__init__()
        self._sizes, self._orders = tuple(sizes), orders
        self.in_size, self.out_size = self._sizes[0], sum(self._sizes[1:])
        self.num_weights = sum(before * after for before, after in pairwise(self._sizes))

    def forward(self, network_BX: Tensor, read_BTD: Tensor, is_there_BT: Tensor) -> Tensor:
        """Returns sums over the positions, shape ``(B, out_size)``.

        Args:
            network_BX: Weights of each sample's network, shape ``(B, num_weights)``.
            read_BTD: Inputs of the networks, shape ``(B, T, in_size)``.
            is_there_BT: Positions that count, bool, shape ``(B, T)``.
        """
        weights, start = [], 0
        for before, after in pairwise(self._sizes):  # the layers lie one after the other
            stop = start + before * after
            weights.append(network_BX[:, start:stop].view(-1, before, after))
            start = stop
        powers = []
        for order in range(1, self._orders + 1):
            values, outputs = read_BTD**order, []
            for weight in weights:
                values = torch.tanh(torch.bmm(values, weight))
                outputs.append(values)
            powers.append(torch.cat(outputs, dim=2))
        total = sum(powers[1:], start=powers[0])
        return (total * is_there_BT[:, :, None]).sum(dim=1)


class CAN(nn.Module):
    """DIN with co-action between the target (``network``) and the history (``read``).

    ``network`` reads the target's ids from tables as wide as a network has weights, ``read`` the
    history's ids from tables as wide as a network's input.

    Args:
        sizes: Columns of the networks' input and of each layer.
        orders: Powers of their input.
        attention_hidden: Units of the attention layer.

    Raises:
        ConfigError: If the dims of the tables do not fit the networks.
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
        self.co_action = CoAction(sizes, orders)
        for name, needed in (
            ("network", self.co_action.num_weights),
            ("read", self.co_action.in_size),
        ):
            if set(embeddings.dims(name)) != {needed}:
                raise ConfigError(
                    f"group {name!r} has dims {list(embeddings.dims(name))}; networks of sizes "
                    f"{list(sizes)} need {needed}"
                )
        dims = embeddings.dims("target")
        self.attention = nn.ModuleList(AttentionUnit(dim, attention_hidden) for dim in dims)
        num_pairs = len(embeddings.dims("network")) * len(embeddings.dims("read"))
        width = num_dense + 2 * sum(dims) + sum(embeddings.dims("profile"))
        width += num_pairs * self.co_action.out_size
        self.over_arch = tower(width, hidden, 1, activation)

    def forward(self, found: Found, dense_BI: Tensor) -> Tensor:
        """Returns the logits, shape ``(B,)``."""
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
