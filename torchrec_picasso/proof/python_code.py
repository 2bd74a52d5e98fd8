"""Checks the names that the Python functions of a forward read and write beside their arguments.

A forward runs K times in a step of K micro-batches. A function that counts in a global, reads a
clock or keeps batches in a list of its module then behaves differently. Every function of the
user's is examined when it is called, before it runs: the names that its bytecode loads and stores.
It may read functions, classes and values that never change; a proof holds as long as these names
keep their meaning.
"""

from __future__ import annotations

import builtins
import dis
import functools
import gc
import inspect
import logging
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from types import BuiltinFunctionType, CodeType, FrameType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor

from torchrec_picasso.proof.values import UnprovedError
from torchrec_picasso.proof.where import is_users

__all__ = ["Names", "foreign_module"]

_UNSTEADY = frozenset(
    (
        *("random", "numpy.random", "secrets", "uuid", "time", "datetime", "os", "io", "tempfile"),
        *("threading", "queue", "multiprocessing", "subprocess", "asyncio", "contextvars"),
        *("socket", "select", "signal", "sys", "gc", "ctypes", "importlib"),
    )
)
"""Modules of clocks, random numbers and the outside world."""

_COMMUNICATING = "torch.distributed"
_FORBIDDEN = frozenset(
    getattr(builtins, name)
    for name in (
        *("globals", "vars", "setattr", "delattr", "id", "exec", "eval", "compile", "open"),
        *("input", "__import__"),
    )
)
_PLAIN = (type(None), bool, int, float, complex, str, bytes, range, slice, Enum, type(Ellipsis))
_PLAIN_OF_TORCH = (torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size)
_NOTHING = object()


def foreign_module(name: str | None) -> str | None:
    """Returns the module among :data:`_UNSTEADY`, or ``torch.distributed``, that a name is in."""
    parts = (name or "").split(".")
    for end in range(len(parts), 0, -1):
        found = ".".join(parts[:end])
        if found in _UNSTEADY or found.removeprefix("_") in _UNSTEADY or found == _COMMUNICATING:
            return found
    return None


@dataclass(frozen=True)
class _Read:
    """A name that a function reads, and its meaning."""

    names: Mapping[str, Any]
    name: str
    value: Any


class Names:
    """The names that the functions of a forward read; refuses values that may change.

    Args:
        outermost: The frame that calls the forward.
    """

    def __init__(self, outermost: FrameType) -> None:
        self._outermost = outermost
        self._seen: set[CodeType] = set()
        self._reads: dict[tuple[int, str], _Read] = {}
        self._cells: dict[int, tuple[Any, Any]] = {}
        self._classes: dict[int, type] = {}

    @property
    def reads(self) -> list[tuple[Mapping[str, Any], str, Any]]:
        """Namespace, name and value of each name that is read."""
        return [(read.names, read.name, read.value) for read in self._reads.values()]

    @property
    def cells(self) -> list[tuple[Any, Any]]:
        """Cells of closures and their contents."""
        return list(self._cells.values())

    @property
    def classes(self) -> list[type]:
        """The user's classes that are read by name."""
        return list(self._classes.values())

    def written(self) -> str | None:
        """Names a function that got attributes during the forward, and removes them."""
        for read in self._reads.values():
            function = read.value
            is_its = isinstance(function, FunctionType) and is_users(function.__code__)
            if is_its and vars(function):
                vars(function).clear()  # the function had none before: _refuse_unsteady checked
                return f"the model writes attributes of the function {read.name}"
        return None

    def enter(self, frame: FrameType) -> None:
        """Examines a function of the user's that was just called.

        Raises:
            UnprovedError: If the function may behave differently in the next call.
        """
        code = frame.f_code
        if set(code.co_freevars) - {"__class__"}:
            # closures differ from call to call, so they are checked before the cache of code
            self._check_cells(frame)
        if code in self._seen:
            return
        self._seen.add(code)
        self._check_defaults(frame)
        instructions = list(dis.get_instructions(code))
        for place, instruction in enumerate(instructions):
            name, operation = instruction.argval, instruction.opname
            if operation in ("STORE_GLOBAL", "DELETE_GLOBAL"):
                raise UnprovedError(f"writes the global {name}")
            is_of_cell = operation in ("STORE_DEREF", "DELETE_DEREF") and name in code.co_freevars
            if is_of_cell and self._maker(frame) is None:
                raise UnprovedError(f"writes {name}, which outlives its function")
            if operation == "IMPORT_NAME" and foreign_module(name):
                raise UnprovedError(f"imports {name}")
            if operation == "LOAD_GLOBAL" and name == "isinstance":
                _refuse_question(instructions, place)
            if operation in ("LOAD_GLOBAL", "LOAD_NAME"):
                self._check_global(frame, name, _attributes_after(instructions, place))
            if operation in ("STORE_ATTR", "DELETE_ATTR"):
                _check_target(frame, name, _target(instructions, place))
            if operation in ("LOAD_ATTR", "LOAD_METHOD") and name in _PAST_ATTRIBUTES:
                raise UnprovedError(f"takes {name}")

    def _check_global(self, frame: FrameType, name: str, attributes: Iterator[str]) -> None:
        """Checks a global, and the attributes that are read from it while it is a module."""
        names: Mapping[str, Any] = frame.f_globals
        value = names.get(name, _NOTHING)
        if value is _NOTHING:
            value = getattr(builtins, name, _NOTHING)
            if value is _NOTHING:
                return  # an unknown name: the function will raise NameError
            names = vars(builtins)
        path = name
        self._note(names, name, value, path)
        while isinstance(value, ModuleType):
            name = next(attributes, "")
            names, value = vars(value), getattr(value, name, _NOTHING)
            path = f"{path}.{name}"
            if value is _NOTHING:
                raise UnprovedError(f"reads the module {path}, whatever is in it")
            self._note(names, name, value, path)
        if isinstance(value, type) and is_users_object(value):
            name = next(attributes, "")
            if vars(value).get(name) is getattr(value, name, _NOTHING):
                _refuse_unsteady(vars(value)[name], f"{path}.{name}")

    def _note(self, names: Mapping[str, Any], name: str, value: Any, path: str) -> None:
        """Records one read of a name after checking its value."""
        _refuse_unsteady(value, path)
        if isinstance(value, type) and is_users_object(value):
            self._classes[id(value)] = value
            for attribute, inside in vars(value).items():
                if isinstance(inside, list | dict | set) and not attribute.startswith("_"):
                    raise UnprovedError(f"reads {path}, a class with a {type(inside).__name__}")
        if name in names:
            self._reads.setdefault((id(names), name), _Read(names, name, value))

    def _check_cells(self, frame: FrameType) -> None:
        """Checks closures: the outer function must be running, or the contents never change."""
        if self._maker(frame) is not None:
            return
        for function in _functions_of(frame):
            for name, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
                if name == "__class__":
                    continue
                try:
                    value = cell.cell_contents
                except ValueError:
                    continue  # an empty cell
                _refuse_unsteady(value, name)
                self._cells[id(cell)] = cell, value

    def _maker(self, frame: FrameType) -> FrameType | None:
        """Finds the running function of the forward that defined a nested function."""
        caller = frame.f_back
        while caller is not None and caller is not self._outermost:
            if frame.f_code in caller.f_code.co_consts:
                return caller
            caller = caller.f_back
        return None

    def _check_defaults(self, frame: FrameType) -> None:
        """Checks default arguments and attributes of the function that a frame runs."""
        code = frame.f_code
        is_of_expression = code.co_name in ("<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>")
        if not code.co_argcount + code.co_kwonlyargcount or is_of_expression:
            return
        for function in _functions_of(frame):
            given = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
            for value in given:
                _refuse_unsteady(value, f"a default of {function.__qualname__}")
            if vars(function):
                raise UnprovedError(f"has attributes on the function {function.__qualname__}")


def is_users_object(value: Any) -> bool:
    """Whether a class or function is the user's."""
    code = getattr(value, "__code__", None)
    if code is not None:
        return is_users(code)
    functions = (member for member in vars(value).values() if isinstance(member, FunctionType))
    found = next(functions, None)
    if found is not None:
        return is_users(found.__code__)
    return foreign_root(value.__module__) is None


@functools.lru_cache(1024)
def foreign_root(module: str) -> str | None:
    """The library that a module belongs to; ``None`` = the user's code."""
    root = module.partition(".")[0]
    return root if root in _TRUSTED else None


_TRUSTED = frozenset(
    (
        *("torch", "torchrec", "fbgemm_gpu", "tensordict", "numpy", "builtins", "typing", "types"),
        *("collections", "abc", "enum", "functools", "itertools", "math", "operator", "numbers"),
        *("dataclasses", "contextlib", "warnings", "logging", "copy"),
    )
)


def _refuse_unsteady(value: Any, path: str) -> None:
    """Refuses a value that may have another meaning in the next step."""
    if isinstance(value, ModuleType):
        found = foreign_module(value.__name__)
        if found:
            raise UnprovedError(f"reads {path}, of the module {found}")
    elif isinstance(value, BuiltinFunctionType):
        _refuse_builtin(value, path)
    elif isinstance(value, type | FunctionType):
        found = foreign_module(value.__module__)
        if found:
            raise UnprovedError(f"uses {path}, of {found}")
        if isinstance(value, FunctionType) and is_users(value.__code__) and vars(value):
            raise UnprovedError(f"uses {path}, a function with attributes")
    elif isinstance(value, MethodType):
        _refuse_unsteady(value.__self__, path)
    elif isinstance(value, functools.partial):
        for part in (value.func, *value.args, *value.keywords.values()):
            _refuse_unsteady(part, path)
    elif not _never_changes(value):
        raise UnprovedError(
            f"reads {path}, a {type(value).__name__} from outside the model, which may change"
        )


def _refuse_builtin(value: BuiltinFunctionType, path: str) -> None:
    """Refuses built-in functions with effects, or of an unknown extension."""
    owner = getattr(value, "__self__", None)
    home = value.__module__ or type(owner).__module__
    found = foreign_module(home) or foreign_module(type(owner).__module__)
    if found or (home == "builtins" and value in _FORBIDDEN):
        raise UnprovedError(f"calls {path}")
    root = home.partition(".")[0]
    if root not in _TRUSTED and root not in sys.stdlib_module_names:
        raise UnprovedError(f"calls {path}, which is not Python")
    is_of_torch = type(owner).__module__.partition(".")[0] == "torch"
    # a bound method, such as list.append: its object must never change
    if owner is not None and not isinstance(owner, ModuleType | type) and not is_of_torch:
        _refuse_unsteady(owner, path)


def _never_changes(value: Any) -> bool:
    """Whether a value is immutable, or of a type whose content is watched elsewhere."""
    if isinstance(value, tuple | frozenset):
        return all(_never_changes(member) for member in value)
    if isinstance(value, (*_PLAIN, *_PLAIN_OF_TORCH, logging.Logger, Tensor)):
        return True
    home = type(value).__module__
    return home in ("torch._ops", "typing", "types") or isinstance(value, _DESCRIPTORS)


_DESCRIPTORS = (
    type(str.join),
    type(object.__init__),
    type(FunctionType.__code__),
    property,
    staticmethod,
    classmethod,
)


def _refuse_question(instructions: list[dis.Instruction], place: int) -> None:
    """Refuses ``isinstance(..., int)``: sizes are ints in a real forward, but symbols here."""
    for instruction in instructions[place + 1 :]:
        if instruction.opname == "CALL":
            return
        if instruction.opname == "LOAD_GLOBAL" and instruction.argval == "int":
            raise UnprovedError("asks whether a value is an int, which sizes are not here")


_PAST_ATTRIBUTES = frozenset(
    ("__globals__", "__closure__", "__defaults__", "__kwdefaults__", "__setattr__", "__delattr__")
)


def _target(instructions: list[dis.Instruction], place: int) -> dis.Instruction:
    """Finds the instruction that loads the object whose attribute is written."""
    before = [i for i in instructions[:place] if i.opname != "CACHE"]
    if before[-1].opname == "SWAP":  # augmented assignment: a copy of the object is read first
        name = instructions[place].argval
        reads = (three for three in zip(before[::-1], before[-2::-1], before[-3::-1]))
        for read, copied, found in reads:
            if read.opname == "LOAD_ATTR" and read.argval == name and copied.opname == "COPY":
                return found
    return before[-1]


def _check_target(frame: FrameType, name: str, target: dis.Instruction) -> None:
    """Refuses writes except to attributes of ``self``, which a copy of the model shows."""
    code = frame.f_code
    is_first = code.co_argcount and target.argval == code.co_varnames[0]
    if not is_first or target.opname not in ("LOAD_FAST", "LOAD_DEREF"):
        raise UnprovedError(f"writes .{name} of another object than its own")
    owner = frame.f_locals.get(code.co_varnames[0])
    if isinstance(owner, type | Enum | Tensor | FunctionType):
        raise UnprovedError(f"writes .{name} of a {type(owner).__name__}")


def _attributes_after(instructions: list[dis.Instruction], place: int) -> Iterator[str]:
    """Yields the names of attributes that are loaded in turn after an instruction."""
    for instruction in instructions[place + 1 :]:
        if instruction.opname in ("CACHE", "PRECALL", "PUSH_NULL"):
            continue
        if instruction.opname not in ("LOAD_ATTR", "LOAD_METHOD"):
            return
        yield instruction.argval


def _functions_of(frame: FrameType) -> list[FunctionType]:
    """Finds the function that a frame runs, or all living functions with its code."""
    code = frame.f_code
    first = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
    owners = [vars(cls) for cls in (*type(first).__mro__, *getattr(first, "__mro__", ()))]
    # a global or a method by its name; else, such as for nested functions, the code's referrers
    for names in (frame.f_globals, *owners):
        found = inspect.unwrap(_plain_function(names.get(code.co_name)), stop=_is_of(code))
        if isinstance(found, FunctionType) and found.__code__ is code and not found.__closure__:
            return [found]
    return [f for f in gc.get_referrers(code) if isinstance(f, FunctionType)]


def _plain_function(value: Any) -> Any:
    """Unwraps properties, static methods and class methods."""
    if isinstance(value, property):
        return value.fget
    return getattr(value, "__func__", value)


def _is_of(code: CodeType) -> Any:
    """Makes a test for functions with this code."""
    return lambda function: getattr(function, "__code__", None) is code
