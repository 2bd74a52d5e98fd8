"""Watches the Python code of a forward: whose code runs, what it does, how it uses tensors."""

from __future__ import annotations

import builtins
import dis
import functools
import itertools
import sys
import sysconfig
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import BuiltinFunctionType, CodeType, FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from torchrec_picasso.proof.values import UnprovedError, is_symbolic

_TRUSTED = frozenset(
    (
        *("torch", "torchrec", "torchrec_picasso", "fbgemm_gpu", "tensordict"),
        *("numpy", "sympy", "mpmath"),
        *("builtins", "typing", "typing_extensions", "types", "collections", "abc", "enum"),
        *("functools", "itertools", "math", "operator", "numbers", "dataclasses", "contextlib"),
        *("warnings", "logging", "copy", "copyreg", "re", "string", "weakref", "reprlib"),
    )
)
"""Packages whose functions keep no state that a forward sees, except for these modules:"""
_UNSTEADY = (
    *("torch.distributed", "torch.random", "torch.cuda.random", "torch.cuda.memory"),
    *("torch.backends", "torch._C._distributed_c10d", "numpy.random", "typing.io"),
)


def foreign_module(name: str | None) -> str | None:
    """Returns a module that a forward must not use, such as a clock; ``None`` = a trusted one."""
    name = name or "builtins"
    parents = [name[:end] for end, letter in enumerate(name + ".") if letter == "."]
    if parents[0].lstrip("_") not in _TRUSTED and not _is_named_tuple(name):
        return name
    return next((parent for parent in parents if parent in _UNSTEADY), None)


@functools.lru_cache(4096)
def is_users_module(name: str, file: str = "") -> bool:
    """Whether a module is the user's, as are installed packages that are not listed."""
    root = name.partition(".")[0]
    if name.startswith("torchrec_picasso.app.zoo."):
        return True  # models, though inside this package
    is_standard = not file or file.startswith(("<frozen", sysconfig.get_path("stdlib")))
    is_python = root in sys.stdlib_module_names and is_standard
    return not (root in _TRUSTED or is_python or _is_named_tuple(name))


def _is_named_tuple(name: str) -> bool:
    """Whether a module's name is that of a NamedTuple's generated functions, which no file has."""
    return name.startswith("namedtuple_") and name not in sys.modules


def is_users(code: CodeType, names: Mapping[str, Any]) -> bool:
    """Whether code with these globals is the user's: not a library's or this package's engine."""
    return is_users_module(names.get("__name__") or "", code.co_filename)


def _callers(frame: FrameType | None) -> Iterator[FrameType]:
    """Yields a frame and those that called it, from the inside out."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def _is_import(frame: FrameType) -> bool:
    """Whether a frame runs the import of a module, or is called by one."""
    return any(f.f_code.co_filename.startswith("<frozen importlib") for f in _callers(frame))


def _line_of(frame: FrameType) -> str:
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def current_line() -> str:
    """File and line of the innermost running code of the user's."""
    frames = _callers(sys._getframe(1))
    own = (_line_of(frame) for frame in frames if is_users(frame.f_code, frame.f_globals))
    return next(own, "the model")


_FORBIDDEN = {
    getattr(builtins, name)
    for name in (
        *("globals", "locals", "vars", "setattr", "delattr", "id", "hash", "exec", "eval"),
        *("compile", "open", "input", "__import__"),
    )
}
_PAST_ATTRIBUTES = (
    *("__globals__", "__closure__", "__defaults__", "__kwdefaults__", "__code__"),
    *("__dict__", "__class__", "__setattr__", "__delattr__", "__subclasses__", "__annotations__"),
    *(vars(nn.Module()).keys() - {"training", "_parameters", "_buffers", "_modules"}),
)
"""Attributes that lead to state that the guard does not compare."""
_GLOBALS = ("LOAD_GLOBAL", "STORE_GLOBAL", "DELETE_GLOBAL", "LOAD_NAME")
_ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD", "STORE_ATTR", "DELETE_ATTR")
_WRITING = ("STORE_ATTR", "DELETE_ATTR")
_BETWEEN = ("CACHE", "PRECALL", "PUSH_NULL", "COPY")
"""Instructions between the load of a name and that of its attribute."""


def refusals_of(code: CodeType) -> Iterator[str]:
    """Yields what a function does that hides state, or that differs for tensors without data."""
    instructions = list(dis.get_instructions(code))
    loaded = {i.argval for i in instructions if i.opname == "LOAD_GLOBAL"}
    if "int" in loaded and loaded & {"isinstance", "type"}:
        yield "asks whether a value is an int, which sizes are not here"
    if "type" in loaded and "Tensor" in code.co_names:
        yield "asks for the type of a tensor, which is another one here"
    # names for getattr or attrgetter
    texts = [text for text in code.co_consts if isinstance(text, str)]
    if any(name in _PAST_ATTRIBUTES for text in texts for name in text.split(".")):
        yield "takes attributes past its own"
    for place, instruction in enumerate(instructions):
        name, operation = instruction.argval, instruction.opname
        if operation == "IMPORT_NAME" and (is_users_module(name) or foreign_module(name)):
            yield f"imports {name}"
        elif operation in _ATTRIBUTES and name in _PAST_ATTRIBUTES:
            yield f"takes {name}"
        elif operation in _WRITING and not _writes_into_first(code, instructions, place):
            yield f"writes .{name} of another object than its own"


def why_builtin_refused(path: str, value: BuiltinFunctionType) -> str | None:
    """Names a built-in function with effects, or of an unknown extension; else ``None``."""
    owner = value.__self__
    found = foreign_module(value.__module__ or type(owner).__module__)
    found = found or foreign_module(type(owner).__module__)
    if not (found or (owner is builtins and value in _FORBIDDEN)):
        return None
    return f"calls {path}" + (f", of the module {found}" if found else "")


def _writes_into_first(code: CodeType, instructions: Sequence[dis.Instruction], place: int) -> bool:
    """Whether an attribute that is written is one of the first argument, which is watched."""
    name, target = instructions[place].argval, instructions[place - 1]
    copies = [i for i in range(place) if instructions[i].opname == "COPY"]
    reads = [i for i in copies if instructions[i + 1].argval == name]
    if target.opname == "SWAP" and reads:  # +=, which reads the attribute before
        target = instructions[reads[-1] - 1]
    is_first = target.opname == "LOAD_FAST" and target.argval in code.co_varnames[:1]
    return is_first and code.co_argcount > 0


@functools.lru_cache(4096)
def writes_attributes(code: CodeType) -> bool:
    """Whether a function sets or deletes attributes."""
    return any(instruction.opname in _WRITING for instruction in dis.get_instructions(code))


def globals_in(code: CodeType) -> Iterator[tuple[str, list[str]]]:
    """Yields each global name in a function, with the attributes that are taken in turn."""
    instructions = [i for i in dis.get_instructions(code) if i.opname not in _BETWEEN]
    for place, instruction in enumerate(instructions):
        if instruction.opname in _GLOBALS:
            following = instructions[place + 1 :]
            chain = itertools.takewhile(lambda i: i.opname in _ATTRIBUTES, following)
            yield instruction.argval, [each.argval for each in chain]


_REFUSED = {
    name: reason
    for reason, names in {
        "sets a hook, which would see gradients of micro-batches": (
            *("register_hook", "register_post_accumulate_grad_hook", "retain_grad"),
        ),
        "reads data, so a model can branch on them": (
            *("item", "tolist", "numpy", "__array__", "data_ptr", "untyped_storage", "storage"),
            *("__dlpack__", "__reduce_ex__", "__deepcopy__", "apply_", "map_", "__bool__"),
            *("__int__", "__float__", "__index__", "__repr__", "__format__", "_version"),
        ),
        "tells whether a tensor is a part of another one, as micro-batches are": (
            *("storage_offset", "_base", "_is_view", "is_set_to", "_cdata"),
        ),
        "runs a backward, or looks at gradients": ("backward", "grad", "grad_fn"),
        "changes a tensor past autograd": ("requires_grad_", "share_memory_", "set_"),
        "takes .data, past autograd; use detach()": ("data",),
    }.items()
    for name in names
}
"""Functions and attributes of tensors that a forward must not use, each with the reason."""

_ASKS = ("get_rng_state", "initial_seed", "seed", "is_anomaly_enabled")
"""Functions of PyTorch that read the state of the process; :mod:`.guard` watches others."""

_OF_SIZE = "branches on the size of the batch, or makes a plain number or a text of it"
_CALLS = {
    vars(kind)[name].__code__: _OF_SIZE
    for kind in (torch.SymInt, torch.SymFloat, torch.SymBool)
    for name in (
        *("__bool__", "__int__", "__index__", "__float__", "__hash__", "__round__"),
        *("__str__", "__repr__", "__format__"),
    )
    if hasattr(vars(kind).get(name), "__code__")
} | {
    weakref.finalize.__init__.__code__: "sets a function that runs after the forward",
    torch.autograd.graph.saved_tensors_hooks.__init__.__code__: (
        "sets hooks on tensors that are saved for backward"
    ),
}
"""Code of Python functions that the user's must not call, each with the reason."""


class Watch(TorchFunctionMode):
    """A mode that examines the user's functions when they are called, and calls of PyTorch.

    ``refuse`` records a reason; ``enter`` examines a function of the user's before it runs, and
    raises UnprovedError.
    """

    def __init__(self, refuse: Callable[[str], None], enter: Callable[[FrameType], None]) -> None:
        super().__init__()
        self._note, self._enter = refuse, enter
        self._before: Callable[..., Any] | None = None

    def __enter__(self) -> Watch:
        super().__enter__()
        self._before = sys.getprofile()
        sys.setprofile(self._see)
        return self

    def __exit__(self, *error: Any) -> None:
        sys.setprofile(self._before)
        super().__exit__(*error)

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not any(map(callable, (*args, *(kwargs or {}).values()))):
            sys.setprofile(None)  # without a callback, only PyTorch's own code runs inside
        try:
            name = getattr(func, "__name__", "")
            is_set = name == "__set__"
            if is_set or name == "__get__":  # of an attribute
                name = func.__self__.__name__
            if func is Tensor.__len__ and is_symbolic(args[0].shape[0]):
                advice = "takes len() of the batch, a plain number; use .shape[0]"
                self._complain(f"{current_line()} {advice}")
            reason = _REFUSED.get("set_" if is_set and name == "requires_grad" else name)
            if reason is not None:
                self._complain(f"{current_line()} calls .{name}, which {reason}")
            return func(*args, **(kwargs or {}))
        finally:
            sys.setprofile(self._see)

    def _see(self, frame: FrameType, event: str, given: Any) -> None:
        """The profile function: Python calls it at every call of a function. Python drops it after
        any error, which the model may catch, so every error is a refusal."""
        try:
            if event == "call":
                self._see_call(frame)
            elif event == "c_call" and is_users(frame.f_code, frame.f_globals):
                owner = getattr(given, "__self__", None)
                home = (owner if isinstance(owner, type) else type(owner)).__module__
                found = foreign_module(given.__module__)
                found = found or (None if is_users_module(home) else foreign_module(home))
                self._check_library(frame, found, given.__name__)
        except UnprovedError:
            raise
        except Exception as error:  # any error of the user's attributes
            self._complain(f"{_line_of(frame)} cannot be watched ({type(error).__name__}: {error})")

    def _see_call(self, frame: FrameType) -> None:
        """Examines a call: the user's own functions, and the user's calls of libraries."""
        code, caller = frame.f_code, frame.f_back
        if is_users(code, frame.f_globals):
            if _is_import(frame):
                return  # an import runs once, for any number of forwards
            try:
                self._enter(frame)
            except UnprovedError as unproved:
                self._complain(f"{code.co_qualname} at {_line_of(frame)}: {unproved}")
            return
        if caller is None or not is_users(caller.f_code, caller.f_globals):
            return
        reason = _CALLS.get(code)
        if reason is None:
            found = foreign_module(frame.f_globals.get("__name__"))
            self._check_library(caller, found, code.co_name)
        elif reason is not _OF_SIZE or is_symbolic(frame.f_locals["self"]):
            self._complain(f"{_line_of(caller)} {reason}")

    def _check_library(self, caller: FrameType, found: str | None, name: str) -> None:
        """Refuses functions of a foreign module, and those that ask for the process's state."""
        if (found is not None or name in _ASKS) and not _is_import(caller):
            self._complain(f"{_line_of(caller)} calls {name}, of {found or 'torch'}")

    def _complain(self, text: str) -> None:
        """Records a reason and raises it; within a profile function this ends the examined one."""
        self._note(text)
        raise UnprovedError(text)
