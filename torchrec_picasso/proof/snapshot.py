"""The Python state that a model's forward can reach: kept, compared and restored.

A forward runs K times in a step of K micro-batches. A function that counts in a global, reads a
clock or keeps batches in a list then behaves differently. So every container that the model's code
can reach is kept by a shallow copy: attributes, their lists, dicts and plain objects, classes,
closures, defaults, and the global names that each of the user's functions reads. Values whose
content cannot be compared, such as iterators, caches or arrays, are refused.
"""

from __future__ import annotations

import builtins
import dis
import functools
import logging
import types
import weakref
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from enum import Enum
from numbers import Number
from operator import is_, ne
from types import BuiltinFunctionType, CodeType, FrameType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo import OptimizedModule
from torch._subclasses.fake_tensor import FakeTensor
from torchrec.distributed.types import ShardedModule

from torchrec_picasso.batches.split import PLAIN_TYPES
from torchrec_picasso.proof.hooks import (
    ADVICE,
    GLOBAL_HOOKS,
    HOOKS,
    accumulation_hooks,
    why_parameter_hooked,
)
from torchrec_picasso.proof.values import UnprovedError
from torchrec_picasso.proof.watch import foreign_module, is_users, is_users_module

__all__ = ["Kept", "Snapshot"]

_NOTHING = object()
_HEAP_TYPE = 1 << 9
"""Type flag of classes from a class statement, whose attributes can be set."""
_TORCH = frozenset(vars(nn.Module()))
_MACHINERY = ("__dataclass_fields__", "__dataclass_params__", "__annotations__", "_abc_impl")
"""Attributes of classes that Python makes, and that hold no state of the user's."""
_FORBIDDEN = {
    getattr(builtins, name)
    for name in (
        *("globals", "locals", "vars", "setattr", "delattr", "id", "hash", "exec", "eval"),
        *("compile", "open", "input", "__import__"),
    )
}
_PAST_ATTRIBUTES = (
    *("__globals__", "__closure__", "__defaults__", "__kwdefaults__", "__code__"),
    *("__dict__", "__class__", "__setattr__", "__delattr__", "__subclasses__"),
)
_NAMES = ("LOAD_GLOBAL", "STORE_GLOBAL", "DELETE_GLOBAL", "LOAD_NAME")
_ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD", "STORE_ATTR", "DELETE_ATTR")
_BETWEEN = ("CACHE", "PRECALL", "PUSH_NULL", "COPY")
"""Instructions between the load of a name and that of its attribute."""

_CONTAINERS: tuple[Any, ...] = (dict, list, set, deque)
_LEAVES = (
    *(*PLAIN_TYPES, range, slice, type(Ellipsis), torch.layout, torch.memory_format, np.ufunc),
    *(FakeTensor, dist.ProcessGroup, logging.Logger, types.GenericAlias, types.UnionType),
    *(torch._ops.OpOverload, torch._ops.OpOverloadPacket, types.MethodWrapperType),
)
"""Types without content that could change, or that the proof watches elsewhere."""

_EQUAL = (type(None), str, bytes, int, float, bool, complex, MethodType, torch.Size, torch.device)
"""Types whose equal values are the same to every program."""

_Member = tuple[str, Any]


class Kept:
    """A container and its content when it was found."""

    def __init__(self, path: str, place: Any, is_library: bool) -> None:
        self.path, self.place, self.is_library = path, place, is_library
        self._is_class = isinstance(place, type)
        self._content = vars(place) if self._is_class else place
        self._base = next((base for base in _CONTAINERS if isinstance(place, base)), dict)
        self.before = self._base(self._content)
        self._order = list(self._content)
        # a class is seen through a proxy; a subclass may have an __eq__ of its own
        self._differ = ne if self._is_class else self._base.__ne__
        values = self.before.values() if self._base is dict else self.before
        self._has_objects = any(type(value) not in _EQUAL for value in values)

    def has_changed(self, in_order: bool = False) -> bool:
        """Whether the content differs, or cannot be compared any more.

        Args:
            in_order: Whether another order is a difference, too; slower.
        """
        now, before = self._content, self.before
        try:
            if in_order and list(now) != self._order:
                return True
            if self._differ(now, before):
                return True
            if self._base is set or not (self._has_objects or in_order):
                return False
            values = (now.values(), before.values()) if self._base is dict else (now, before)
            if all(map(is_, *values)):
                return False
            names = before if self._base is dict else range(len(before))
            return any(_is_replaced(now[name], before[name]) for name in names)
        except Exception:  # any error of a comparison, such as that of two tensors
            return True

    def difference(self) -> str:
        """Names the member that differs, or the container."""
        now, before = self._content, self.before
        for name in [*before, *now] if isinstance(before, dict) else ():
            if now.get(name, _NOTHING) is not before.get(name, _NOTHING):
                return f"{self.path}.{name}"
        return self.path

    def restore(self) -> None:
        """Puts the content back."""
        place, before = self.place, self.before
        if self._is_class:
            for name in {*vars(place), *before}:
                if name not in before:
                    type.__delattr__(place, name)
                elif vars(place).get(name, _NOTHING) is not before[name]:
                    type.__setattr__(place, name, before[name])
            return
        self._base.clear(place)
        fill = self._base.extend if self._base in (list, deque) else self._base.update
        fill(place, before)


class Snapshot:
    """The state of a model and of the functions that its forward has called.

    Args:
        model: The model.
        given: Modules that do not run.
        types: The user's types in its batches.

    Attributes:
        reason: The first value that cannot be watched; ``None`` = all can.
    """

    def __init__(
        self, model: nn.Module, given: Collection[nn.Module], types: Collection[type] = ()
    ) -> None:
        self.reason: str | None = None
        self._made_of = model, given, types
        self._given = {id(module) for module in given}
        self._seen: dict[int, Any] = {}
        self._kept: dict[int, Kept] = {}
        # of modules that do not run: compared around the forward, since a step may change them
        self._given_kept: list[Kept] = []
        self._same: list[tuple[str, Mapping[str, Any], list[Any]]] = []
        self._names: dict[tuple[int, str], tuple[Any, str, Any]] = {}
        self._cells: dict[int, tuple[str, Any, Any]] = {}
        self._weights: list[tuple[str, Tensor, bool, Any]] = []
        self._forwards: list[tuple[type[nn.Module], Any, Any]] = []
        # by id: equal code of another function may have other names
        self._functions: dict[int, list[FunctionType]] = {}
        self._nested: set[int] = set()
        self._writing: set[int] = set()
        self._entered: dict[tuple[int, int], tuple[CodeType, dict[str, Any]]] = {}
        for name in GLOBAL_HOOKS:
            self._keep_hooks("all modules", vars(nn.modules.module), name, name)
        self._walk([("", model), *((f"the class {t.__name__}", t) for t in types)])

    # -- what is kept ----------------------------------------------------------------------------

    def _refuse(self, reason: str) -> None:
        """Records a reason; only the first one is kept."""
        self.reason = self.reason or reason

    def _walk(self, members: Iterable[_Member], is_library: bool = False) -> None:
        """Keeps values and all that they hold."""
        todo = [(path, value, is_library) for path, value in members]
        while todo:
            path, value, is_library = todo.pop()
            if id(value) in self._seen or type(value) is object:
                continue
            is_leaf = isinstance(value, _LEAVES) or type(value).__module__ == "typing"
            if is_leaf and (isinstance(value, Enum) or not _has_attributes(value)):
                continue
            self._seen[id(value)] = value  # alive, so that no other object gets its id
            if isinstance(value, nn.Module):  # PyTorch's and TorchRec's set state at first use
                is_library = type(value).__module__.partition(".")[0] in ("torch", "torchrec")
            todo += [(p, member, is_library) for p, member in self._take(path, value, is_library)]

    def _keep(self, path: str, place: Any, is_library: bool = False) -> list[_Member]:
        """Keeps the content of a container; returns its members."""
        if id(place) not in self._kept:
            self._kept[id(place)] = Kept(path, place, is_library)
        before = self._kept[id(place)].before
        if isinstance(before, dict):
            named = [(f"{path}.{name}".removeprefix("."), v) for name, v in before.items()]
            return named + [(path, name) for name in before if not isinstance(name, str)]
        return [(path, member) for member in before]

    def _keep_hooks(self, path: str, owner: Any, name: str, words: str) -> None:
        """Keeps a dictionary of hooks, and refuses hooks in it."""
        if self._keep(f"{path}.{name}", owner[name]):
            self._refuse(f"a {words} on {path}: {ADVICE}")

    def _take(self, path: str, value: Any, is_library: bool) -> Iterable[_Member]:
        """Keeps one value; returns its members."""
        if isinstance(value, FunctionType):
            return self._take_function(path, value)
        if isinstance(value, BuiltinFunctionType):
            return self._take_builtin(path, value)
        if isinstance(value, type):
            return self._take_class(value)
        if isinstance(value, ModuleType):
            self._refuse(f"reads {path}, a module, whatever is in it")
            return ()
        for kind, names in _PARTS:
            if isinstance(value, kind):
                return [(path, getattr(value, name)) for name in names]
        if isinstance(value, weakref.ref):
            return [(path, value())]
        if isinstance(value, (tuple, frozenset, *_LEAVES)):
            inside = value if isinstance(value, tuple | frozenset) else ()
            members: list[_Member] = [(path, member) for member in inside]
            if _has_attributes(value):
                members += [*self._keep(path, vars(value)), (path, type(value))]
            return members
        if isinstance(value, Tensor):
            return self._take_tensor(path, value)
        if isinstance(value, nn.Module):
            return self._take_module(path, value, is_library)
        members = []
        if isinstance(value, _CONTAINERS):
            members += self._keep(path, value, is_library)
        elif hasattr(type(value), "__get__") and not type(value).__flags__ & _HEAP_TYPE:
            return ()  # a descriptor of Python itself
        elif not _is_plain_object(value):
            self._refuse(f"{path} is a {type(value).__name__}, whose changes cannot be seen")
            return ()
        if hasattr(value, "__dict__"):
            members += self._keep(path, vars(value), is_library)
        return [*members, (f"the class {type(value).__name__}", type(value))]

    def _take_module(self, path: str, module: nn.Module, is_library: bool) -> Iterable[_Member]:
        """Keeps a module: its members and attributes; of those that do not run, the hooks."""
        attributes, name = vars(module), path or "the model"
        is_compiled = isinstance(module, OptimizedModule | torch.jit.ScriptModule)
        if is_compiled or attributes.get("_compiled_call_impl") is not None:
            self._refuse(f"{name} is compiled, so its operators are not seen")
            return ()
        for hooks, words in HOOKS.items():
            self._keep_hooks(name, attributes, hooks, words)
        if id(module) in self._given or isinstance(module, ShardedModule):
            return self._take_given(name, attributes)
        for kind in ("_parameters", "_buffers", "_modules"):
            self._same.append((name, attributes[kind], list(attributes[kind].values())))
        own = self._keep(path, attributes, is_library)
        members = [(p, v) for p, v in own if p.removeprefix(f"{path}.") not in _TORCH]
        for kind in ("_parameters", "_buffers", "_modules"):
            members += self._keep(path, attributes[kind], is_library)
        return [*members, (f"the class {type(module).__name__}", type(module))]

    def _take_given(self, path: str, attributes: Mapping[str, Any]) -> Iterable[_Member]:
        """Keeps what the user's code may have hung on a module that does not run."""
        members = []
        for name, value in attributes.items():
            if isinstance(value, _CONTAINERS):
                self._given_kept.append(Kept(f"{path}.{name}", value, is_library=False))
            elif is_users_module(type(value).__module__):
                members.append((f"{path}.{name}", value))
        return members

    def _take_tensor(self, path: str, tensor: Tensor) -> Iterable[_Member]:
        """Keeps attributes and hooks of a tensor; its data may change, but not in the forward."""
        if isinstance(tensor, nn.Parameter) or tensor.requires_grad:
            reason = why_parameter_hooked(tensor)
            if reason is not None:
                self._refuse(f"{reason} on the parameter {path}: {ADVICE}")
            node = accumulation_hooks(tensor)
            for hooks in () if node is None else node[1]:
                self._keep(f"a hook on the accumulation of {path}'s gradient", hooks)
            # the node stays alive: a new one would have other dictionaries
            self._weights.append((path, tensor, tensor.requires_grad, node))
        return self._keep(path, vars(tensor))

    def _take_class(self, cls: type) -> Iterable[_Member]:
        """Keeps a class of the user's, and its bases."""
        path = f"the class {cls.__name__}"
        if not is_users_module(cls.__module__):
            if not cls.__flags__ & _HEAP_TYPE and foreign_module(cls.__module__):
                self._refuse(f"uses {path}, of the module {cls.__module__}")
            if issubclass(cls, nn.Module):  # others may replace a library's forward later
                self._forwards.append((cls, cls.forward, cls.__call__))
            return ()
        members = self._keep(path, cls)
        own = [(p, v) for p, v in members if p.removeprefix(f"{path}.") not in _MACHINERY]
        return [*own, *((path, base) for base in (*cls.__mro__[1:], type(cls)))]

    def _take_builtin(self, path: str, value: BuiltinFunctionType) -> Iterable[_Member]:
        """Refuses built-in functions with effects, or of an unknown extension."""
        owner = value.__self__
        found = foreign_module(value.__module__ or type(owner).__module__)
        found = found or foreign_module(type(owner).__module__)
        if found or (owner is builtins and value in _FORBIDDEN):
            self._refuse(f"calls {path}" + (f", of the module {found}" if found else ""))
        is_function = owner is None or isinstance(owner, ModuleType | type)
        return () if is_function or type(owner).__name__ == "PyCapsule" else [(path, owner)]

    def _take_function(self, path: str, function: FunctionType) -> Iterable[_Member]:
        """Notes a function; its state is kept when it is called."""
        code = function.__code__
        self._functions.setdefault(id(code), []).append(function)
        if (id(code), id(function.__globals__)) in self._entered:
            return self._state_of(function)
        if is_users(code, function.__globals__):
            return ()
        found = foreign_module(function.__globals__.get("__name__"))
        if found:
            self._refuse(f"uses {path}, of the module {found}")
        # a decorator of a library: the user's function is in its closure
        inside = [cell.cell_contents for cell in function.__closure__ or () if _is_full(cell)]
        return [(path, v) for v in inside if isinstance(v, FunctionType | MethodType)]

    def _state_of(self, function: FunctionType) -> list[_Member]:
        """Keeps the closure of a function, its defaults and what its attributes hold."""
        name = function.__qualname__
        members = self._keep(name, vars(function))
        given = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
        members += [(f"a default of {name}", value) for value in given]
        for variable, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
            if _is_full(cell):
                self._cells[id(cell)] = variable, cell, cell.cell_contents
                members.append((variable, cell.cell_contents))
        return members

    # -- functions of the forward ----------------------------------------------------------------

    def enter(self, frame: FrameType) -> None:
        """Examines a function of the user's that was just called, before it runs.

        Raises:
            UnprovedError: If the function may behave differently in the next call.
        """
        code = frame.f_code
        if (id(code), id(frame.f_globals)) not in self._entered:
            self._examine(code, frame.f_globals)
        if id(code) in self._writing:
            owner = frame.f_locals.get(code.co_varnames[0])
            is_known = id(getattr(owner, "__dict__", None)) in self._kept
            is_made = is_users_module(type(owner).__module__) and not isinstance(owner, Enum)
            if isinstance(owner, type | FunctionType) or not (is_known or is_made):
                self._refuse(f"writes an attribute of a {type(owner).__name__}")
        if self.reason is not None:
            raise UnprovedError(self.reason)

    def examine_all(self) -> None:
        """Examines every function that was found, called or not, so that all can be restored."""
        before = -1
        while before != len(self._entered):  # each may reveal others
            before = len(self._entered)
            for function in [each for found in self._functions.values() for each in found]:
                code, names = function.__code__, function.__globals__
                if is_users(code, names) and (id(code), id(names)) not in self._entered:
                    self._examine(code, names)

    def _examine(self, code: CodeType, names: dict[str, Any]) -> None:
        """Keeps what a function reads and writes beside its arguments."""
        functions = self._functions.get(id(code), [])
        if not functions and id(code) not in self._nested:
            self._refuse("is a function that was found nowhere in the model")
            return
        self._entered[id(code), id(names)] = code, names
        self._nested.update(id(inner) for inner in code.co_consts if isinstance(inner, CodeType))
        for function in functions:
            self._walk(self._state_of(function))
        instructions = list(dis.get_instructions(code))
        loaded = {i.argval for i in instructions if i.opname == "LOAD_GLOBAL"}
        if "int" in loaded and loaded & {"isinstance", "type"}:
            self._refuse("asks whether a value is an int, which sizes are not here")
        if "type" in loaded and "Tensor" in code.co_names:
            self._refuse("asks for the type of a tensor, which is another one here")
        if "getattr" in loaded and not {*_PAST_ATTRIBUTES}.isdisjoint(code.co_consts):
            self._refuse("takes attributes past its own")
        for place, instruction in enumerate(instructions):
            name, operation = instruction.argval, instruction.opname
            if operation in _NAMES:
                self._read(names, name, name, _attributes_after(instructions, place))
            elif operation == "IMPORT_NAME" and (is_users_module(name) or foreign_module(name)):
                self._refuse(f"imports {name}")
            elif operation in _ATTRIBUTES and name in _PAST_ATTRIBUTES:
                self._refuse(f"takes {name}")
            elif operation in ("STORE_ATTR", "DELETE_ATTR"):
                # only attributes of the first argument, which is an object that is watched
                target = instructions[place - 1]
                copies = [i for i in range(place) if instructions[i].opname == "COPY"]
                reads = [i for i in copies if instructions[i + 1].argval == name]
                if target.opname == "SWAP" and reads:  # +=, which reads the attribute before
                    target = instructions[reads[-1] - 1]
                is_first = target.opname == "LOAD_FAST" and target.argval in code.co_varnames[:1]
                if not (is_first and code.co_argcount):
                    self._refuse(f"writes .{name} of another object than its own")
                self._writing.add(id(code))

    def _read(
        self, names: Mapping[str, Any], name: str, path: str, attributes: Iterator[str]
    ) -> None:
        """Keeps the meaning of a name, and of the attributes that are read of a module."""
        value = names.get(name, _NOTHING)
        self._names.setdefault((id(names), name), (names, name, value))
        if value is _NOTHING and names is not vars(builtins):
            value = getattr(builtins, name, _NOTHING)
        if not isinstance(value, ModuleType):
            self._walk([(path, value)])
            return
        is_own, attribute = is_users_module(value.__name__), next(attributes, "")
        found = None if is_own else foreign_module(value.__name__)
        # PyTorch finds operators when they are asked for
        if found or not (is_own or hasattr(value, attribute)) or attribute not in vars(value):
            what = f"of the module {found}" if found else "a module, whatever is in it"
            self._refuse(f"reads {path}, {what}")
        else:
            self._read(vars(value), attribute, f"{path}.{attribute}", attributes)

    # -- comparison ------------------------------------------------------------------------------

    def changed_containers(self) -> list[Kept]:
        """Lists the containers whose content differs."""
        watched = (*self._kept.values(), *self._given_kept)
        return [kept for kept in watched if kept.has_changed(in_order=True)]

    def forget(self, containers: Iterable[Kept]) -> None:
        """Drops containers from all further comparisons."""
        for kept in containers:
            del self._kept[id(kept.place)]

    def changes(self) -> Iterator[str]:
        """Yields descriptions of changes."""
        for path, values, before in self._same:
            if len(values) != len(before) or not all(map(is_, values.values(), before)):
                yield f"{path} has other parameters, buffers or modules"
        for kept in self._kept.values():
            if kept.has_changed():
                yield f"{kept.difference()} has changed"
        for cls, forward, call in self._forwards:
            if cls.forward is not forward or cls.__call__ is not call:
                yield f"the forward of the class {cls.__name__} has changed"
        for path, weight, requires_grad, _ in self._weights:
            if weight.requires_grad is not requires_grad:
                yield f"requires_grad of {path} has changed"
            if weight._backward_hooks or weight._post_accumulate_grad_hooks:
                yield f"a hook on {path}"
        yield from (f"{words} has changed" for words in self.changed_names())

    def changed_names(self) -> Iterator[str]:
        """Names globals and variables of closures that have another value."""
        for names, name, value in self._names.values():
            if names.get(name, _NOTHING) is not value:
                yield f"the global {name}"
        for name, cell, value in self._cells.values():
            if cell.cell_contents is not value:
                yield f"the variable {name} of a closure"

    def restore(self) -> None:
        """Puts everything back that has changed."""
        for kept in self.changed_containers():
            kept.restore()
        for names, name, value in self._names.values():
            if names.get(name, _NOTHING) is value or not isinstance(names, dict):
                continue
            if value is _NOTHING:
                del names[name]
            else:
                names[name] = value
        for _, cell, value in self._cells.values():
            cell.cell_contents = value

    def again(self) -> Snapshot:
        """Takes another snapshot, of the current state."""
        made = Snapshot(*self._made_of)
        for code, names in self._entered.values():
            made._nested.add(id(code))
            made._examine(code, names)
        return made


_PARTS: tuple[tuple[type, tuple[str, ...]], ...] = (
    (MethodType, ("__self__", "__func__")),
    (staticmethod, ("__func__",)),
    (classmethod, ("__func__",)),
    (property, ("fget", "fset")),
    (functools.cached_property, ("func",)),
    (functools.partial, ("func", "args", "keywords")),
)
"""Types that hold functions, and where."""


def _is_replaced(now: Any, before: Any) -> bool:
    """Whether an equal value is another object that may hold other state."""
    if now is before or type(now) is not type(before):
        return now is not before
    if type(now) is tuple:
        return any(map(_is_replaced, now, before))
    return type(now) not in _EQUAL


def _has_attributes(value: Any) -> bool:
    """Whether a number, a text or a tuple is of the user's own class, with attributes."""
    kind = type(value)
    if not kind.__flags__ & _HEAP_TYPE or not isinstance(value, (Number, str, bytes, tuple)):
        return False
    return hasattr(value, "__dict__") and is_users_module(kind.__module__)


def _is_full(cell: Any) -> bool:
    """Whether a closure's cell has a content."""
    try:
        return cell.cell_contents is not _NOTHING
    except ValueError:
        return False


class _Plain:
    """An object without state outside its attributes."""


def _is_plain_object(value: Any) -> bool:
    """Whether the attributes of an object hold all of its state."""
    has_slots = any(vars(base).get("__slots__") for base in type(value).__mro__)
    is_small = type(value).__basicsize__ == _Plain.__basicsize__
    return hasattr(value, "__dict__") and is_small and not has_slots


def _attributes_after(instructions: list[dis.Instruction], place: int) -> Iterator[str]:
    """Yields the names of attributes that are loaded or stored in turn after an instruction."""
    for instruction in instructions[place + 1 :]:
        if instruction.opname in _BETWEEN:
            continue
        if instruction.opname not in _ATTRIBUTES:
            return
        yield instruction.argval
