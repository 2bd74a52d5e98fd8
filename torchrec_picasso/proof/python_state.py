"""A model's Python side: a copy to try it on, and whether a forward changed that.

Tensors are shared with the model: nothing writes into them while it is followed.
"""

from __future__ import annotations

import copy
import io
import pickle
import weakref
from collections.abc import Collection, Iterator
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.distributed.types import ShardedModule

from torchrec_picasso.proof.values import Unproved

__all__ = ["copy_of", "dense_modules", "digest", "is_of_library", "state_of"]

_BY_ID = (Tensor, nn.Module, FunctionType, BuiltinFunctionType, ModuleType, type, dist.ProcessGroup)


def dense_modules(
    module: nn.Module, given: Collection[nn.Module], name: str = ""
) -> Iterator[tuple[str, nn.Module]]:
    """A module and what is inside it, by path, without modules whose output is given."""
    seen: set[int] = set()

    def walk(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
        if id(module) in seen or isinstance(module, ShardedModule):
            return
        if any(module is of for of in given):
            return
        seen.add(id(module))
        yield name, module
        for child_name, child in module.named_children():
            yield from walk(child, f"{name}.{child_name}" if name else child_name)

    return walk(module, name)


def copy_of(module: nn.Module, given: Collection[nn.Module]) -> nn.Module:
    """A copy with the same tensors, process groups and given modules.

    Raises:
        Unproved: If it cannot be copied.
    """
    memo: dict[int, Any] = {}
    for inside in module.modules():
        shared = [*inside._parameters.values(), *inside._buffers.values(), *vars(inside).values()]
        memo |= {id(of): of for of in shared if isinstance(of, Tensor | dist.ProcessGroup)}
        if isinstance(inside, ShardedModule) or any(inside is of for of in given):
            memo[id(inside)] = inside
    try:
        return copy.deepcopy(module, memo)
    except Exception as error:  # whatever a user's type raises
        raise Unproved(
            f"{_culprit(module, given, memo)} cannot be copied ({type(error).__name__}: {error}), "
            "so what a forward does to it cannot be seen"
        ) from error


def _culprit(module: nn.Module, given: Collection[nn.Module], memo: dict[int, Any]) -> str:
    for path, inside in dense_modules(module, given):
        for name, value in vars(inside).items():
            if name in _KEPT_BY_TORCH:
                continue
            try:
                copy.deepcopy(value, dict(memo))
            except Exception:  # the one that was looked for
                return f"{path}.{name}" if path else name
    return "the model"


_KEPT_BY_TORCH = frozenset(("_parameters", "_buffers", "_modules"))


def is_of_library(module: nn.Module) -> bool:
    """Whether a module's class is PyTorch's or TorchRec's: it makes its state at its first use."""
    return type(module).__module__.partition(".")[0] in ("torch", "torchrec")


class _Pickler(pickle.Pickler):
    def persistent_id(self, value: Any) -> Any:
        if isinstance(value, torch.Generator):
            raise Unproved("is a torch.Generator, whose numbers every micro-batch would draw")
        if isinstance(value, _BY_ID):
            return type(value).__name__, id(value)
        if isinstance(value, weakref.ref):
            return "reference", id(value())
        if isinstance(value, MethodType):
            return "method", id(value.__func__), id(value.__self__)
        return None


def digest(value: Any) -> bytes:
    """What a value holds; tensors, modules and functions by identity.

    Raises:
        Unproved: If it cannot be told.
    """
    buffer = io.BytesIO()
    try:
        _Pickler(buffer, protocol=5).dump(value)
    except Unproved:
        raise
    except Exception as error:  # whatever a user's type raises
        raise Unproved(
            f"is a {type(value).__name__}, of which cannot be told whether it changes "
            f"({type(error).__name__})"
        ) from error
    return buffer.getvalue()


def state_of(module: nn.Module, given: Collection[nn.Module]) -> dict[tuple[str, str], bytes]:
    """Digests of all attributes of all modules, by path and name.

    Raises:
        Unproved: If one cannot be told.
    """
    found = {}
    for path, inside in dense_modules(module, given):
        for name, value in vars(inside).items():
            try:
                found[path, name] = digest(value)
            except Unproved as unproved:
                place = f"{path}.{name}" if path else name
                raise Unproved(f"{place} {unproved}") from unproved
    return found
