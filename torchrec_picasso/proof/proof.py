"""Proves that a model computes the same in micro-batches as for the whole batch.

The model's forward runs once, on a copy, with tensors that have shapes but no data, and symbols in
place of a batch's sizes. A rule for every operator derives how its output depends on the batch: the
same for every batch, an entry for each sample that only this sample's inputs decide, or a mean over
samples. If the loss is such a mean, outputs are such entries or means, and the forward has no other
effect, then the batch may be split into any consecutive parts: the weighted mean of their losses is
the loss of the batch, their gradients sum to its gradient, and their outputs join to its output.

Anything without a rule is unproved. That costs speed, never exactness.

Cost: one forward without data, 1 to 2 ms per operator; negligible memory.
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
"""Digest of each attribute of each module, by path and name."""


class Losses(Enum):
    """How the model's losses are reduced over samples."""

    MEANS = "means"
    SUMS = "sums"
    RATIOS = "numerators and denominators, both sums"


@dataclass(frozen=True)
class Given:
    """A module of the model that does not run, because its output is known.

    Args:
        module: A module in the model, or a part of one.
        name: Name of the module, for messages.
        output: Output of the module for the batch.
        give: Sets the output of the module's next call.
    """

    module: nn.Module
    name: str
    output: Any
    give: Callable[[Any], None]


@dataclass(frozen=True)
class Proof:
    """The result of an attempt to prove a model.

    Args:
        reason: The operator or state that prevents a proof, and its place; ``None`` = the model is
            proved.
        guard: Checks before each step whether the model is still the one that was examined, proved
            or not; ``None`` = this cannot be checked.
        num_operators: Number of operators that were followed.
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
    """Proves that a model may train in micro-batches of consecutive samples.

    Args:
        module: The model inside its wrappers. Its forward takes a batch and returns losses and an
            output. It is not changed.
        batch: Any batch of its data; neither its values nor its number of samples matter.
        given: Sharded modules, and others that do not run, with their outputs for the batch.
        losses: Reduction of the losses; ratios are returned as ``(numerators, denominators)``.
        forward: Runs a module like ``module`` on a batch; by default calls it.

    Returns:
        A proof, or the reason why there is none. It holds for all batches of the same form, as long
        as its guard sees no change.
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
    except Exception as error:  # any error of a model without data
        reason = f"the model cannot run without data ({type(error).__name__}: {error})"[:400]
    reason = follower.reason or reason
    # without a proof a guard is still useful: a change of the model allows another attempt
    try:
        guard = Guard(module, question.modules, batch, names, late)
    except Exception as error:  # a compiled model, or attributes that raise when they are read
        reason = reason or str(error)
    return Proof(reason, guard, follower.num_operators)


@dataclass(frozen=True)
class _Question:
    """The arguments of :func:`prove`."""

    module: nn.Module
    batch: Any
    given: Sequence[Given]
    losses: Losses
    forward: Callable[[nn.Module, Any], Any]

    @property
    def modules(self) -> list[nn.Module]:
        """The modules that do not run."""
        return [given.module for given in self.given]


def _names_of(module: nn.Module) -> dict[int, str]:
    """Maps ids of the model's tensors to their names."""
    named = [*module.named_parameters(), *module.named_buffers()]
    return {id(tensor): name for name, tensor in named}


def _refuse_what_cannot_be_seen(module: nn.Module, given: Sequence[nn.Module]) -> None:
    """Refuses hooks and compiled modules, which the follower cannot see."""
    found = why_hooked(module, given)
    if found is not None:
        raise UnprovedError(found)
    for path, inside in dense_modules(module, given):
        if isinstance(inside, OptimizedModule | torch.jit.ScriptModule):
            raise UnprovedError(f"{path or 'the model'} is compiled, so its operators are not seen")


def _follow(question: _Question, follower: Follower, names: Names) -> list[tuple[str, str]]:
    """Follows the forward; returns attributes that library modules make in their first forward."""
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
        # Library modules may set their own state in the first forward; a second one shows whether
        # that was all.
        if changed:
            _run(tried, question, follower, mode, names)
            late, changed = changed, _changes(after, state_of(tried, modules))
            _refuse_changes(tried, changed, may_be_libraries=False)
    return late


def _changes(before: _State, after: _State) -> list[tuple[str, str]]:
    """Lists path and name of attributes whose digests differ."""
    return [key for key in after | before if after.get(key) != before.get(key)]


def _run(
    module: nn.Module,
    question: _Question,
    follower: Follower,
    mode: FakeTensorMode,
    names: Names,
) -> None:
    """Runs the forward once without data, and judges its result."""
    follower.sizes.begin()
    inputs = Inputs(follower.sizes, follower, mode, _count(question.batch))
    made = inputs.like(question.batch, "batch")
    for known in question.given:
        known.give(inputs.like(known.output, known.name, has_graph=True))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings about shapes, which are placeholders here
        watch = Watch(follower, names)
        # Modes from the outside in: enable gradients, decompose in Python, make tensors without
        # data, follow operators, watch functions.
        with torch.enable_grad(), enable_python_dispatcher(), mode, follower, watch:
            result = question.forward(module, made)
    _judge(result, question.losses, follower)


def _call(module: nn.Module, batch: Any) -> Any:
    return module(batch)


def _count(batch: Any) -> int:
    """Counts the samples of a batch; refuses batches without a number."""
    try:
        return num_samples(batch)
    except InputError as error:
        raise UnprovedError(str(error)) from error


@contextmanager
def _no_finalizers() -> Iterator[None]:
    """Disables the garbage collector: finalizers would run inside the watched forward."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def _no_kept_casts() -> Iterator[None]:
    """Disables autocast's cache, which would pass weights without data to later forwards."""
    was_enabled = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(was_enabled)


@contextmanager
def _nothing_drawn() -> Iterator[None]:
    """Restores global random states, and refuses a forward that changed one."""
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
    """Copies the attributes of the user's classes, and refuses a forward that writes them."""
    classes = classes_of(inside for _, inside in dense_modules(module, given))
    before = {cls: dict(vars(cls)) for cls in classes}
    copies = {cls: _copies_of(cls) for cls in classes}
    written = []
    try:
        for cls, values in copies.items():
            for name, value in values.items():
                type.__setattr__(cls, name, value)
        yield
    finally:
        # restores every class, and records attributes that are neither the copy nor the original
        for cls, values in before.items():
            for name in {*vars(cls), *values}:
                if vars(cls).get(name) is not copies[cls].get(name, values.get(name)):
                    written.append(f"{cls.__name__}.{name}")
                if name not in values:
                    type.__delattr__(cls, name)
                elif vars(cls).get(name) is not values[name]:
                    type.__setattr__(cls, name, values[name])
    if written:
        raise UnprovedError(f"the model writes {written[0]}, an attribute of a class")


def _copies_of(cls: type) -> dict[str, Any]:
    """Copies the attributes of a class that a forward may change."""
    own = {name: value for name, value in vars(cls).items() if not name.startswith("__")}
    try:
        return {name: copy.deepcopy(value) for name, value in own.items() if may_change(value)}
    except Exception as error:  # any error of a user's type
        raise UnprovedError(
            f"the class {cls.__name__} holds what cannot be copied "
            f"({type(error).__name__}: {error})"
        ) from error


def _refuse_changes(
    module: nn.Module, changed: Sequence[tuple[str, str]], may_be_libraries: bool
) -> None:
    """Refuses changed attributes, except those of library modules if these may change."""
    modules = dict(module.named_modules())
    for path, name in changed:
        if not may_be_libraries or path not in modules or not is_of_library(modules[path]):
            place = f"{path}.{name}" if path else name
            raise UnprovedError(f"the model writes {place} in its forward, once per micro-batch")


def _judge(result: Any, losses: Losses, follower: Follower) -> None:
    """Checks the dependence of losses and output on the batch.

    Raises:
        UnprovedError: If micro-batches would not add up to the batch.
    """
    if not isinstance(result, tuple | list) or len(result) != 2:
        raise UnprovedError(f"the model gives a {type(result).__name__}, not losses and an output")
    found, output = result
    # losses: the kind of the reduction; a constant loss is a mean too
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
    """Checks that joined outputs of micro-batches would be this output."""
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
    """Checks one tensor of the output: one row per sample in dim 0, or a 0-d mean."""
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
    """Checks sequences of the output: values in the rows that their lengths count."""
    lengths = follower.value_of(jagged.lengths())
    for name, tensor in (("values", jagged.values()), ("weights", jagged.weights_or_none())):
        if tensor is None:
            continue
        value = follower.value_of(tensor)
        is_known = value.kind is Kind.ROWS and not value.dim and value.outer == 1
        if not is_known or value.counted or lengths.features != (value.rows,):
            raise UnprovedError(f"{path}.{name}() are not the rows that its lengths say")
