"""Makes random layers deterministic, so that two forwards over the same samples are comparable.

A dropout draws per sample, so a split batch draws other numbers, of other shapes; equal seeds do
not help. Here every draw returns its mean: dropout keeps its input, noise is its mean. This is
done at the operators, so it covers every layer or function that draws. An operator without such a
mean, or one that draws a single number for the batch, is recorded, and so are Python's and NumPy's
random numbers: forwards cannot be compared.
"""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["StillRandomness"]

aten = torch.ops.aten


def _keep_all(input: Tensor, p: float, train: bool | None = None) -> tuple[Tensor, Tensor]:
    """Dropout without scaling: nothing is dropped, and the mask is all ones."""
    return input.clone(), torch.ones_like(input, dtype=torch.bool)


_MEANS: dict[Any, Callable[..., Any]] = {
    aten.bernoulli_.float: lambda self, p=0.5, **_: self.fill_(p),
    aten.bernoulli.p: lambda self, p, **_: torch.full_like(self, p),
    aten.bernoulli.default: lambda self, **_: self.clone(),
    aten.bernoulli_.Tensor: lambda self, p, **_: self.copy_(p),
    aten.native_dropout.default: _keep_all,
    aten.rand.default: lambda size, **options: torch.full(size, 0.5, **options),
    aten.randn.default: lambda size, **options: torch.zeros(size, **options),
    aten.rand_like.default: lambda self, **options: torch.full_like(self, 0.5, **options),
    aten.randn_like.default: lambda self, **options: torch.zeros_like(self, **options),
    aten.uniform_.default: lambda self, low=0.0, high=1.0, **_: self.fill_((low + high) / 2),
    aten.normal_.default: lambda self, mean=0.0, std=1.0, **_: self.fill_(mean),
}
"""Functions that return an operator's mean, with the operator's arguments except a generator."""

_COMMUNICATES = ("c10d", "_c10d_functional", "_dtensor")
"""Namespaces of operators that communicate."""


class StillRandomness(TorchDispatchMode):
    """A mode in which random operators return their means; it also records operators' precision."""

    def __init__(self) -> None:
        super().__init__()
        self.drawn: set[str] = set()
        """Random operators without a mean, operators that communicate, and other generators."""
        self.coarsest = 0.0
        """Largest rounding step of the floating dtypes of results."""
        self._before: dict[str, Any] = {}

    def __enter__(self) -> StillRandomness:
        super().__enter__()
        self._before = _states()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.drawn |= {name for name, state in _states().items() if state != self._before[name]}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func.namespace in _COMMUNICATES:
            self.drawn.add(str(func))
        if torch.Tag.nondeterministic_seeded in func.tags:
            # torch tags every operator that draws from a generator
            names = [argument.name for argument in func._schema.arguments]
            if func in _MEANS:
                kwargs.pop("generator", None)  # which constants do not have
                mean = _MEANS[func](*args, **kwargs)
                if isinstance(mean, Tensor) and mean.numel() == 1:
                    self.drawn.add(f"{func} of a single number")
                return mean
            if "dropout_p" in names:  # with a dropout of its own, such as attention
                args, kwargs = (), {**dict(zip(names, args)), **kwargs, "dropout_p": 0.0}
            else:
                self.drawn.add(str(func))
        result = func(*args, **kwargs)
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.is_floating_point():
                self.coarsest = max(self.coarsest, torch.finfo(tensor.dtype).eps)
        return result


def _states() -> dict[str, Any]:
    """States of the global generators that operators do not draw from."""
    numpy_state = pickle.dumps(np.random.get_state())
    return {"Python's random": random.getstate(), "numpy.random": numpy_state}
