"""Holds random layers still, so that two forwards of one model over the same samples compare.

A dropout draws per sample, so a batch that is cut draws other numbers, of other shapes; equal
seeds do not help. Here every draw gives its average: dropout leaves its input as it is, noise is
its mean. This is done at the operators, so it makes no difference which layer or function draws.
What draws in a way that has no such mean is named, and the forwards cannot be compared: so is a
single number, which decides something for a batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["StillRandomness"]

aten = torch.ops.aten


def _keep_all(input: Tensor, p: float, train: bool | None = None) -> tuple[Tensor, Tensor]:
    return input.clone(), torch.ones_like(input, dtype=torch.bool)


_MEANS: dict[Any, Callable[..., Any]] = {
    aten.bernoulli_.float: lambda self, p=0.5, **_: self.fill_(p),
    aten.bernoulli.p: lambda self, p, **_: torch.full_like(self, p),
    aten.bernoulli.default: lambda self, **_: self.clone(),
    aten.bernoulli_.Tensor: lambda self, p, **_: self.copy_(p),
    aten.native_dropout.default: _keep_all,
    aten.rand.default: lambda size, **options: torch.full(size, 0.5, **_known(options)),
    aten.randn.default: lambda size, **options: torch.zeros(size, **_known(options)),
    aten.rand_like.default: lambda self, **options: torch.full_like(self, 0.5, **options),
    aten.randn_like.default: lambda self, **options: torch.zeros_like(self, **options),
    aten.uniform_.default: lambda self, low=0.0, high=1.0, **_: self.fill_((low + high) / 2),
    aten.normal_.default: lambda self, mean=0.0, std=1.0, **_: self.fill_(mean),
}
"""What an operator gives on average, with its own arguments."""


_COMMUNICATES = ("c10d", "_c10d_functional", "_dtensor")


class StillRandomness(TorchDispatchMode):
    """Within it, random operators give their means; it also notes how precise operators are."""

    def __init__(self) -> None:
        super().__init__()
        self.drawn: set[str] = set()
        """Random operators that cannot be held still, and operators that communicate."""
        self.coarsest = 0.0
        """Largest rounding step of a floating dtype that something was computed in."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.namespace in _COMMUNICATES:
            self.drawn.add(str(func))
        if torch.Tag.nondeterministic_seeded in func.tags:
            if func in _MEANS:
                mean = _MEANS[func](*args, **kwargs)
                if isinstance(mean, Tensor) and mean.numel() == 1:
                    self.drawn.add(f"{func} of a single number")
                return mean
            args, kwargs, is_still = _without_dropout(func, args, kwargs)
            if not is_still:
                self.drawn.add(str(func))
        result = func(*args, **kwargs)
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.is_floating_point():
                self.coarsest = max(self.coarsest, torch.finfo(tensor.dtype).eps)
        return result


def _known(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name != "generator"}


def _without_dropout(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any], bool]:
    """Arguments with which an operator that has a dropout of its own, as attention has, drops
    nothing; and whether there was such an argument."""
    for place, argument in enumerate(func._schema.arguments):
        if argument.name == "dropout_p":
            if place < len(args):
                return (*args[:place], 0.0, *args[place + 1 :]), kwargs, True
            return args, {**kwargs, "dropout_p": 0.0} if "dropout_p" in kwargs else kwargs, True
    return args, kwargs, False
