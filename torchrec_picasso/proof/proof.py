"""Proves that a model computes the same in micro-batches as for the whole batch.

The model's forward runs once, with tensors that have shapes but no data, and symbols in
place of a batch's sizes. A rule for every operator derives how its output depends on the batch: the
same for every batch, an entry for each sample that only this sample's inputs decide, or a mean over
samples. If the loss is such a mean, outputs are such entries or means, and the forward has no other
effect, then the batch may be split into any consecutive parts: the weighted mean of their losses is
the loss of the batch, their gradients sum to its gradient, and their outputs join to its output.

Anything without a rule is unproved. That costs speed, never exactness.

Cost: one forward without data, 1 to 2 ms per operator; negligible memory.
"""

from __future__ import annotations

import gc
import random
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
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torchrec.distributed.types import Awaitable
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from torchrec_picasso.batches.split import PLAIN_TYPES, children_of, num_samples
from torchrec_picasso.errors import InputError
from torchrec_picasso.proof.content import Kept
from torchrec_picasso.proof.follow import Follower
from torchrec_picasso.proof.guard import Guard, why_disturbed
from torchrec_picasso.proof.hooks import why_backward_is_unknown
from torchrec_picasso.proof.inputs import Inputs
from torchrec_picasso.proof.snapshot import Snapshot
from torchrec_picasso.proof.values import SAMPLES, Kind, Sizes, UnprovedError, is_symbolic
from torchrec_picasso.proof.watch import Watch

__all__ = ["Given", "Losses", "Proof", "prove"]


class Losses(Enum):
    """How the model's losses are reduced over samples."""

    MEANS = "means"
    SUMS = "sums"
    RATIOS = "numerators and denominators, both sums"


@dataclass(frozen=True)
class Given:
    """A module of the model, or a part of one, that does not run: its output is known."""

    module: nn.Module
    name: str
    output: Any
    """Output for the batch."""
    give: Callable[[Any], None]
    """Sets the output of the next call."""


@dataclass(frozen=True)
class Proof:
    """The result of an attempt to prove a model."""

    reason: str | None
    """The operator or state that prevents a proof, and its place; ``None`` = proved."""
    guard: Guard | None = None
    """Checks before each step whether the model is still the examined one, proved or not; ``None``
    = this cannot be checked."""
    num_operators: int = 0
    """Number of operators that were followed."""


def prove(
    module: nn.Module,
    batch: Any,
    given: Sequence[Given],
    *,
    losses: Losses = Losses.MEANS,
) -> Proof:
    """Proves that a model may train in micro-batches of consecutive samples, or says why not.

    A proof holds for all batches of the same form, as long as its guard sees no change.

    Args:
        module: The model inside its wrappers. Its forward takes a batch and returns losses and an
            output. Its state is restored after it.
        batch: Any batch of its data; neither its values nor its number of samples matter.
        given: Sharded modules, and others that do not run, with their outputs for the batch.
        losses: Reduction of the losses; ratios are returned as ``(numerators, denominators)``.
    """
    sizes = Sizes()
    named = (*module.named_parameters(), *module.named_buffers())
    follower = Follower(sizes, {id(tensor): name for name, tensor in named})
    try:
        state = Snapshot(module, [known.module for known in given], _types_in(batch))
        guard = Guard(state, batch)
    except Exception as error:  # any error of the user's attributes
        return Proof(f"the model's state cannot be read ({type(error).__name__}: {error})")
    mode = FakeTensorMode(shape_env=sizes.env, allow_non_fake_inputs=True)
    mode.cache_enabled = False  # with symbols a hit costs more than it saves

    def refuse(reason: str) -> None:
        follower.refuse(reason)
        # Python drops a profile function that raises, and a model may catch that and go on
        state.examine_all()

    def run() -> None:
        sizes.begin()
        inputs = Inputs(sizes, follower, mode, num_samples(batch))
        made = inputs.like(batch, "batch")
        before = _places_in(made)
        for known in given:
            known.give(inputs.like(known.output, known.name, has_graph=True))
        # Modes from the outside in: enable gradients, decompose in Python, make tensors without
        # data, follow operators, watch functions.
        watch = Watch(refuse, state.enter)
        with torch.enable_grad(), enable_python_dispatcher(), mode, follower, watch:
            result = module(made)
        if _places_in(made) != before:
            # the caller sees that, and a later epoch may read it; a micro-batch is a copy
            raise UnprovedError("the model changes the containers of its batch")
        _judge(result, losses, follower)

    reason = state.reason or why_disturbed()
    if reason is None:
        try:
            with _undisturbed():
                _follow(run, state)
        except (UnprovedError, InputError) as unproved:
            reason = str(unproved)
        except Exception as error:  # any error of a model without data
            reason = f"the model cannot run without data ({type(error).__name__}: {error})"[:400]
    # without a proof a guard is still useful: a change of the model allows another attempt
    return Proof(follower.reason or reason, guard, follower.num_operators)


def _types_in(batch: Any) -> list[type]:
    """Lists the types of the containers in a batch, whose methods are the user's."""
    members = children_of(batch)
    inside = [kind for _, member in members or () for kind in _types_in(member)]
    return inside if members is None else [type(batch), *inside]


def _places_in(value: Any) -> Any:
    """Lists which objects are where in a batch."""
    members = children_of(value)
    if members is None:
        return id(value)
    return [(suffix, _places_in(member)) for suffix, member in members]


def _follow(run: Callable[[], None], state: Snapshot) -> None:
    """Follows the forward, refuses what it changes, and restores that."""
    try:
        run()
        changed = _refuse_changes(state)
        # Modules of libraries may set their own state in the first forward; a second one shows
        # whether that was all.
        if changed:
            later = state.again()
            run()
            _refuse_changes(later, may_be_libraries=False)
    finally:
        state.restore()
    state.forget(changed)


def _refuse_changes(state: Snapshot, may_be_libraries: bool = True) -> list[Kept]:
    """Refuses changed state, except that of library modules if this may change."""
    changed = state.changed_containers()
    users = [kept for kept in changed if not (may_be_libraries and kept.is_library)]
    names = [*(kept.difference() for kept in users), *state.changed_names()]
    if names:
        raise UnprovedError(f"the model writes {names[0]} in its forward, once per micro-batch")
    return changed


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Runs a forward without side effects; refuses one that changed a global random state."""
    # finalizers would run inside the watched forward; autocast's cache would pass weights without
    # data to later forwards
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    was_enabled = gc.isenabled(), torch.is_autocast_cache_enabled()
    gc.disable()
    torch.set_autocast_cache_enabled(False)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about shapes, which are placeholders here
            yield
    finally:
        after = random.getstate(), np.random.get_state(), torch.get_rng_state()
        random.setstate(before[0])
        np.random.set_state(before[1])
        torch.set_rng_state(before[2])
        torch.set_autocast_cache_enabled(was_enabled[1])
        if was_enabled[0]:
            gc.enable()
    if repr(before[:2]) != repr(after[:2]) or not torch.equal(before[2], after[2]):
        raise UnprovedError("the model draws random numbers, or seeds them, once per micro-batch")


def _judge(result: Any, losses: Losses, follower: Follower) -> None:
    """Raises UnprovedError if losses and outputs of micro-batches do not add up to the batch's."""
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
        raise UnprovedError(f"{path} is a tensor of the model, which moves with it")
    value = follower.value_of(tensor)
    if value.kind is Kind.ROWS:
        if not _has_rows(tensor, SAMPLES, follower):
            raise UnprovedError(f"{path} is not one entry for each sample in dim 0")
    elif value.kind not in (Kind.MEAN, Kind.SAME) or tensor.dim():
        raise UnprovedError(f"{path} is {value.kind.value}, so it cannot be joined")
    elif not tensor.is_floating_point():
        raise UnprovedError(f"{path} is a number that is no float, so it cannot be averaged")
    elif follower.is_of_outside(tensor):
        raise UnprovedError(f"{path} is a view into the model or the batch, which moves with it")


def _has_rows(tensor: Tensor, rows: str, follower: Follower) -> bool:
    """Whether a tensor has one entry for each of these rows in dim 0."""
    value = follower.value_of(tensor)
    is_known = value.kind is Kind.ROWS and value.rows == rows and value.dim == 0
    is_single = is_known and value.outer == 1 and follower.sizes.inner(tensor, value) == 1
    return is_single and not value.counted


def _judge_jagged(jagged: JaggedTensor, path: str, follower: Follower) -> None:
    """Checks sequences of the output: values in the rows that their lengths count."""
    feature = follower.value_of(jagged.lengths()).feature
    for tensor in (jagged.values(), jagged.weights_or_none()):
        if tensor is not None and not (feature and _has_rows(tensor, feature, follower)):
            raise UnprovedError(f"{path} has not the rows that its lengths say")
