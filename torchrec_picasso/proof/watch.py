"""Watches the Python code of a forward: the user's functions, and their use of tensors."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from types import FrameType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from torchrec_picasso.proof.follow import Follower
from torchrec_picasso.proof.python_code import Names, foreign_module
from torchrec_picasso.proof.sizes import is_symbolic
from torchrec_picasso.proof.values import UnprovedError
from torchrec_picasso.proof.where import current_line, is_import, is_users, line_of

__all__ = ["Watch"]

_HOOKS = "sets a hook, which would see gradients of micro-batches"
_READS = "reads data, so a model can branch on them"
_GRADS = "runs a backward, or looks at gradients"

_OF_TENSORS: Any = Tensor
"""``Tensor`` for attributes that are descriptors, which type stubs do not show."""

_REFUSED: dict[Any, str] = {
    **dict.fromkeys(
        (Tensor.register_hook, Tensor.register_post_accumulate_grad_hook, Tensor.retain_grad),
        _HOOKS,
    ),
    **dict.fromkeys(
        (
            *(Tensor.item, Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.data_ptr),
            *(Tensor.untyped_storage, Tensor.storage, Tensor.__dlpack__, Tensor.__reduce_ex__),
            *(Tensor.__deepcopy__, Tensor.apply_, Tensor.map_, Tensor.__bool__, Tensor.__int__),
            *(Tensor.__float__, Tensor.__index__, _OF_TENSORS._version.__get__),
        ),
        _READS,
    ),
    **dict.fromkeys(
        (Tensor.backward, torch.autograd.backward, torch.autograd.grad, _OF_TENSORS.grad.__get__),
        _GRADS,
    ),
    _OF_TENSORS.grad_fn.__get__: _GRADS,
    _OF_TENSORS.grad.__set__: _GRADS,
    _OF_TENSORS.data.__get__: "takes .data, past autograd; use detach()",
    _OF_TENSORS.data.__set__: "writes .data, once per micro-batch",
    Tensor.requires_grad_: "changes what gets gradients",
    _OF_TENSORS.requires_grad.__set__: "changes what gets gradients",
    Tensor.share_memory_: "moves a tensor",
    Tensor.set_: "moves a tensor",
}
"""Functions of PyTorch that a forward must not call, each with the reason."""

_NUMBER_METHODS = frozenset(
    vars(kind)[name].__code__
    for kind in (torch.SymInt, torch.SymFloat, torch.SymBool)
    for name in ("__bool__", "__int__", "__index__", "__float__", "__hash__", "__round__")
    if hasattr(vars(kind).get(name), "__code__")
)
"""Code of methods that turn a symbol into a plain number."""
_CALLED = (FunctionType, MethodType, partial, nn.Module)
"""Types of arguments that a function of PyTorch may call back."""

_SAVED_HOOKS = torch.autograd.graph.saved_tensors_hooks.__init__.__code__


class Watch(TorchFunctionMode):
    """A mode that examines the user's functions when they are called, and calls of PyTorch.

    Args:
        follower: Records the first reason.
        names: Examines the functions.
    """

    def __init__(self, follower: Follower, names: Names) -> None:
        super().__init__()
        self._follower = follower
        self._names = names
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
        if not any(isinstance(given, _CALLED) for given in (*args, *(kwargs or {}).values())):
            sys.setprofile(None)  # without a callback, only PyTorch's own code runs inside
        try:
            if func is Tensor.__len__ and is_symbolic(args[0].shape[0]):
                self._refuse("takes len() of the batch, a plain number; use .shape[0]")
            reason = _REFUSED.get(func) if getattr(func, "__hash__", None) else None
            if reason is not None:
                self._refuse(f"calls {_name_of(func)}, which {reason}")
            return func(*args, **(kwargs or {}))
        finally:
            sys.setprofile(self._see)

    def _refuse(self, reason: str) -> None:
        """Records a reason at the current line, and raises it."""
        text = f"{current_line()} {reason}"
        self._follower.refuse(text)
        raise UnprovedError(text)

    def _see(self, frame: FrameType, event: str, given: Any) -> None:
        """The profile function: Python calls it at every call of a function."""
        if event == "call":
            self._see_call(frame)
        elif event == "c_call" and is_users(frame.f_code):
            owner = type(getattr(given, "__self__", None)).__module__
            found = foreign_module(given.__module__) or foreign_module(owner)
            if found is not None:
                self._complain(f"{line_of(frame)} calls {given.__qualname__}, of {found}")

    def _see_call(self, frame: FrameType) -> None:
        """Examines a call: the user's own functions, and the user's calls of libraries."""
        code, caller = frame.f_code, frame.f_back
        if is_users(code):
            if is_import(frame):
                return  # an import runs once, for any number of forwards
            try:
                self._names.enter(frame)
            except UnprovedError as unproved:
                self._complain(f"{code.co_qualname} at {line_of(frame)} {unproved}")
            return
        if caller is None or not is_users(caller.f_code):
            return
        if code in _NUMBER_METHODS:
            if is_symbolic(frame.f_locals["self"]):
                self._complain(
                    f"{line_of(caller)} branches on the size of the batch, or makes a plain "
                    "number of it"
                )
        elif code is _SAVED_HOOKS:
            self._complain(f"{line_of(caller)} sets hooks on tensors that are saved for backward")
        else:
            found = foreign_module(frame.f_globals.get("__name__"))
            if found is not None:
                self._complain(f"{line_of(caller)} calls {code.co_qualname}, of {found}")

    def _complain(self, text: str) -> None:
        """Raises from within a profile function, which ends the function that it examines."""
        self._follower.refuse(text)
        raise UnprovedError(text)


def _name_of(func: Any) -> str:
    """Name of a function; for a getter or setter, the name of its attribute."""
    name: str = func.__name__
    return f".{func.__self__.__name__}" if name in ("__get__", "__set__") else name
