"""The state that a proof depends on, except tensors' data: kept, restored, compared each step.

In K micro-batches a forward runs K times, so a function that counts in a global, reads a clock or
keeps batches behaves differently. So every container that the model's code can reach is kept by a
shallow copy: attributes, their lists, dicts and plain objects, classes, closures, defaults, and the
globals that the user's functions read. What cannot be compared, such as an iterator, is refused.
"""

from __future__ import annotations

import builtins
from collections.abc import Collection, Iterable, Iterator, Sequence
from enum import Enum
from types import BuiltinFunctionType, CodeType, FrameType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo import OptimizedModule
from torchrec.distributed.types import ShardedModule

from torchrec_picasso.proof.content import (
    ATOMS,
    CONTAINERS,
    NOTHING,
    Kept,
    closure_of,
    held_by,
    is_class_statement,
    is_plain_object,
    settings,
)
from torchrec_picasso.proof.dense_part import (
    MODULE_ATTRIBUTES,
    accumulation_hooks,
    why_parameter_hooked,
)
from torchrec_picasso.proof.inputs import form_of, types_in
from torchrec_picasso.proof.values import UnprovedError
from torchrec_picasso.proof.watch import (
    foreign_module,
    globals_in,
    is_users,
    is_users_module,
    refusals_of,
    why_builtin_refused,
    writes_attributes,
)

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
"""Attributes of a module that hold hooks; ``torch.nn.modules.module`` has those on all modules."""
_ADVICE = "it would run once per micro-batch"
_MACHINERY = ("__dataclass_fields__", "__dataclass_params__", "__annotations__", "_abc_impl")
"""Attributes of classes that Python makes, and that hold no state of the user's."""
_Member = tuple[str, Any]


class Guard:
    """The state of a model and of the functions that its forward has called, and a batch's form.

    ``given`` are the modules that do not run; ``reason`` is the first value that cannot be watched,
    ``None`` = all can.
    """

    def __init__(self, model: nn.Module, given: Collection[nn.Module], batch: Any) -> None:
        self.reason: str | None = None
        self._model, self._modules = model, given
        self._form, self._settings = form_of(batch), settings()
        self._given = {id(module) for module in given}
        self._seen: dict[int, Any] = {}
        self._kept: dict[int, Kept] = {}
        # of modules that do not run: compared around the forward, since a step may change them
        self._given_kept: list[Kept] = []
        self._names: dict[tuple[int, str], tuple[dict[str, Any], str, Any]] = {}
        self._cells: dict[int, tuple[str, Any, Any]] = {}
        self._weights: list[tuple[str, Tensor, bool, torch.dtype, Any]] = []
        self._forwards: list[tuple[type[nn.Module], Any, Any]] = []
        # by id, since equal code of another function may have other names; none for code in others
        self._functions: dict[int, list[FunctionType]] = {}
        self._entered: dict[tuple[int, int], tuple[CodeType, dict[str, Any]]] = {}
        for hooks in _HOOKS:
            self._keep_hooks("all modules", vars(nn.modules.module), f"_global{hooks}")
        self._walk([("", model), *((f"the class {t.__name__}", t) for t in types_in(batch))])

    def _refuse(self, reason: str | None) -> None:
        self.reason = self.reason or reason

    def _walk(self, members: Iterable[_Member]) -> None:
        todo = [(path, value, False) for path, value in members]
        while todo:
            path, value, is_library = todo.pop()
            if id(value) in self._seen or type(value) in ATOMS:
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

    def _keep_hooks(self, path: str, owner: Any, name: str) -> None:
        if self._keep(f"{path}.{name}", owner[name]):
            words = name.strip("_").removesuffix("s").replace("_", " ")
            self._refuse(f"a {words} on {path}: {_ADVICE}")

    def _take(self, path: str, value: Any, is_library: bool) -> Iterable[_Member]:
        """Keeps one value; returns its members."""
        if isinstance(value, FunctionType):
            return self._take_function(path, value)
        if isinstance(value, BuiltinFunctionType):
            self._refuse(why_builtin_refused(path, value))
        if isinstance(value, type):
            return self._take_class(value)
        if isinstance(value, ModuleType):
            self._refuse(f"reads {path}, a module, whatever is in it")
            return ()
        held = held_by(value)
        if held is not None:
            members: list[_Member] = [(path, part) for part in held]
            # a number, a text or a tuple, say, of the user's own class
            is_own = is_users_module(type(value).__module__) and not isinstance(value, Enum)
            if is_own and hasattr(value, "__dict__"):
                members += [*self._keep(path, vars(value)), (path, type(value))]
            return members
        if isinstance(value, Tensor):
            return self._take_tensor(path, value)
        if isinstance(value, nn.Module):
            return self._take_module(path, value, is_library)
        members = []
        if isinstance(value, CONTAINERS):
            members += self._keep(path, value, is_library)
        elif not is_plain_object(value):
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
        for hooks in _HOOKS:
            self._keep_hooks(name, attributes, hooks)
        if id(module) in self._given or isinstance(module, ShardedModule):
            # what the user's code may have hung on a module that does not run
            held = [(f"{name}.{n}", value) for n, value in attributes.items()]
            self._given_kept += [Kept(p, v) for p, v in held if isinstance(v, CONTAINERS)]
            others = [(p, v) for p, v in held if not isinstance(v, CONTAINERS)]
            return [(p, v) for p, v in others if is_users_module(type(v).__module__)]
        own = self._keep(path, attributes, is_library)
        members = [(p, v) for p, v in own if p.removeprefix(f"{path}.") not in MODULE_ATTRIBUTES]
        for kind in ("_parameters", "_buffers", "_modules"):
            members += self._keep(path, attributes[kind])
        return [*members, (f"the class {type(module).__name__}", type(module))]

    def _take_tensor(self, path: str, tensor: Tensor) -> Iterable[_Member]:
        """Keeps attributes and hooks of a tensor; its data may change, but not in the forward."""
        if isinstance(tensor, nn.Parameter) or tensor.requires_grad:
            reason = why_parameter_hooked(tensor)
            if reason is not None:
                self._refuse(f"{reason} on the parameter {path}: {_ADVICE}")
            node, kept = accumulation_hooks(tensor)
            for hooks in kept:
                self._keep(f"a hook on the accumulation of {path}'s gradient", hooks)
            # the node stays alive: a new one would have other dictionaries
            self._weights.append((path, tensor, tensor.requires_grad, tensor.dtype, node))
        return self._keep(path, vars(tensor))

    def _take_class(self, cls: type) -> Iterable[_Member]:
        """Keeps a class of the user's, and its bases."""
        path = f"the class {cls.__name__}"
        if not is_users_module(cls.__module__):
            if not is_class_statement(cls) and foreign_module(cls.__module__):
                self._refuse(f"uses {path}, of the module {cls.__module__}")
            if issubclass(cls, nn.Module):  # others may replace a library's forward later
                self._forwards.append((cls, cls.forward, cls.__call__))
            return ()
        members = self._keep(path, cls)
        own = [(p, v) for p, v in members if p.removeprefix(f"{path}.") not in _MACHINERY]
        return [*own, *((path, base) for base in (*cls.__mro__[1:], type(cls)))]

    def _take_function(self, path: str, function: FunctionType) -> Iterable[_Member]:
        """Notes a function; its state is kept when it is called."""
        code = function.__code__
        self._functions.setdefault(id(code), []).append(function)
        if (id(code), id(function.__globals__)) in self._entered:
            return self._state_of(function)
        if is_users(code, function.__globals__):
            return self._keep(function.__qualname__, vars(function)) if vars(function) else ()
        found = foreign_module(function.__globals__.get("__name__"))
        if found:
            self._refuse(f"uses {path}, of the module {found}")
        # a decorator of a library: the user's function is in its closure
        inside = [content for _, _, content in closure_of(function)]
        return [(path, v) for v in inside if isinstance(v, FunctionType | MethodType)]

    def _state_of(self, function: FunctionType) -> list[_Member]:
        """Keeps the closure of a function, its defaults and what its attributes hold."""
        name = function.__qualname__
        members = self._keep(name, vars(function))
        given = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
        members += [(f"a default of {name}", value) for value in given]
        for variable, cell, content in closure_of(function):
            self._cells[id(cell)] = variable, cell, content
            members.append((variable, content))
        return members

    def enter(self, frame: FrameType) -> None:
        """Examines a user's function before it runs; one that may change its behaviour raises."""
        code = frame.f_code
        self._examine(code, frame.f_globals)
        if self.reason is None and writes_attributes(code):
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
                if is_users(function.__code__, function.__globals__):
                    self._examine(function.__code__, function.__globals__)

    def _examine(self, code: CodeType, names: dict[str, Any]) -> None:
        """Keeps what a function reads and writes beside its arguments, at its first call."""
        if (id(code), id(names)) in self._entered:
            return
        if id(code) not in self._functions:
            self._refuse("is a function that was found nowhere in the model")
            return
        self._entered[id(code), id(names)] = code, names
        for inner in code.co_consts:
            if isinstance(inner, CodeType):
                self._functions.setdefault(id(inner), [])
        for function in self._functions[id(code)]:
            self._walk(self._state_of(function))
        for reason in refusals_of(code):
            self._refuse(reason)
        for name, attributes in globals_in(code):
            self._read(names, name, name, attributes)

    def _read(self, names: dict[str, Any], name: str, path: str, attributes: Sequence[str]) -> None:
        """Keeps the meaning of a name, and of the attributes that are read of a module."""
        value = names.get(name, NOTHING)
        self._names.setdefault((id(names), name), (names, name, value))
        if value is NOTHING and names is not vars(builtins):
            value = getattr(builtins, name, NOTHING)
        if not isinstance(value, ModuleType):
            self._walk([(path, value)])
            return
        is_own, attribute = is_users_module(value.__name__), next(iter(attributes), "")
        found = None if is_own else foreign_module(value.__name__)
        # PyTorch finds operators when they are asked for
        if found or not (is_own or hasattr(value, attribute)) or attribute not in vars(value):
            what = f"of the module {found}" if found else "a module, whatever is in it"
            self._refuse(f"reads {path}, {what}")
        else:
            self._read(vars(value), attribute, f"{path}.{attribute}", attributes[1:])

    def changed_containers(self) -> list[Kept]:
        """Lists the containers whose content differs."""
        watched = (*self._kept.values(), *self._given_kept)
        return [kept for kept in watched if kept.has_changed()]

    def forget(self, containers: Iterable[Kept]) -> None:
        """Drops containers from all further comparisons."""
        for kept in containers:
            del self._kept[id(kept.place)]

    def changed(self, batch: Any = None) -> str | None:
        """Describes the first change since the proof; ``None`` = no change. The form of the next
        batch is compared too, if it is given."""
        try:
            return next(self._changes(batch), None)
        except Exception as error:  # any error of a comparison
            return f"attributes cannot be compared any more ({type(error).__name__}: {error})"

    def _changes(self, batch: Any) -> Iterator[str]:
        if batch is not None and form_of(batch) != self._form:
            yield "the batch has other fields, types, keys or plain values"
        if settings() != self._settings:
            yield "a setting of PyTorch has changed: autocast, default type, gradients"
        for kept in self._kept.values():
            if kept.has_changed():
                yield f"{kept.difference()} has changed"
        for cls, forward, call in self._forwards:
            if cls.forward is not forward or cls.__call__ is not call:
                yield f"the forward of the class {cls.__name__} has changed"
        for path, weight, requires_grad, dtype, _ in self._weights:
            if weight.requires_grad is not requires_grad:
                yield f"requires_grad of {path} has changed"
            if weight.dtype is not dtype:  # .half() changes a parameter in place
                yield f"the type of {path} has changed"
            if weight._backward_hooks or weight._post_accumulate_grad_hooks:
                yield f"a hook on {path}"
        yield from (f"{words} has changed" for words in self.changed_names())

    def changed_names(self) -> Iterator[str]:
        """Names globals and variables of closures that have another value."""
        for names, name, value in self._names.values():
            if names.get(name, NOTHING) is not value:
                yield f"the global {name}"
        for name, cell, value in self._cells.values():
            if cell.cell_contents is not value:
                yield f"the variable {name} of a closure"

    def restore(self) -> None:
        """Puts everything back that has changed."""
        for kept in self.changed_containers():
            kept.restore()
        for names, name, value in self._names.values():
            if value is not NOTHING:
                names[name] = value
            elif name in names:
                del names[name]
        for _, cell, value in self._cells.values():
            cell.cell_contents = value

    def again(self, batch: Any) -> Guard | None:
        """Makes a guard of the current model, which no proof belongs to, and of a batch's form.
        ``None`` = the model's state cannot be read any more."""
        try:
            made = Guard(self._model, self._modules, batch)
            for code, names in self._entered.values():
                made._functions.setdefault(id(code), [])
                made._examine(code, names)
        except Exception:  # any error of the user's attributes
            return None
        return made
