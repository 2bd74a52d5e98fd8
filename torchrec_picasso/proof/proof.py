"""Proves that a model gives in micro-batches what it gives for the batch.

The model's forward runs once, on a copy, with tensors that have shapes but no data, and symbols
where a batch has sizes. Every operator is asked what its output is along the batch: the same for
every batch, an entry for each sample that its inputs alone decide, or a mean over samples. If the
loss is such a mean, outputs are such entries or means, and nothing else happened, then the model
may be cut into any consecutive parts: the weighted mean of their losses is the loss of the batch,
their gradients sum to its gradient, their outputs join to its.

What is not understood is not proved. That costs speed, never exactness.

Cost: one forward without data, 1 to 2 ms an operator; no memory to speak of.
"""

from __future__ import annotations

import copy
import gc
import pickle
import random
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo import OptimizedModule
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torchrec.distributed.types import Awaitable
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from torchrec_picasso.batches.split import PLAIN_TYPES, children_of, num_samples
from torchrec_picasso.errors import InputError
from torchrec_picasso.proof.follow import Follower
from torchrec_picasso.proof.guard import Guard, may_change
from torchrec_picasso.proof.hooks import why_backward_is_unknown, why_hooked
from torchrec_picasso.proof.inputs import Inputs
from torchrec_picasso.proof.python_code import Names
from torchrec_picasso.proof.python_state import (
    classes_of,
    copy_of,
    dense_modules,
    is_of_library,
    state_of,
)
from torchrec_picasso.proof.sizes import Sizes, is_symbolic
from torchrec_picasso.proof.values import SAMPLES, Kind, UnprovedError
from torchrec_picasso.proof.watch import Watch

__all__ = ["Given", "Losses", "Proof", "prove"]


_State = dict[tuple[str, str], bytes]


class Losses(Enum):
    """What the model's losses are of its samples."""

    MEANS = "means"
    SUMS = "sums"
    RATIOS = "numerators and denominators, both sums"


@dataclass(frozen=True)
class Given:
    """A module of the model that does not run: what it gives is known.

    Args:
        module: In the model, or a part of one that is.
        name: For messages.
        output: What it gave for the batch.
        give: Has the module's next call give another output.
    """

    module: nn.Module
    name: str
    output: Any
    give: Callable[[Any], None]


@dataclass(frozen=True)
class Proof:
    """What came of it.

    Args:
        reason: Why the model is not proved, with what stands in the way and where; ``None`` = it is
            proved.
        guard: Tells before each step whether the model is still the one that was looked at, proved
            or not; ``None`` = that cannot be told.
        num_operators: Operators that were followed.
    """

    reason: str | None
    guard: Guard | None = None
    num_operators: int = 0


def prove(
    module: nn.Module,
    batch: Any,
    given: Sequence[Given],
    *,
    losses: Losses = Losses.MEANS,
    forward: Callable[[nn.Module, Any], Any] | None = None,
) -> Proof:
    """Proves that a model may be cut into micro-batches of consecutive samples.

    Args:
        module: The model inside its wrappers. Its forward takes a batch and gives losses and an
            output. It is left as it is.
        batch: Any batch of its data; what is in it does not matter, nor how many samples.
        given: Its sharded modules, and others that do not run, with what they gave for the batch.
        losses: What the losses shall be proved to be; ratios are given as ``(numerators,
            denominators)``.
        forward: Runs a module like ``module`` on a batch; by default calls it.

    Returns:
        A proof, or why there is none. It holds for all batches of the same form, as long as its
        guard sees no change.
    """
    follower = Follower(Sizes(), _names_of(module))
    question = _Question(module, batch, given, losses, forward or _call)
    names, late = Names(sys._getframe()), []
    guard: Guard | None = None
    try:
        late = _follow(question, follower, names)
        reason = names.written()
    except UnprovedError as unproved:
        reason = str(unproved)
    except Exception as error:  # whatever a model raises without data
        reason = f"the model cannot run without data ({type(error).__name__}: {error})"[:400]
    reason = follower.reason or reason
    try:
        guard = Guard(module, question.modules, batch, names, late)
    except Exception as error:  # a model that is compiled, or that raises when it is looked at
        reason = reason or str(error)
    return Proof(reason, guard, follower.num_operators)


@dataclass(frozen=True)
class _Question:
    """What :func:`prove` was asked."""

    module: nn.Module
    batch: Any
    given: Sequence[Given]
    losses: Losses
    forward: Callable[[nn.Module, Any], Any]

    @property
    def modules(self) -> list[nn.Module]:
        """Those that do not run."""
        return [of.module for of in self.given]


def _names_of(module: nn.Module) -> dict[int, str]:
    named = [*module.named_parameters(), *module.named_buffers()]
    return {id(tensor): name for name, tensor in named}


def _refuse_what_cannot_be_seen(module: nn.Module, given: Sequence[nn.Module]) -> None:
    found = why_hooked(module, given)
    if found is not None:
        raise UnprovedError(found)
    for path, inside in dense_modules(module, given):
        if isinstance(inside, OptimizedModule | torch.jit.ScriptModule):
            raise UnprovedError(f"{path or 'the model'} is compiled, so its operators are not seen")


def _follow(question: _Question, follower: Follower, names: Names) -> list[tuple[str, str]]:
    """Follows the forward; gives the attributes that modules of libraries make in their first."""
    modules = question.modules
    _refuse_what_cannot_be_seen(question.module, modules)
    tried = copy_of(question.module, modules)
    before = state_of(tried, modules)
    late: list[tuple[str, str]] = []
    mode = FakeTensorMode(shape_env=follower.sizes.env, allow_non_fake_inputs=True)
    mode.cache_enabled = False  # with symbols a hit costs more than it saves
    with (
        _no_finalizers(),
        _nothing_drawn(),
        _no_kept_casts(),
        _classes_as_they_are(tried, modules),
    ):
        _run(tried, question, follower, mode, names)
        changed = _changes(before, after := state_of(tried, modules))
        _refuse_changes(tried, changed, may_be_libraries=True)
        if changed:  # is that all, then?
            _run(tried, question, follower, mode, names)
            late, changed = changed, _changes(after, state_of(tried, modules))
            _refuse_changes(tried, changed, may_be_libraries=False)
    return late


def _changes(before: _State, after: _State) -> list[tuple[str, str]]:
    return [of for of in after | before if after.get(of) != before.get(of)]


def _run(
    module: nn.Module,
    question: _Question,
    follower: Follower,
    mode: FakeTensorMode,
    names: Names,
) -> None:
    follower.sizes.begin()
    inputs = Inputs(follower.sizes, follower, mode, _count(question.batch))
    made = inputs.like(question.batch, "batch")
    for of in question.given:
        of.give(inputs.like(of.output, of.name, has_graph=True))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of shapes without data
        watch = Watch(follower, names)
        with torch.enable_grad(), enable_python_dispatcher(), mode, follower, watch:
            result = question.forward(module, made)
    _judge(result, question.losses, follower)


def _call(module: nn.Module, batch: Any) -> Any:
    return module(batch)


def _count(batch: Any) -> int:
    try:
        return num_samples(batch)
    except InputError as error:
        raise UnprovedError(str(error)) from error


@contextmanager
def _no_finalizers() -> Iterator[None]:
    """Keeps the garbage collector from running functions that are not the model's."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def _no_kept_casts() -> Iterator[None]:
    """Keeps autocast from handing weights without data to the forwards that follow."""
    was_enabled = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(was_enabled)


@contextmanager
def _nothing_drawn() -> Iterator[None]:
    """Refuses a forward that moved a global random state, and puts it back."""
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        after = random.getstate(), np.random.get_state(), torch.get_rng_state()
        random.setstate(before[0])
        np.random.set_state(before[1])
        torch.set_rng_state(before[2])
    if before[0] != after[0] or not torch.equal(before[2], after[2]):
        raise UnprovedError("the model draws random numbers, or seeds them, once per micro-batch")
    if pickle.dumps(before[1]) != pickle.dumps(after[1]):
        raise UnprovedError("the model draws random numbers of NumPy, once per micro-batch")


@contextmanager
def _classes_as_they_are(module: nn.Module, given: Sequence[nn.Module]) -> Iterator[None]:
    """Has classes of the user's hold copies, and refuses a forward that wrote their attributes."""
    classes = classes_of(of for _, of in dense_modules(module, given))
    before = {of: dict(vars(of)) for of in classes}
    copies = {of: _copies_of(of) for of in classes}
    written = []
    try:
        for of, values in copies.items():
            for name, value in values.items():
                type.__setattr__(of, name, value)
        yield
    finally:
        for of, values in before.items():
            for name in {*vars(of), *values}:
                if vars(of).get(name) is not copies[of].get(name, values.get(name)):
                    written.append(f"{of.__name__}.{name}")
                if name not in values:
                    type.__delattr__(of, name)
                elif vars(of).get(name) is not values[name]:
                    type.__setattr__(of, name, values[name])
    if written:
        raise UnprovedError(f"the model writes {written[0]}, an attribute of a class")


def _copies_of(of: type) -> dict[str, Any]:
    """What a class holds that a forward may change, copied."""
    own = {name: value for name, value in vars(of).items() if not name.startswith("__")}
    try:
        return {name: copy.deepcopy(value) for name, value in own.items() if may_change(value)}
    except Exception as error:  # whatever a user's type raises
        raise UnprovedError(
            f"the class {of.__name__} holds what cannot be copied ({type(error).__name__}: {error})"
        ) from error


def _refuse_changes(
    module: nn.Module, changed: Sequence[tuple[str, str]], may_be_libraries: bool
) -> None:
    modules = dict(module.named_modules())
    for path, name in changed:
        if not may_be_libraries or path not in modules or not is_of_library(modules[path]):
            place = f"{path}.{name}" if path else name
            raise UnprovedError(f"the model writes {place} in its forward, once per micro-batch")


def _judge(result: Any, losses: Losses, follower: Follower) -> None:
    """Looks at what the model gave.

    Raises:
        UnprovedError: If micro-batches would not add up to it.
    """
    if not isinstance(result, tuple | list) or len(result) != 2:
        raise UnprovedError(f"the model gives a {type(result).__name__}, not losses and an output")
    found, output = result
    parts = [found]
    if losses is Losses.RATIOS:
        if not isinstance(found, tuple | list) or len(found) != 2:
            raise UnprovedError(f"the loss is a {type(found).__name__}, not two sums")
        parts = list(found)
    expected = Kind.MEAN if losses is Losses.MEANS else Kind.SUM
    for part in parts:
        if not isinstance(part, Tensor):
            raise UnprovedError(f"the loss is a {type(part).__name__}, not a tensor")
        kind = follower.value_of(part).kind
        if kind is not expected and (kind, expected) != (Kind.SAME, Kind.MEAN):
            raise UnprovedError(f"the loss is {kind.value}, not {expected.value}")
    if not parts[0].requires_grad:
        raise UnprovedError("the loss has no graph")
    reason = why_backward_is_unknown(parts)
    if reason is not None:
        raise UnprovedError(f"the loss goes through {reason}")
    _judge_output(output, "output", follower)
    complaint = follower.sizes.assumption() or follower.sizes.complaint()
    if complaint is not None:
        raise UnprovedError(complaint)


def _judge_output(value: Any, path: str, follower: Follower) -> None:
    """An output must be what joining micro-batches' outputs gives."""
    if isinstance(value, Awaitable):
        value = value.wait()
    if isinstance(value, KeyedJaggedTensor):
        raise UnprovedError(f"{path} is a KeyedJaggedTensor")
    if isinstance(value, JaggedTensor):
        _judge_jagged(value, path, follower)
    elif isinstance(value, KeyedTensor):
        if value.key_dim() != 1:
            raise UnprovedError(f"{path} has keys along dim {value.key_dim()}")
        _judge_output(value.values(), f"{path}.values()", follower)
    elif isinstance(value, Tensor):
        _judge_tensor(value, path, follower)
    elif (members := children_of(value)) is not None:
        for suffix, member in members:
            _judge_output(member, path + suffix, follower)
    elif is_symbolic(value):
        raise UnprovedError(f"{path} is the size of the batch")
    elif not isinstance(value, PLAIN_TYPES):
        raise UnprovedError(f"{path} is a {type(value).__name__}, which cannot be joined")


def _judge_tensor(tensor: Tensor, path: str, follower: Follower) -> None:
    if not isinstance(tensor, FakeTensor):
        if tensor.dim():
            raise UnprovedError(f"{path} is a tensor of the model, not an entry for each sample")
        return
    value = follower.value_of(tensor)
    if value.kind is Kind.ROWS:
        if value.rows != SAMPLES or value.dim or value.outer != 1 or value.counted:
            raise UnprovedError(f"{path} is not an entry for each sample in dim 0")
        if not follower.is_once(tensor, value):
            raise UnprovedError(f"{path} has several entries for each sample in dim 0")
    elif value.kind not in (Kind.MEAN, Kind.SAME) or tensor.dim():
        raise UnprovedError(
            f"{path} is {value.kind.value}, of {tensor.dim()} dims, so it cannot be joined"
        )
    elif not tensor.is_floating_point():
        raise UnprovedError(f"{path} is a number that is no float, so it cannot be averaged")
    elif follower.is_of_outside(tensor):
        raise UnprovedError(f"{path} is a view into the model or the batch, which moves with it")


def _judge_jagged(jagged: JaggedTensor, path: str, follower: Follower) -> None:
    lengths = follower.value_of(jagged.lengths())
    for name, tensor in (("values", jagged.values()), ("weights", jagged.weights_or_none())):
        if tensor is None:
            continue
        value = follower.value_of(tensor)
        is_known = value.kind is Kind.ROWS and not value.dim and value.outer == 1
        if not is_known or value.counted or lengths.features != (value.rows,):
            raise UnprovedError(f"{path}.{name}() are not the rows that its lengths say")
