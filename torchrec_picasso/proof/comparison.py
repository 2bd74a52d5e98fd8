"""Compares two computations of the same samples; random layers and rounding do not count.

*Random layers* are made deterministic. A dropout draws per sample, so a cut batch draws other
numbers, of other shapes; equal seeds do not help. Here every draw returns its mean: dropout keeps
its input, noise is its mean. This is done at the operators, so it covers every layer or function
that draws. An operator without such a mean, or one that draws a single number for the batch, is
recorded, and so are Python's and NumPy's random numbers: forwards cannot be compared.

*Gradients, outputs and state* are compared sample by sample, in two ways. The mean difference
detects large errors of some samples, such as a loss over clicked samples only; it tolerates a few
samples that cross a kink or a tie, where rounding decides. The median detects small errors of all
samples, such as an auxiliary loss of small weight.
"""

from __future__ import annotations

import io
import pickle
import weakref
from collections.abc import Callable, Mapping, Sequence
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedTensor

from torchrec_picasso.batches.split import children_of
from torchrec_picasso.proof.content import random_states
from torchrec_picasso.proof.dense_part import MODULE_ATTRIBUTES, dense_modules

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

COMMUNICATES = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor", "symm_mem")
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
        self._before = random_states()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        after = random_states().items()
        self.drawn |= {name for name, state in after if state != self._before[name]}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func.namespace in COMMUNICATES:
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


_NEGLIGIBLE = 1e-3
"""Share of the mean that small samples count as, so that noise around 0 is not relative."""


_MEAN, _MEDIAN, _STEPS = 1e-3, 1e-4, 4
"""Limits of the mean and the median difference that rounding may cause; both are at least so many
rounding steps, since coarse types round in the forward itself, once per operator. Float32 sums over
another number of samples differ by 1e-7 to 1e-5 after many layers, which leaves a factor of ten. A
kink that is crossed changes one sample of thousands by a few percent: less than the mean's limit.
"""


def difference_of(whole: Tensor, cut: Tensor, eps: float) -> str | None:
    """Says how much a tensor, ``(B, ...)`` or a scalar, differs; ``None`` = within limits.

    ``eps`` is the coarsest rounding step. What is not a number differs. Integers and booleans jump
    where rounding decides a tie, so a few of them may differ.
    """
    if whole.shape != cut.shape:
        return f"has shape {tuple(cut.shape)} instead of {tuple(whole.shape)}"
    most_mean, most_median = max(_MEAN, _STEPS * eps), max(_MEDIAN, _STEPS * eps)
    if not (whole.is_floating_point() or whole.is_complex()):
        num_off = int((whole != cut).sum())
        are_few = num_off <= max(1, most_mean * whole.numel())
        return None if are_few else f"differs in {num_off} of {whole.numel()} entries"
    if not whole.numel():
        return None
    if whole.isnan().any():
        return "is not a number, so it cannot be compared"
    # equal infinities do not differ; sums are at least in float32
    endless, wide = whole.isinf() & (whole == cut), torch.promote_types(whole.dtype, torch.float32)
    num_samples = whole.size(0) if whole.dim() else 1
    if endless.any():
        whole, cut = whole.masked_fill(endless, 0), cut.masked_fill(endless, 0)
    whole_BX, cut_BX = (each.detach().reshape(num_samples, -1).to(wide) for each in (whole, cut))
    # by sample: |whole| and |cut - whole|, each summed over the other dims, with one copy in all
    whole_B = torch.linalg.vector_norm(whole_BX, 1, dim=1)
    off_B = torch.linalg.vector_norm(cut_BX - whole_BX, 1, dim=1)
    least = torch.finfo(whole_B.dtype).tiny
    mean = float(off_B.mean() / whole_B.mean().clamp_min(least))
    floor = (_NEGLIGIBLE * whole_B.mean()).clamp_min(least)
    median = float((off_B / torch.maximum(whole_B, floor)).median())
    if mean <= most_mean and median <= most_median:
        return None
    return f"differs by {100 * max(mean, median):.2g} %"


def difference_of_outputs(whole: Any, cut: Any, eps: float, path: str = "output") -> str | None:
    """Describes the first member in which a model's joined output differs from the whole one."""
    members = children_of(whole)
    if members is not None:
        for (suffix, member), (_, other) in zip(members, children_of(cut) or ()):
            found = difference_of_outputs(member, other, eps, path + suffix)
            if found is not None:
                return found
        return None
    if isinstance(whole, KeyedTensor | JaggedTensor) and isinstance(cut, type(whole)):
        whole, cut = whole.values(), cut.values()
    both = isinstance(whole, Tensor) and isinstance(cut, Tensor)
    found = difference_of(whole, cut, eps) if both else None
    return None if found is None else f"{path} {found}"


_NO_STATE = MODULE_ATTRIBUTES - {"_buffers", "_parameters", "training"}
"""Attributes of a module that are not its state."""
State = Mapping[str, tuple[bytes, Sequence[Tensor]]]
"""Attributes of each dense module as bytes, and copies of the tensors in them."""


def state_of(model: nn.Module) -> State:
    """Returns the state in the dense part of a model; an attribute must allow pickling."""
    found = {}
    for path, module in dense_modules(model):
        buffer = io.BytesIO()
        writer = _Pickler(buffer, protocol=pickle.HIGHEST_PROTOCOL)
        writer.fast = True  # no memo: equal values are equal bytes, shared or not
        writer.dump({name: v for name, v in vars(module).items() if name not in _NO_STATE})
        found[path or "the model"] = buffer.getvalue(), writer.tensors
    return found


def difference_of_states(whole: State, cut: State, eps: float) -> str | None:
    """Names a module that another run of the same model left in another state, or ``None``."""
    for (name, (own, tensors)), (its, others) in zip(whole.items(), cut.values()):
        if own != its:
            return f"the attributes of {name} differ after the forward"
        if not all(_are_close(*pair, eps) for pair in zip(tensors, others)):
            return f"a buffer or tensor of {name} differs after the forward"
    return None


def _are_close(one: Tensor, other: Tensor, eps: float) -> bool:
    """Whether floats differ within the limits; other tensors must be equal."""
    if one.is_floating_point() and one.shape == other.shape and not one.isnan().all():
        return difference_of(one, other, eps) is None
    return one.equal(other) or bool(one.isnan().all() and other.isnan().all())


class _Pickler(pickle.Pickler):
    """Collects tensors beside the bytes; code and modules are only named."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.tensors: list[Tensor] = []

    def persistent_id(self, value: Any) -> Any:
        if isinstance(value, weakref.ref):  # of its weights in an nn.GRU or nn.LSTM
            value = value()
        if isinstance(value, Tensor):
            self.tensors.append(value.detach().clone())
            return ("tensor", len(self.tensors))
        if isinstance(value, (type, FunctionType, BuiltinFunctionType, ModuleType)):
            return ("code", id(value))
        if isinstance(value, (nn.Module, torch.distributed.ProcessGroup)):
            return ("module", type(value).__qualname__)
        return None
