"""A model's Python side: a copy to try it on, and whether a forward changed that.

Tensors are shared with the model: nothing writes into them while it is followed.
"""

from __future__ import annotations

import copy
import enum
import functools
import io
import pickle
import weakref
from collections.abc import Collection, Iterable, Iterator
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.distributed.types import ShardedModule

from torchrec_picasso.batches.split import PLAIN_TYPES
from torchrec_picasso.proof.python_code import is_users_object
from torchrec_picasso.proof.values import UnprovedError

__all__ = ["classes_of", "copy_of", "dense_modules", "digest", "is_of_library", "state_of"]

_BY_ID = (
    *(Tensor, nn.Module, FunctionType, BuiltinFunctionType, ModuleType, type, dist.ProcessGroup),
    *(property, staticmethod, classmethod),
)


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
        UnprovedError: If it cannot be copied.
    """
    memo: dict[int, Any] = {}
    for inside in module.modules():
        shared = [*inside._parameters.values(), *inside._buffers.values(), *vars(inside).values()]
        memo |= {id(of): of for of in shared if isinstance(of, Tensor | dist.ProcessGroup)}
        if isinstance(inside, ShardedModule) or any(inside is of for of in given):
            memo[id(inside)] = inside
    for path, inside in dense_modules(module, given):
        if _copies_itself(type(inside)):
            raise UnprovedError(f"{path or 'the model'} says itself what is copied of it")
    try:
        return copy.deepcopy(module, memo)
    except Exception as error:  # whatever a user's type raises
        raise UnprovedError(
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


_CACHED = functools._lru_cache_wrapper
_OWN_COPIES = ("__deepcopy__", "__getstate__", "__reduce__", "__reduce_ex__")


def refuse_hidden(value: Any) -> None:
    """Refuses what keeps something that neither a copy nor a digest of it shows.

    Raises:
        UnprovedError: Says what, after a name.
    """
    if isinstance(value, _CACHED):
        raise UnprovedError("is a cached function, which keeps what a forward gets of it")
    if isinstance(value, weakref.ref):
        if not isinstance(value(), Tensor | nn.Module | None):
            raise UnprovedError(f"refers to a {type(value()).__name__} outside the model")
    elif isinstance(value, Tensor):
        extras = [name for name, of in vars(value).items() if not isinstance(of, PLAIN_TYPES)]
        if extras and not extras[0].startswith("_"):
            raise UnprovedError(f"is a tensor with an attribute, .{extras[0]}")
    elif not isinstance(value, type | enum.Enum) and _copies_itself(type(value)):
        raise UnprovedError(f"is a {type(value).__name__}, which says itself what is copied of it")


def _copies_itself(kind: type[Any]) -> bool:
    return bool(kind.__flags__ & _HEAP_TYPE) and any(
        name in vars(of)
        for of in kind.__mro__
        if of.__flags__ & _HEAP_TYPE and is_users_object(of)
        for name in _OWN_COPIES
    )


_HEAP_TYPE = 1 << 9
"""A class made by a class statement."""


class _Pickler(pickle.Pickler):
    watched: Collection[int] | None = None

    def persistent_id(self, value: Any) -> Any:
        if isinstance(value, nn.Module) and not self._is_watched(value):
            raise UnprovedError("holds a module that is not registered; use nn.ModuleList")
        refuse_hidden(value)
        if isinstance(value, torch.Generator):
            raise UnprovedError("is a torch.Generator, whose numbers every micro-batch would draw")
        if isinstance(value, _BY_ID):
            return type(value).__name__, id(value)
        if isinstance(value, weakref.ref):
            return "reference", id(value())
        return None

    def _is_watched(self, module: nn.Module) -> bool:
        return self.watched is None or id(module) in self.watched


def digest(value: Any, watched: Collection[int] | None = None) -> bytes:
    """What a value holds; tensors, modules and functions by identity.

    Args:
        value: Any.
        watched: Ids of the modules that it may hold; ``None`` = any.

    Raises:
        UnprovedError: If it cannot be told.
    """
    buffer = io.BytesIO()
    try:
        pickler = _Pickler(buffer, protocol=5)
        pickler.watched = watched
        pickler.dump(value)
    except UnprovedError:
        raise
    except Exception as error:  # whatever a user's type raises
        raise UnprovedError(
            f"is a {type(value).__name__}, of which cannot be told whether it changes "
            f"({type(error).__name__})"
        ) from error
    return buffer.getvalue()


def state_of(module: nn.Module, given: Collection[nn.Module]) -> dict[tuple[str, str], bytes]:
    """Digests of all attributes of all modules and of their classes, by path and name.

    Raises:
        UnprovedError: If one cannot be told.
    """
    found = {}
    watched = {id(of) for of in (*module.modules(), *given)}
    inside = dict(dense_modules(module, given))
    named = [(path, name, value) for path, of in inside.items() for name, value in vars(of).items()]
    named += [
        (f"the class {of.__name__}", name, value)
        for of in classes_of(inside.values())
        for name, value in vars(of).items()
        if not name.startswith("__")
    ]
    for path, name, value in named:
        try:
            found[path, name] = digest(value, watched)
        except UnprovedError as unproved:
            place = f"{path}.{name}" if path else name
            raise UnprovedError(f"{place} {unproved}") from unproved
    return found


def classes_of(modules: Iterable[nn.Module]) -> list[type]:
    """The user's classes that modules are of."""
    found = {of: None for module in modules for of in type(module).__mro__ if is_users_object(of)}
    return list(found)
