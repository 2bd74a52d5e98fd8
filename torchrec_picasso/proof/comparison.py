"""Compares two computations of the same samples; random layers and rounding do not count.

*Random layers* are made deterministic. A dropout draws per sample, so a split batch draws other
numbers, of other shapes; equal seeds do not help. Here every draw returns its mean: dropout keeps
its input, noise is its mean. This is done at the operators, so it covers every layer or function
that draws. An operator without such a mean, or one that draws a single number for the batch, is
recorded, and so are Python's and NumPy's random numbers: forwards cannot be compared.

*Gradients and outputs* are compared sample by sample, in two ways. The mean difference detects
large errors of some samples, such as a loss over clicked samples only; it tolerates a few samples
that cross a kink or a tie, where rounding decides. The median detects small errors of all samples,
such as an auxiliary loss of small weight.

Shape letters: B samples, or lookups of them.
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
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from torchrec_picasso.batches.split import children_of

__all__ = ["StillRandomness", "Tolerance", "difference_of", "difference_of_outputs"]

# -- random layers -------------------------------------------------------------------------------

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


# -- differences ---------------------------------------------------------------------------------

_NEGLIGIBLE = 1e-3
"""Share of the mean that small samples count as, so that noise around 0 is not relative."""


class Tolerance:
    """Limits of the differences that rounding may cause.

    Float32 sums over another number of samples differ in their last bits, 1e-7 to 1e-5 after many
    layers, which leaves the limits a factor of ten. A kink that is crossed changes one sample of
    thousands by a few percent: less than the limit of the mean. Coarser types, by whose rounding
    step ``eps`` the limits grow, round in the forward itself, once per operator.
    """

    def __init__(self, eps: float) -> None:
        self.mean = max(1e-3, 4 * eps)
        self.median = max(1e-4, 4 * eps)


def difference_of(whole: Tensor, cut: Tensor, tolerance: Tolerance) -> str | None:
    """Says how much a float tensor, ``(B, ...)`` or a scalar, differs; ``None`` = within limits.

    What is not a number differs.
    """
    if whole.shape != cut.shape:
        return f"has shape {tuple(cut.shape)} instead of {tuple(whole.shape)}"
    if not whole.numel():
        return None
    # per sample: |whole| and |cut - whole|, each summed over the other dims
    whole, cut = whole.detach(), cut.detach()
    whole_B, off_B = _sizes(whole, cut)
    if not whole_B.isfinite().all():
        if whole.isnan().any():
            return "is not a number, so it cannot be compared"
        endless = whole.isinf() & (whole == cut)
        whole_B, off_B = _sizes(whole.masked_fill(endless, 0), cut.masked_fill(endless, 0))
    wide = whole_B.dtype
    mean = float(off_B.mean() / whole_B.mean().clamp_min(torch.finfo(wide).tiny))
    floor = (_NEGLIGIBLE * whole_B.mean()).clamp_min(torch.finfo(wide).tiny)
    median = float((off_B / torch.maximum(whole_B, floor)).median())
    if mean <= tolerance.mean and median <= tolerance.median:
        return None
    return f"differs by {100 * max(mean, median):.2g} %"


def _sizes(whole: Tensor, cut: Tensor) -> tuple[Tensor, Tensor]:
    """Sums ``|whole|`` and ``|cut - whole|`` by sample, both ``(B,)``, in float32 at least."""
    wide = torch.promote_types(whole.dtype, torch.float32)
    num_samples = whole.size(0) if whole.dim() else 1
    flat, flat_cut = (each.reshape(num_samples, -1).to(wide) for each in (whole, cut))
    return flat.abs().sum(1), (flat_cut - flat).abs_().sum(1)


def difference_of_outputs(
    whole: Any, cut: Any, tolerance: Tolerance, path: str = "output"
) -> str | None:
    """Describes the first member in which a model's joined output differs from the whole one.

    Integers and booleans jump where rounding decides a tie, so a few of them may differ.
    """
    members = children_of(whole)
    if members is not None:
        pairs = zip(members, children_of(cut) or ())
        differences = (
            difference_of_outputs(member, other, tolerance, path + suffix)
            for (suffix, member), (_, other) in pairs
        )
        return next(filter(None, differences), None)
    one, other = _values(whole), _values(cut)
    if one is None or other is None:
        return None
    compare = difference_of if one.is_floating_point() else _difference_of_kinds
    found = compare(one, other, tolerance)
    return None if found is None else f"{path} {found}"


def _values(value: Any) -> Tensor | None:
    """Returns the tensor of a value, or ``None``."""
    if isinstance(value, (KeyedTensor, JaggedTensor)) and not isinstance(value, KeyedJaggedTensor):
        value = value.values()
    return value if isinstance(value, Tensor) else None


def _difference_of_kinds(whole: Tensor, cut: Tensor, tolerance: Tolerance) -> str | None:
    """Says in how many entries integers or booleans differ; ``None`` = in a few, or none."""
    if whole.shape != cut.shape:
        return f"has shape {tuple(cut.shape)} instead of {tuple(whole.shape)}"
    num_off = int((whole != cut).sum())
    if num_off <= max(1, tolerance.mean * whole.numel()):
        return None
    return f"differs in {num_off} of {whole.numel()} entries"
