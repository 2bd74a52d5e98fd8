"""Checks before every step, in microseconds, that a model is still the one that was proved."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping
from operator import is_
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from torchrec_picasso.batches.split import PLAIN_TYPES
from torchrec_picasso.proof.hooks import accumulation_hooks, hook_dicts
from torchrec_picasso.proof.inputs import form_of
from torchrec_picasso.proof.python_code import Names
from torchrec_picasso.proof.python_state import classes_of, dense_modules, digest
from torchrec_picasso.proof.values import UnprovedError

__all__ = ["Guard", "may_change"]

_MODULE_DICTS = ("_parameters", "_buffers", "_modules")
_TORCH = frozenset(vars(nn.Module()))


class Guard:
    """The state of a model that a proof depends on, except its tensors' data.

    Args:
        module: The model.
        given: Sharded modules, whose outputs the proof replaced.
        batch: The batch of the proof.
        names: Globals and closures that the model's functions read.
        made_at_first_use: Path and name of attributes that modules of PyTorch and TorchRec make in
            their first forward.

    Raises:
        UnprovedError: If some state cannot be watched.
    """

    def __init__(
        self,
        module: nn.Module,
        given: Collection[nn.Module],
        batch: Any,
        names: Names,
        made_at_first_use: Collection[tuple[str, str]],
    ) -> None:
        self._made_of = module, given, names, made_at_first_use
        self._form: Hashable = form_of(batch)
        self._settings = _settings()
        # what changed() compares: identity of members, equality of dictionaries, reads of globals,
        # cells of closures, digests of other objects, hook dictionaries that must stay empty
        self._same: list[tuple[str, Mapping[str, Any], list[Any]]] = []
        self._equal: list[tuple[str, Any, Any]] = []
        self._reads = names.reads
        self._cells = names.cells
        self._digests: list[tuple[str, Any, bytes]] = []
        self._empty = list(hook_dicts(module, given))
        self._nodes: list[Node] = []
        self._parameters: list[tuple[str, Tensor, bool]] = []
        inside_modules = [inside for _, inside in dense_modules(module, given)]
        classes = dict.fromkeys([*names.classes, *classes_of(inside_modules)])
        for path, inside in dense_modules(module, given):
            late = {name for at, name in made_at_first_use if at == path}
            self._watch(path or "the model", inside, late)
            for name, parameter in inside._parameters.items():
                if parameter is not None:
                    place = f"{path}.{name}" if path else name
                    self._parameters.append((place, parameter, parameter.requires_grad))
                    self._watch_accumulation(place, parameter)
        for cls in classes:
            self._equal.append((f"the class {cls.__name__}", vars(cls), dict(vars(cls))))
            own = {name: value for name, value in vars(cls).items() if not name.startswith("__")}
            self._watch_containers(f"the class {cls.__name__}", own)

    def _watch(self, path: str, module: nn.Module, late: Collection[str]) -> None:
        """Watches one module's members and attributes."""
        for name in _MODULE_DICTS:
            values = vars(module)[name]
            self._same.append((path, values, list(values.values())))
        if late:
            return  # a module of PyTorch or TorchRec that sets its own state in its first forward
        self._equal.append((path, vars(module), dict(vars(module))))
        self._watch_containers(
            path, {name: value for name, value in vars(module).items() if name not in _TORCH}
        )

    def _watch_accumulation(self, place: str, parameter: Tensor) -> None:
        """Watches the hooks on the accumulation of a parameter's gradient."""
        accumulation = accumulation_hooks(parameter)
        if accumulation is not None:
            node, kept = accumulation
            self._nodes.append(node)  # kept alive: a new node would have other dictionaries
            words = f"a hook on the accumulation of {place}'s gradient"
            self._empty.extend((words, hooks) for hooks in kept)

    def _watch_containers(self, path: str, values: Mapping[str, Any]) -> None:
        """Watches attributes whose content may change while the object stays the same."""
        for name, value in list(values.items()):
            self._watch_inside(f"{path}.{name}", value, set())

    def _watch_inside(self, path: str, value: Any, seen: set[int]) -> None:
        """Watches one value and, in containers and plain objects, its members."""
        if not may_change(value) or id(value) in seen:
            return
        seen.add(id(value))
        members: Iterable[Any]
        if type(value) in (list, dict, set):
            self._equal.append((path, value, value.copy()))
            members = value.values() if isinstance(value, dict) else value
        elif isinstance(value, tuple | frozenset):
            members = value
        elif _is_plain_object(value):
            self._equal.append((path, vars(value), dict(vars(value))))
            members = vars(value).values()
        else:
            # an object with hidden state, e.g. of an extension: compared by its pickled bytes
            self._digests.append((path, value, digest(value)))
            return
        for member in list(members):
            self._watch_inside(path, member, seen)

    def again(self, batch: Any) -> Guard | None:
        """Makes a guard of the current model, which no proof belongs to.

        Args:
            batch: Batch whose form the guard expects.

        Returns:
            The guard; ``None`` = some state cannot be watched any more.
        """
        module, given, names, late = self._made_of
        try:
            made = Guard(module, given, batch, names, late)
        except UnprovedError:
            return None
        made._reads = [(space, name, space.get(name)) for space, name, _ in self._reads]
        made._cells = [(cell, cell.cell_contents) for cell, _ in self._cells]
        return made

    def changed(self, batch: Any = None) -> str | None:
        """Describes the first change since the proof; ``None`` = no change.

        Args:
            batch: The next batch; ``None`` = its form is not compared.
        """
        try:
            return next(self._changes(batch), None)
        except Exception as error:  # any error of a comparison
            return f"attributes cannot be compared any more ({type(error).__name__}: {error})"

    def _changes(self, batch: Any) -> Iterator[str]:
        """Yields descriptions of changes, cheap comparisons first."""
        if batch is not None and form_of(batch) != self._form:
            yield "the batch has other fields, types, keys or plain values"
        if _settings() != self._settings:
            yield "a setting of PyTorch has changed: autocast, default type, gradients"
        for words, hooks in self._empty:
            if hooks:
                yield words
        for path, values, before in self._same:
            if len(values) != len(before) or not all(map(is_, values.values(), before)):
                yield f"{path} has other parameters, buffers or modules"
        for path, values, before in self._equal:
            if values != before:
                yield f"{_difference(path, values, before)} has changed"
        for place, parameter, requires_grad in self._parameters:
            if parameter.requires_grad is not requires_grad:
                yield f"requires_grad of {place} has changed"
            if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
                yield f"a hook on {place}"
        for names, name, value in self._reads:
            if names.get(name) is not value:
                yield f"the global {name} has changed"
        for cell, value in self._cells:
            if cell.cell_contents is not value:
                yield "a variable of a closure has changed"
        for place, value, digested in self._digests:
            if digest(value) != digested:
                yield f"{place} has changed"


def _settings() -> Hashable:
    """Settings of PyTorch by which a model may branch."""
    return (
        torch.get_default_dtype(),
        torch.is_grad_enabled(),
        torch.are_deterministic_algorithms_enabled(),
        *((torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in ("cpu", "cuda")),
    )


def _difference(path: str, values: Any, before: Any) -> str:
    """Names the attribute that differs, or the whole object."""
    if isinstance(before, dict) and not path.startswith("the "):
        for name in [*before, *values]:
            if name not in values or name not in before or values[name] != before[name]:
                return f"{path}.{name}"
    return path


_NEVER = (
    *(*PLAIN_TYPES, Tensor, nn.Module, type, FunctionType, BuiltinFunctionType),
    *(property, staticmethod, classmethod),
)


def may_change(value: Any) -> bool:
    """Whether the content of a value may change while the object stays the same."""
    if isinstance(value, tuple | frozenset):
        return any(may_change(member) for member in value)
    return not isinstance(value, _NEVER)


def _is_plain_object(value: Any) -> bool:
    """Whether the attributes of an object hold all of its state."""
    kind = type(value)
    has_slots = any("__slots__" in vars(cls) for cls in kind.__mro__[:-1])
    own_methods = all(
        getattr(kind, name, None) is getattr(object, name, None)
        for name in ("__reduce__", "__reduce_ex__", "__getattribute__")
    )
    is_of_python = kind.__flags__ & _HEAP_TYPE and kind.__base__ is object
    return bool(hasattr(value, "__dict__") and not has_slots and own_methods and is_of_python)


_HEAP_TYPE = 1 << 9
"""Type flag of classes from a class statement; other types keep state outside attributes."""
