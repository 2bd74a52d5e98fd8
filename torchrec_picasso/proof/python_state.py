"""The Python state of a model: a copy for the proof, and digests that show a forward's changes.

The copy shares tensors with the model: the follower refuses writes into them.
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
    """Yields a module and its submodules by path, without modules whose output is given.

    Args:
        module: The model.
        given: Modules that do not run.
        name: Path of the model, which begins the yielded paths.
    """
    seen: set[int] = set()

    def walk(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
        if id(module) in seen or isinstance(module, ShardedModule):
            return
        if any(module is known for known in given):
            return
        seen.add(id(module))
        yield name, module
        for child_name, child in module.named_children():
            yield from walk(child, f"{name}.{child_name}" if name else child_name)

    return walk(module, name)


def copy_of(module: nn.Module, given: Collection[nn.Module]) -> nn.Module:
    """Copies a model; tensors, process groups and given modules are shared.

    Args:
        module: The model.
        given: Modules that do not run.

    Raises:
        UnprovedError: If the model cannot be copied; names the attribute.
    """
    memo: dict[int, Any] = {}
    for inside in module.modules():
        shared = [*inside._parameters.values(), *inside._buffers.values(), *vars(inside).values()]
        memo |= {id(v): v for v in shared if isinstance(v, Tensor | dist.ProcessGroup)}
        if isinstance(inside, ShardedModule) or any(inside is known for known in given):
            memo[id(inside)] = inside
    for path, inside in dense_modules(module, given):
        # a class with its own copy methods may share state that a forward changes
        if _copies_itself(type(inside)):
            raise UnprovedError(f"{path or 'the model'} says itself what is copied of it")
    try:
        return copy.deepcopy(module, memo)
    except Exception as error:  # any error of a user's type
        raise UnprovedError(
            f"{_culprit(module, given, memo)} cannot be copied ({type(error).__name__}: {error}), "
            "so what a forward does to it cannot be seen"
        ) from error


def _culprit(module: nn.Module, given: Collection[nn.Module], memo: dict[int, Any]) -> str:
    """Finds the attribute that cannot be copied, for a message."""
    for path, inside in dense_modules(module, given):
        for name, value in vars(inside).items():
            if name in _KEPT_BY_TORCH:
                continue
            try:
                copy.deepcopy(value, dict(memo))
            except Exception:  # this one made the copy fail
                return f"{path}.{name}" if path else name
    return "the model"


_KEPT_BY_TORCH = frozenset(("_parameters", "_buffers", "_modules"))


def is_of_library(module: nn.Module) -> bool:
    """Whether a module's class is PyTorch's or TorchRec's; these set state in a first forward."""
    return type(module).__module__.partition(".")[0] in ("torch", "torchrec")


_CACHED = functools._lru_cache_wrapper
_OWN_COPIES = ("__deepcopy__", "__getstate__", "__reduce__", "__reduce_ex__")


def refuse_hidden(value: Any) -> None:
    """Refuses values with state that neither a copy nor a digest of them shows.

    Raises:
        UnprovedError: Completes a sentence that begins with the value's name.
    """
    if isinstance(value, _CACHED):
        raise UnprovedError("is a cached function, which keeps what a forward gets of it")
    if isinstance(value, weakref.ref):
        if not isinstance(value(), Tensor | nn.Module | None):
            raise UnprovedError(f"refers to a {type(value()).__name__} outside the model")
    elif isinstance(value, Tensor):
        extras = [name for name, extra in vars(value).items() if not isinstance(extra, PLAIN_TYPES)]
        if extras and not extras[0].startswith("_"):
            raise UnprovedError(f"is a tensor with an attribute, .{extras[0]}")
    elif not isinstance(value, type | enum.Enum) and _copies_itself(type(value)):
        raise UnprovedError(f"is a {type(value).__name__}, which says itself what is copied of it")


def _copies_itself(kind: type[Any]) -> bool:
    """Whether the user's class, or a base of it, defines how it is copied or pickled."""
    return bool(kind.__flags__ & _HEAP_TYPE) and any(
        name in vars(cls)
        for cls in kind.__mro__
        if cls.__flags__ & _HEAP_TYPE and is_users_object(cls)
        for name in _OWN_COPIES
    )


_HEAP_TYPE = 1 << 9
"""Type flag of classes from a class statement."""


class _Pickler(pickle.Pickler):
    """Pickles Python state; tensors, modules and functions by identity."""

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
    """Digests the content of a value; tensors, modules and functions by identity.

    Args:
        value: Any value.
        watched: Ids of the modules that the value may hold; ``None`` = any.

    Returns:
        Bytes that are equal for equal content.

    Raises:
        UnprovedError: If the value cannot be pickled.
    """
    buffer = io.BytesIO()
    try:
        pickler = _Pickler(buffer, protocol=5)
        pickler.watched = watched
        pickler.dump(value)
    except UnprovedError:
        raise
    except Exception as error:  # any error of a user's type
        raise UnprovedError(
            f"is a {type(value).__name__}, of which cannot be told whether it changes "
            f"({type(error).__name__})"
        ) from error
    return buffer.getvalue()


def state_of(module: nn.Module, given: Collection[nn.Module]) -> dict[tuple[str, str], bytes]:
    """Digests all attributes of all modules and of their classes.

    Args:
        module: The model.
        given: Modules that do not run.

    Returns:
        Digests by path and name.

    Raises:
        UnprovedError: If an attribute has no digest; names it.
    """
    found = {}
    watched = {id(known) for known in (*module.modules(), *given)}
    inside = dict(dense_modules(module, given))
    named = [(path, name, value) for path, m in inside.items() for name, value in vars(m).items()]
    named += [
        (f"the class {cls.__name__}", name, value)
        for cls in classes_of(inside.values())
        for name, value in vars(cls).items()
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
    """Lists the user's classes among the classes and bases of modules, each once."""
    found = {c: None for module in modules for c in type(module).__mro__ if is_users_object(c)}
    return list(found)
