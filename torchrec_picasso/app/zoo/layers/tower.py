"""A stack of dense layers that ends in a linear one.

Shape letters: B samples.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

from torch import nn

from torchrec_picasso.app.zoo.layers.dice import Dice

__all__ = ["ACTIVATIONS", "tower"]

ACTIVATIONS: dict[str, Callable[[int], nn.Module]] = {
    "relu": lambda num_units: nn.ReLU(),
    "sigmoid": lambda num_units: nn.Sigmoid(),
    "tanh": lambda num_units: nn.Tanh(),
    "prelu": lambda num_units: nn.PReLU(num_units, init=0.0),
    "dice": Dice,
}
"""By name, what makes the activation of so many units."""


def tower(
    in_size: int,
    hidden: Sequence[int],
    out_size: int | None = 1,
    activation: str = "relu",
    dropout: float = 0.0,
) -> nn.Sequential:
    """Dense layers with an activation each, then a linear one.

    Args:
        in_size: Columns of the input.
        hidden: Units of each layer.
        out_size: Columns of the output; ``None`` = the last hidden layer is the output.
        activation: A name in :data:`ACTIVATIONS`.
        dropout: Share of each hidden layer's units that a training step leaves out.
    """
    layers: list[nn.Module] = []
    for before, after in pairwise([in_size, *hidden]):
        layers += [nn.Linear(before, after), ACTIVATIONS[activation](after)]
        if dropout:
            layers.append(nn.Dropout(dropout))
    if out_size is not None:
        layers.append(nn.Linear([in_size, *hidden][-1], out_size))
    return nn.Sequential(*layers)
