"""Co-action: one item's embedding holds the weights of a small network that reads another's.

The same ids therefore have two tables: one of the ordinary width, and one as wide as the network
has weights.

Source: Bian et al., CAN: Feature Co-Action for Click-Through Rate Prediction (arXiv 2011.05625),
section 4.1.

Shape letters: B samples, D dim, T positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

__all__ = ["CoAction"]


class CoAction(nn.Module):
    """Reads a sequence through the network of a target; layers' outputs are joined.

    Args:
        sizes: Columns of the network's input and of each layer.
        orders: Powers of the input that are read, 1 to this, and summed.
        has_bias: Whether layers have one.
    """

    def __init__(self, sizes: Sequence[int], orders: int = 1, has_bias: bool = True) -> None:
        super().__init__()
        self._sizes, self._orders, self._has_bias = tuple(sizes), orders, has_bias

    @property
    def in_size(self) -> int:
        """Columns of what is read."""
        return self._sizes[0]

    @property
    def out_size(self) -> int:
        """Columns of the output."""
        return sum(self._sizes[1:])

    @property
    def num_weights(self) -> int:
        """Columns of the table that holds the network."""
        return sum(
            before * after + (after if self._has_bias else 0)
            for before, after in pairwise(self._sizes)
        )

    def forward(self, network_BX: Tensor, read_BTD: Tensor, is_there_BT: Tensor) -> Tensor:
        """Gives the sums over the positions.

        Args:
            network_BX: The networks, shape ``(B, num_weights)``.
            read_BTD: What they read, shape ``(B, T, in_size)``.
            is_there_BT: Which positions count, shape ``(B, T)``.

        Returns:
            Shape ``(B, out_size)``.
        """
        weights = self._weights_of(network_BX)
        total: Tensor | None = None
        for order in range(1, self._orders + 1):
            values, found = read_BTD**order, []
            for weight, bias in weights:
                values = torch.bmm(values, weight)
                values = torch.tanh(values if bias is None else values + bias)
                found.append(values)
            joined = torch.cat(found, dim=2)
            total = joined if total is None else total + joined
        assert total is not None
        return (total * is_there_BT[:, :, None]).sum(dim=1)

    def _weights_of(self, network_BX: Tensor) -> list[tuple[Tensor, Tensor | None]]:
        """Weight and bias of each layer, cut out of the embedding in this order."""
        found: list[tuple[Tensor, Tensor | None]] = []
        start = 0
        for before, after in pairwise(self._sizes):
            weight = network_BX[:, start : start + before * after].view(-1, before, after)
            start += before * after
            bias = None
            if self._has_bias:
                bias = network_BX[:, None, start : start + after]
                start += after
            found.append((weight, bias))
        return found
