"""Layers that several models share.

Shape letters: B samples, D embedding columns, N clicks of all samples, U units of a layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import JaggedTensor


class Dice(nn.Module):
    """``p x + (1 - p) a x`` with ``p`` the sigmoid of the batch-normalised input.

    The statistics are a ``BatchNorm1d``, so a check for layers that mix samples finds them: such a
    batch cannot be cut into micro-batches.

    Args:
        num_units: Units U of the layer before.

    Source:
        Zhou et al., Deep Interest Network (arXiv 1706.06978), equations 3 and 4.
    """

    def __init__(self, num_units: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(num_units, eps=1e-8, affine=False)
        self.slope_U = nn.Parameter(torch.zeros(num_units))

    def forward(self, values_BU: Tensor) -> Tensor:
        """Activates values of shape ``(B, U)``."""
        share_BU = torch.sigmoid(self.norm(values_BU))
        activated_BU: Tensor = values_BU * (share_BU + (1 - share_BU) * self.slope_U)
        return activated_BU


ACTIVATIONS: dict[str, Callable[[int], nn.Module]] = {
    "relu": lambda num_units: nn.ReLU(),
    "sigmoid": lambda num_units: nn.Sigmoid(),
    "tanh": lambda num_units: nn.Tanh(),
    "silu": lambda num_units: nn.SiLU(),
    "prelu": lambda num_units: nn.PReLU(num_units, init=0.0),
    "dice": Dice,
}
"""Constructor of each activation, given the number of units."""


def tower(
    in_size: int,
    hidden: Sequence[int],
    out_size: int | None = 1,
    activation: str = "relu",
    dropout: float = 0.0,
) -> nn.Sequential:
    """Builds dense layers with an activation each, then a linear layer.

    Args:
        in_size: Columns of the input.
        hidden: Units of each hidden layer.
        out_size: Columns of the output; ``None`` = the last hidden layer is the output.
        activation: A name in :data:`ACTIVATIONS`.
        dropout: Dropout probability after each hidden layer.
    """
    layers: list[nn.Module] = []
    for before, after in pairwise([in_size, *hidden]):
        layers += [nn.Linear(before, after), ACTIVATIONS[activation](after)]
        if dropout:
            layers.append(nn.Dropout(dropout))
    if out_size is not None:
        layers.append(nn.Linear([in_size, *hidden][-1], out_size))
    return nn.Sequential(*layers)


class AttentionUnit(nn.Module):
    """Sums a jagged history, each click weighted by its fit to the target.

    Weights are not normalised, so the strength of an interest is kept. Nothing is padded: the work
    is proportional to the number of clicks.

    Args:
        dim: Columns D of target and history.
        hidden: Units H of the layer that computes the weights.

    Source:
        Zhou et al., Deep Interest Network (arXiv 1706.06978), section 4.3.
    """

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        # input: click, target and their product, concatenated
        self.weigh = nn.Sequential(nn.Linear(3 * dim, hidden), nn.Tanh(), nn.Linear(hidden, 1))

    def forward(self, target_BD: Tensor, history: JaggedTensor) -> Tensor:
        """Returns the weighted sums, shape ``(B, D)``; zero for an empty history.

        Args:
            target_BD: Embeddings of the targets, shape ``(B, D)``.
            history: Embeddings of the earlier clicks, ``(N, D)`` in B lists.
        """
        rows_ND, lengths_B = history.values(), history.lengths()
        sample_N = torch.repeat_interleave(
            torch.arange(lengths_B.numel(), device=lengths_B.device),
            lengths_B,
            output_size=rows_ND.size(0),
        )
        first, act, last = self.weigh
        assert isinstance(first, nn.Linear)
        # The first layer is linear: the target's part is computed once per sample, not per click.
        click_weight, target_weight, product_weight = first.weight.split(rows_ND.size(1), dim=1)
        hidden_BH = nn.functional.linear(target_BD, target_weight, first.bias)
        product_ND = rows_ND * target_BD.index_select(0, sample_N)
        hidden_NH = (
            hidden_BH.index_select(0, sample_N)
            + nn.functional.linear(rows_ND, click_weight)
            + nn.functional.linear(product_ND, product_weight)
        )
        weighted_ND = rows_ND * last(act(hidden_NH))
        return torch.zeros_like(target_BD).index_add(0, sample_N, weighted_ND)


def padded(sequences: JaggedTensor, max_length: int) -> Tensor:
    """Pads or truncates B jagged sequences ``(N, D)`` to ``(B, max_length, D)``.

    A length that depends on the batch would make a sample's result depend on its batch.
    """
    dense: Tensor = torch.ops.fbgemm.jagged_2d_to_dense(
        sequences.values(), sequences.offsets().long(), max_length
    )
    return dense


def mask_of(sequences: JaggedTensor, max_length: int) -> Tensor:
    """Mask of the values in :func:`padded`: bool, shape ``(B, max_length)``."""
    lengths_B = sequences.lengths()
    return torch.arange(max_length, device=lengths_B.device) < lengths_B[:, None]
