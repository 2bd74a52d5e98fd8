"""What the Python functions of a forward read and write beside their arguments.

A forward runs K times in a step of K micro-batches. A function that counts in a global, reads a
clock or keeps batches in a list of its module does something else then. Every function of the
user's that runs is looked at as it begins, before it has done anything: the names that its bytecode
loads and stores. Functions, classes and values that never change may be read; a proof holds as long
as these names mean the same.
"""

from __future__ import annotations

import builtins
import dis
import functools
import gc
import inspect
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from types import BuiltinFunctionType, CodeType, FrameType, FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor

from torchrec_picasso.proof.values import Unproved
from torchrec_picasso.proof.where import is_users

__all__ = ["Names", "foreign_module"]

_UNSTEADY = frozenset(
    "random time os secrets uuid datetime threading socket subprocess multiprocessing asyncio "
    "tempfile queue io sys gc numpy.random weakref contextvars select signal ctypes".split()
)
"""Modules of clocks, of random numbers, of the world outside."""

_COMMUNICATING = "torch.distributed"
_FORBIDDEN = frozenset(
    getattr(builtins, name)
    for name in "globals exec eval open input __import__ compile setattr delattr id vars".split()
)
_PLAIN = (type(None), bool, int, float, complex, str, bytes, range, slice, Enum, type(Ellipsis))
_PLAIN_OF_TORCH = (torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size)
_NOTHING = object()


def foreign_module(name: str | None) -> str | None:
    """The unsteady module that a name is of, if it is."""
    parts = (name or "").split(".")
    for end in range(len(parts), 0, -1):
        found = ".".join(parts[:end])
        if found in _UNSTEADY or found.removeprefix("_") in _UNSTEADY or found == _COMMUNICATING:
            return found
    return None


@dataclass(frozen=True)
class _Read:
    """A name that a function reads."""

    names: Mapping[str, Any]
    name: str
    value: Any


class Names:
    """Names that functions of a forward read; a value that may change is refused.

    Args:
        outermost: The frame that the forward is called from.
    """

    def __init__(self, outermost: FrameType) -> None:
        self._outermost = outermost
        self._seen: set[CodeType] = set()
        self._reads: dict[tuple[int, str], _Read] = {}
        self._cells: dict[int, tuple[Any, Any]] = {}
        self._classes: dict[int, type] = {}

    @property
    def reads(self) -> list[tuple[Mapping[str, Any], str, Any]]:
        """Namespaces, names in them and what these mean."""
        return [(read.names, read.name, read.value) for read in self._reads.values()]

    @property
    def cells(self) -> list[tuple[Any, Any]]:
        """Cells of closures and what is in them."""
        return list(self._cells.values())

    @property
    def classes(self) -> list[type]:
        """Classes of the user's that are read by name."""
        return list(self._classes.values())

    def enter(self, frame: FrameType) -> None:
        """Looks at a function of the user's that begins.

        Raises:
            Unproved: If it may do something else the second time.
        """
        code = frame.f_code
        if set(code.co_freevars) - {"__class__"}:
            self._check_cells(frame)
        if code in self._seen:
            return
        self._seen.add(code)
        self._check_defaults(frame)
        instructions = list(dis.get_instructions(code))
        for place, instruction in enumerate(instructions):
            name, operation = instruction.argval, instruction.opname
            if operation in ("STORE_GLOBAL", "DELETE_GLOBAL"):
                raise Unproved(f"writes the global {name}")
            if operation in ("STORE_DEREF", "DELETE_DEREF") and name in code.co_freevars:
                if self._maker(frame) is None:
                    raise Unproved(f"writes {name}, which outlives its function")
            if operation == "IMPORT_NAME" and foreign_module(name):
                raise Unproved(f"imports {name}")
            if operation in ("LOAD_GLOBAL", "LOAD_NAME"):
                attributes = _attributes_after(instructions, place)
                self._check_global(frame, name, attributes)

    def _check_global(self, frame: FrameType, name: str, attributes: Iterator[str]) -> None:
        names: Mapping[str, Any] = frame.f_globals
        value = names.get(name, _NOTHING)
        if value is _NOTHING:
            value = getattr(builtins, name, _NOTHING)
            if value is _NOTHING:
                return  # it raises
            names = vars(builtins)
        path = name
        self._note(names, name, value, path)
        while isinstance(value, ModuleType):
            name = next(attributes, "")
            names, value = vars(value), getattr(value, name, _NOTHING)
            path = f"{path}.{name}"
            if value is _NOTHING:
                raise Unproved(f"reads the module {path}, whatever is in it")
            self._note(names, name, value, path)

    def _note(self, names: Mapping[str, Any], name: str, value: Any, path: str) -> None:
        _refuse_unsteady(value, path)
        if isinstance(value, type) and is_users_object(value):
            self._classes[id(value)] = value
        if name in names:
            self._reads.setdefault((id(names), name), _Read(names, name, value))

    def _check_cells(self, frame: FrameType) -> None:
        """What a closure holds must be of a function that is still running, or never change."""
        if self._maker(frame) is not None:
            return
        for function in _functions_of(frame):
            for name, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
                if name == "__class__":
                    continue
                try:
                    value = cell.cell_contents
                except ValueError:
                    continue  # empty
                _refuse_unsteady(value, name)
                self._cells[id(cell)] = cell, value

    def _maker(self, frame: FrameType) -> FrameType | None:
        """The function of the forward, still running, that a nested one was made by."""
        caller = frame.f_back
        while caller is not None and caller is not self._outermost:
            if frame.f_code in caller.f_code.co_consts:
                return caller
            caller = caller.f_back
        return None

    def _check_defaults(self, frame: FrameType) -> None:
        code = frame.f_code
        is_of_expression = code.co_name in ("<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>")
        if not code.co_argcount + code.co_kwonlyargcount or is_of_expression:
            return
        for function in _functions_of(frame):
            given = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
            for value in given:
                _refuse_unsteady(value, f"a default of {function.__qualname__}")
            if vars(function):
                raise Unproved(f"has attributes on the function {function.__qualname__}")


def is_users_object(value: Any) -> bool:
    """Whether a class or function is the user's."""
    code = getattr(value, "__code__", None)
    if code is not None:
        return is_users(code)
    functions = (of for of in vars(value).values() if isinstance(of, FunctionType))
    found = next(functions, None)
    if found is not None:
        return is_users(found.__code__)
    return foreign_root(value.__module__) is None


@functools.lru_cache(1024)
def foreign_root(module: str) -> str | None:
    """The library that a module is of; ``None`` = the user's."""
    root = module.partition(".")[0]
    return root if root in _TRUSTED else None


_TRUSTED = frozenset(
    "torch torchrec fbgemm_gpu numpy builtins typing collections abc enum functools itertools "
    "math operator dataclasses contextlib types numbers warnings logging copy tensordict".split()
)


def _refuse_unsteady(value: Any, path: str) -> None:
    """Refuses a value that may mean something else in the next step."""
    if isinstance(value, ModuleType):
        found = foreign_module(value.__name__)
        if found:
            raise Unproved(f"reads {path}, of the module {found}")
        return
    if isinstance(value, BuiltinFunctionType):
        owner = getattr(value, "__self__", None)
        found = foreign_module(value.__module__) or foreign_module(type(owner).__module__)
        if found or (value.__module__ == "builtins" and value in _FORBIDDEN):
            raise Unproved(f"calls {path}")
        return
    if isinstance(value, type | FunctionType):
        found = foreign_module(value.__module__)
        if found:
            raise Unproved(f"uses {path}, of {found}")
        if isinstance(value, FunctionType) and is_users(value.__code__) and vars(value):
            raise Unproved(f"uses {path}, a function with attributes")
        return
    if not _never_changes(value):
        raise Unproved(
            f"reads {path}, a {type(value).__name__} from outside the model, which may change"
        )


def _never_changes(value: Any) -> bool:
    if isinstance(value, tuple | frozenset):
        return all(_never_changes(of) for of in value)
    if isinstance(value, (*_PLAIN, *_PLAIN_OF_TORCH, logging.Logger, Tensor)):
        return True
    if isinstance(value, functools.partial):
        return all(
            callable(of) or _never_changes(of)
            for of in (value.func, *value.args, *value.keywords.values())
        )
    is_of_torch = type(value).__module__.partition(".")[0] in ("torch", "typing", "types", "builtins")
    return is_of_torch and callable(value) and not isinstance(value, torch.nn.Module)


def _attributes_after(instructions: list[dis.Instruction], place: int) -> Iterator[str]:
    """Names of attributes that are loaded one after the other, from an instruction on."""
    for instruction in instructions[place + 1 :]:
        if instruction.opname in ("CACHE", "PRECALL", "PUSH_NULL"):
            continue
        if instruction.opname not in ("LOAD_ATTR", "LOAD_METHOD"):
            return
        yield instruction.argval


def _functions_of(frame: FrameType) -> list[FunctionType]:
    """The function that a frame runs, or all that are alive of its code."""
    code = frame.f_code
    first = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
    owners = [vars(of) for of in (*type(first).__mro__, *getattr(first, "__mro__", ()))]
    for names in (frame.f_globals, *owners):
        found = inspect.unwrap(_plain_function(names.get(code.co_name)), stop=_is_of(code))
        if isinstance(found, FunctionType) and found.__code__ is code and not found.__closure__:
            return [found]
    return [of for of in gc.get_referrers(code) if isinstance(of, FunctionType)]


def _plain_function(value: Any) -> Any:
    if isinstance(value, property):
        return value.fget
    return getattr(value, "__func__", value)


def _is_of(code: CodeType) -> Any:
    return lambda function: getattr(function, "__code__", None) is code
