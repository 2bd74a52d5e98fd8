"""The part of a model outside its sharded modules: listed, copied, compared and restored."""

from __future__ import annotations

import copy
import io
import pickle
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torchrec.distributed.types import ShardedModule

from torchrec_picasso.proof.comparison import Tolerance, difference_of
from torchrec_picasso.proof.content import Kept

__all__ = [
    "MODULE_ATTRIBUTES",
    "ModelState",
    "copy_model",
    "dense_modules",
    "dense_parameters",
    "outside_of_sharded",
    "without_a_trace",
]

MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))
"""Attributes that every ``nn.Module`` has."""
_NO_STATE = MODULE_ATTRIBUTES - {"_buffers", "_parameters", "training"}
"""Attributes that are not the model's state."""


def outside_of_sharded(module: nn.Module, path: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yields a module and its submodules by path, but no submodules of sharded modules.

    The paths begin with ``path``, that of the module itself.
    """
    yield path, module
    if not isinstance(module, ShardedModule):
        for name, child in module.named_children():
            yield from outside_of_sharded(child, f"{path}.{name}" if path else name)


def dense_modules(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yields a module and its submodules by path, without sharded modules and their submodules."""
    for path, part in outside_of_sharded(module):
        if not isinstance(part, ShardedModule):
            yield path, part


def dense_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yields the parameters of a module outside its sharded modules, by path."""
    for path, part in dense_modules(module):
        yield from part.named_parameters(path, recurse=False)


def copy_model(model: nn.Module, shared: Iterable[nn.Module] = ()) -> nn.Module:
    """Copies a model except its sharded modules and the ``shared`` ones, which the copy uses too.

    Parameters are copied too: DistributedDataParallel with a static graph counts every gradient
    of a parameter, also in a backward that did not go through DDP. The error of an object that
    cannot be copied is raised.
    """
    memo: dict[int, Any] = {id(module): module for module in shared}
    # deepcopy takes the objects in memo as already copied
    for _, module in outside_of_sharded(model):
        if isinstance(module, ShardedModule):
            memo[id(module)] = module
            continue
        for value in (*vars(module).values(), *module._buffers.values()):
            if isinstance(value, Tensor) and value.grad_fn is not None:
                memo[id(value)] = value.detach().clone()  # torch copies no tensor with a graph
    return copy.deepcopy(model, memo)


# -- compared ------------------------------------------------------------------------------------


class ModelState:
    """The state in the dense part of a model, by module; an attribute must allow pickling."""

    def __init__(self, model: nn.Module) -> None:
        self._modules: Mapping[str, tuple[bytes, Sequence[Tensor]]] = {
            path or "the model": _dump(module) for path, module in dense_modules(model)
        }

    def difference(self, other: ModelState, tolerance: Tolerance) -> str | None:
        """Names a module that another run of the same model left in another state, or ``None``."""
        for (name, (own, tensors)), (its, others) in zip(
            self._modules.items(), other._modules.values()
        ):
            if own != its:
                return f"the attributes of {name} differ after the forward"
            if not all(_are_close(*pair, tolerance) for pair in zip(tensors, others)):
                return f"a buffer or tensor of {name} differs after the forward"
        return None


def _are_close(one: Tensor, other: Tensor, tolerance: Tolerance) -> bool:
    """Whether floats differ within the limits; other tensors must be equal."""
    if one.is_floating_point() and one.shape == other.shape and not one.isnan().all():
        return difference_of(one, other, tolerance) is None
    return one.equal(other) or bool(one.isnan().all() and other.isnan().all())


def _dump(module: nn.Module) -> tuple[bytes, list[Tensor]]:
    """Returns the attributes of one module as bytes, and copies of the tensors in them."""
    buffer = io.BytesIO()
    writer = _Pickler(buffer, protocol=pickle.HIGHEST_PROTOCOL)
    writer.fast = True  # no memo: equal values are equal bytes, shared or not
    writer.dump({name: v for name, v in vars(module).items() if name not in _NO_STATE})
    return buffer.getvalue(), writer.tensors


class _Pickler(pickle.Pickler):
    """Collects tensors beside the bytes; code and modules are only named."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.tensors: list[Tensor] = []

    def persistent_id(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            self.tensors.append(value.detach().clone())
            return ("tensor", len(self.tensors))
        if isinstance(value, (type, FunctionType, BuiltinFunctionType, ModuleType)):
            return ("code", id(value))
        if isinstance(value, (nn.Module, torch.distributed.ProcessGroup)):
            return ("module", type(value).__qualname__)
        return None


# -- restored ------------------------------------------------------------------------------------


@contextmanager
def without_a_trace(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Restores at its end what the model's forward changes in its dense part.

    This covers buffers, tensors in attributes, the attributes themselves, the lists, dicts and sets
    in them, and the random states of Python, NumPy, the CPU and the device. The state of any other
    object is not restored.
    """
    modules = [module for _, module in dense_modules(model)]
    attributes = [(module, _own_attributes(module)) for module in modules]
    values = [value for _, own in attributes for value in own.values()]
    kept = [Kept("", module._buffers) for module in modules]
    kept += [Kept("", value) for value in values if isinstance(value, (list, dict, set))]
    # the tensor objects stay the same, since others may hold references to them; a tensor of an
    # attribute gets its data back after a write only, which its version shows
    buffers = [b for module in modules for b in module._buffers.values() if b is not None]
    tensors = [value for value in values if isinstance(value, Tensor)]
    data: list[tuple[Tensor, Tensor, int | None]] = [(b, b.detach().clone(), None) for b in buffers]
    data += [(tensor, tensor.detach().clone(), tensor._version) for tensor in tensors]
    states = random.getstate(), np.random.get_state()
    devices = [] if device.type == "cpu" else [device]
    device_type = "cuda" if device.type == "cpu" else device.type  # fork_rng refuses "cpu"
    try:
        with torch.random.fork_rng(devices=devices, device_type=device_type):
            yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        for container in kept:
            if container.has_changed(in_order=True):
                container.restore()
        for module, own in attributes:
            for name in _own_attributes(module).keys() - own.keys():
                del vars(module)[name]
            vars(module).update(own)
        with torch.no_grad():
            for tensor, saved, version in data:
                if version is None or tensor._version != version:
                    tensor.detach().copy_(saved)


def _own_attributes(module: nn.Module) -> dict[str, Any]:
    """Returns the attributes of a module beside those of every module, and its mode."""
    return {n: v for n, v in vars(module).items() if n not in MODULE_ATTRIBUTES - {"training"}}
