"""State that can change, of Python values and of the process: kept, compared and put back."""

from __future__ import annotations

import copyreg
import functools
import logging
import pickle
import random
import types
import weakref
from collections import OrderedDict, deque
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from enum import Enum
from operator import is_, ne
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.utils import parametrize
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from torchrec_picasso.batches.split import PLAIN_TYPES

NOTHING = object()
"""Stands for a name or a key that is not there."""
CONTAINERS: tuple[Any, ...] = (dict, list, set, deque)
_LEAVES = (
    *(*PLAIN_TYPES, range, slice, type(Ellipsis), torch.layout, torch.memory_format, np.ufunc),
    *(FakeTensor, dist.ProcessGroup, logging.Logger, types.GenericAlias, types.UnionType),
    *(torch._ops.OpOverload, torch._ops.OpOverloadPacket, types.MethodWrapperType),
)
"""Types without content that could change, or that the proof watches elsewhere."""

_PARTS: tuple[tuple[type, tuple[str, ...]], ...] = (
    (MethodType, ("__self__", "__func__")),
    (staticmethod, ("__func__",)),
    (classmethod, ("__func__",)),
    (property, ("fget", "fset")),
    (functools.cached_property, ("func",)),
    (functools.partial, ("func", "args", "keywords", "__dict__")),
)
"""Types that hold functions, and where."""
_HEAP_TYPE = 1 << 9

ATOMS = (type(None), str, bytes, int, float, bool, complex)
"""Types of values that hold nothing."""
_EQUAL = (*ATOMS, MethodType, torch.Size, torch.device)
"""Types whose equal values are the same to every program."""


class Kept:
    """A container, or a class with its attributes, and its content when it was found."""

    def __init__(self, path: str, place: Any, is_library: bool = False) -> None:
        self.path, self.place, self.is_library = path, place, is_library
        self._is_class = isinstance(place, type)
        if self._is_class:  # Python notes the slots in a class when it first copies an object of it
            copyreg._slotnames(place)  # type: ignore[attr-defined]
        self._content = vars(place) if self._is_class else place
        self._base = next((base for base in CONTAINERS if isinstance(place, base)), dict)
        self.before = self._base(self._content)
        self._order = list(self._content)
        # a class is seen through a proxy; a subclass may have an __eq__ of its own
        self._differ = ne if self._is_class else self._base.__ne__

    def has_changed(self) -> bool:
        """Whether the content or its order differs, or cannot be compared any more."""
        now, before = self._content, self.before
        try:
            # most containers are empty, such as those of hooks
            if not before and not self._base.__len__(now):
                return False
            if list(now) != self._order or self._differ(now, before):
                return True
            values = (now.values(), before.values()) if self._base is dict else (now, before)
            # the first test is fast, for a vocabulary in a list
            is_same = self._base is set or all(map(is_, *values))
            return not is_same and any(map(_is_replaced, *values))
        except Exception:  # any error of a comparison, such as that of two tensors
            return True

    def difference(self) -> str:
        """Names the member that differs, or the container."""
        now, before = self._content, self.before
        for name in [*before, *now] if isinstance(before, dict) else ():
            if now.get(name, NOTHING) is not before.get(name, NOTHING):
                return f"{self.path}.{name}"
        return self.path

    def restore(self) -> None:
        """Puts the content back, into the same object."""
        place, before = self.place, self.before
        if self._is_class:
            for name in {*vars(place), *before}:
                if name not in before:
                    type.__delattr__(place, name)
                elif vars(place).get(name, NOTHING) is not before[name]:
                    type.__setattr__(place, name, before[name])
            return
        # an ordered dict keeps its keys twice: dict.clear() would leave one of the two
        base = OrderedDict if isinstance(place, OrderedDict) else self._base
        base.clear(place)
        fill = base.extend if base in (list, deque) else base.update
        fill(place, before)


def _is_replaced(now: Any, before: Any) -> bool:
    """Whether an equal value is another object that may hold other state."""
    if now is before or type(now) is not type(before):
        return now is not before
    if type(now) is tuple:
        return any(map(_is_replaced, now, before))
    return type(now) not in _EQUAL


def held_by(value: Any) -> list[Any] | None:
    """Lists what a value holds that has no other content, such as a method; ``None`` for others."""
    if isinstance(value, BuiltinFunctionType):
        owner = value.__self__
        is_function = owner is None or isinstance(owner, ModuleType | type)
        return [] if is_function or type(owner).__name__ == "PyCapsule" else [owner]
    if isinstance(value, Enum):
        return [held for name, held in vars(value).items() if name != "__objclass__"]
    if isinstance(value, tuple | frozenset):
        return list(value)
    for kind, names in _PARTS:
        if isinstance(value, kind):
            return [getattr(value, name) for name in names]
    if isinstance(value, weakref.ref):
        return [value()]
    # a descriptor of Python itself has no state either, nor has an annotation
    is_descriptor = hasattr(type(value), "__get__") and not is_class_statement(type(value))
    is_empty = is_descriptor or type(value) is object or type(value).__module__ == "typing"
    return [] if is_empty or isinstance(value, _LEAVES) else None


def closure_of(function: FunctionType) -> list[tuple[str, Any, Any]]:
    """Lists the variables of a closure that have a value: name, cell and value."""
    found = []
    for variable, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
        try:
            found.append((variable, cell, cell.cell_contents))
        except ValueError:
            continue  # a variable without a value
    return found


def is_class_statement(kind: type) -> bool:
    """Whether a class is from a class statement, so its attributes can be set."""
    return bool(kind.__flags__ & _HEAP_TYPE)


class _Plain:
    """An object without state outside its attributes."""


def is_plain_object(value: Any) -> bool:
    """Whether the attributes of an object hold all of its state."""
    has_slots = any(vars(base).get("__slots__") for base in type(value).__mro__)
    is_small = type(value).__basicsize__ == _Plain.__basicsize__
    return hasattr(value, "__dict__") and is_small and not has_slots


def random_states() -> dict[str, Any]:
    """States of the global generators that PyTorch's operators do not draw from."""
    numpy_state = pickle.dumps(np.random.get_state())
    return {"Python's random": random.getstate(), "numpy.random": numpy_state}


@contextmanager
def restored_randomness(device: torch.device) -> Iterator[None]:
    """Restores at its end the random states of Python, NumPy, the CPU and the device."""
    states = random.getstate(), np.random.get_state()
    devices = [] if device.type == "cpu" else [device]
    device_type = "cuda" if device.type == "cpu" else device.type  # fork_rng refuses "cpu"
    try:
        with torch.random.fork_rng(devices=devices, device_type=device_type):
            yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])


def why_disturbed() -> str | None:
    """Names what a program has switched on that would see the tensors of a proof, or keep them."""
    # a mode that comes later, such as one that counts, needs no other proof
    modes = [*_get_current_function_mode_stack(), *_get_current_dispatch_mode_stack()]
    others = [type(mode).__name__ for mode in modes if not isinstance(mode, DeviceContext)]
    if parametrize._cache_enabled:
        return "torch.nn.utils.parametrize.cached() keeps weights from one forward to the next"
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        return "hooks on tensors that are saved for backward are set"
    return f"the mode {others[0]} is active" if others else None


def settings() -> Hashable:
    """Settings of PyTorch by which a model may branch."""
    cudnn = torch.backends.cudnn
    return (
        bool(parametrize._cache_enabled),
        torch._C._autograd._top_saved_tensors_default_hooks(True) is None,
        torch.get_default_device(),
        torch.get_default_dtype(),
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.get_num_threads(),
        torch.get_float32_matmul_precision(),
        torch.are_deterministic_algorithms_enabled(),
        *(cudnn.enabled, cudnn.benchmark, cudnn.deterministic),
        *((torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in ("cpu", "cuda")),
    )
