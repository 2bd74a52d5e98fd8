"""Proves that a model computes the same in micro-batches as for the whole batch.

The model's forward runs once, with tensors that have shapes but no data, and symbols in
place of a batch's sizes. A rule for every operator derives how its output depends on the batch: the
same for every batch, an entry for each sample or lookup that only its sample's inputs decide, or a
mean over samples. If the loss is such a mean, outputs are such entries in order or means, and the
forward has no other effect, then the batch may be cut into any consecutive parts: the weighted
mean of their losses is the loss of the batch, their gradients sum to its gradient, and their
outputs join to its output. A tensor that only tables get, as an input that is made ahead of the
model, may depend on the batch in any way: tables look up the whole batch's input, and a micro-batch
gets its part of the result.

Anything without a rule is unproved. That costs speed, never exactness.

Cost: one forward without data, 2 to 8 ms per operator; negligible memory.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torchrec.distributed.types import Awaitable
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from torchrec_picasso.batches.split import PLAIN_TYPES, children_of, num_samples
from torchrec_picasso.errors import InputError
from torchrec_picasso.proof.content import Kept, random_states, restored_randomness, why_disturbed
from torchrec_picasso.proof.dense_part import backward_steps
from torchrec_picasso.proof.follow import Follower
from torchrec_picasso.proof.guard import Guard
from torchrec_picasso.proof.inputs import Inputs
from torchrec_picasso.proof.values import SAMPLES, Kind, Sizes, UnprovedError, is_symbolic
from torchrec_picasso.proof.watch import Watch


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
    equal_rows: Sequence[Sequence[str]] = ()
    """Groups of rows that must be equally many, or the forward raises: lookups, by their place in
    the batch or as ``module['feature']``, and samples. They may be so in a batch and not in its
    parts, so parts are to be checked."""


MadeInputs = Callable[[Callable[[Iterable[Tensor]], None]], AbstractContextManager[None]]
"""Takes a function, and returns a context in which the function gets the tensors of each input that
a given module is called with, if that input is made ahead of the model."""


def prove(
    module: nn.Module,
    batch: Any,
    given: Sequence[Given],
    loss_reduction: str = "mean",
    made_inputs: MadeInputs | None = None,
) -> Proof:
    """Proves that a model may train in micro-batches of consecutive samples, or says why not.

    A proof holds for all batches of the same form, as long as its guard sees no change.

    Args:
        module: The model inside its wrappers. Its forward takes a batch and returns losses and an
            output. Its state is restored after it.
        batch: Any batch of its data; neither its values nor its number of samples matter.
        given: Sharded modules, and others that do not run, with their outputs for the batch.
        loss_reduction: How the losses are reduced over samples: "mean", "sum", or "ratio", with
            losses ``(numerators, denominators)`` that are both sums.
        made_inputs: Tells the inputs of given modules that are made ahead of the model, for the
            batch and for each micro-batch before it is trained; ``None`` = no input is.
    """
    try:
        guard = Guard(module, [known.module for known in given], batch)
    except Exception as error:  # any error of the user's attributes
        return Proof(f"the model's state cannot be read ({type(error).__name__}: {error})")
    # without a proof a guard is still useful: a change of the model allows another attempt
    reason = guard.reason or why_disturbed()
    if reason is not None:
        return Proof(reason, guard)
    forward = _Forward(module, batch, given, loss_reduction, made_inputs, guard)
    try:
        with _undisturbed():
            _follow(forward.run, guard, batch)
    except (UnprovedError, InputError) as unproved:
        reason = str(unproved)
    except Exception as error:  # any error of a model without data
        reason = f"the model cannot run without data ({type(error).__name__}: {error})"[:400]
    follower = forward.follower
    equal_rows = follower.sizes.equal_rows
    return Proof(follower.reason or reason, guard, follower.num_operators, equal_rows)


@dataclass(eq=False)
class _Forward:
    """A forward without data, with the arguments of :func:`prove`; it may run again."""

    module: nn.Module
    batch: Any
    given: Sequence[Given]
    reduction: str
    made_inputs: MadeInputs | None
    guard: Guard
    follower: Follower = field(init=False)
    """The follower of the last run."""

    def _refuse(self, reason: str) -> None:
        self.follower.refuse(reason)
        # Python drops a profile function that raises, and a model may catch that and go on
        self.guard.examine_all()

    def run(self) -> None:
        """Raises UnprovedError if the forward cannot be followed, or is no proof."""
        named = (*self.module.named_parameters(), *self.module.named_buffers())
        names, sizes = {id(tensor): name for name, tensor in named}, Sizes()
        follower = self.follower = Follower(sizes, names, self.made_inputs is not None)
        mode = FakeTensorMode(shape_env=sizes.env, allow_non_fake_inputs=True)
        mode.cache_enabled = False  # with symbols a hit costs more than it saves
        inputs = Inputs(follower, mode, num_samples(self.batch))
        made = inputs.like(self.batch, "batch")
        before = _places_in(made)
        for known in self.given:
            known.give(inputs.like(known.output, known.name, has_graph=True))
        # Modes from the outside in: enable gradients, decompose in Python, make tensors without
        # data, follow operators, watch functions.
        watch = Watch(self._refuse, self.guard.enter)
        listening = self.made_inputs(follower.note_input) if self.made_inputs else nullcontext()
        with torch.enable_grad(), listening, enable_python_dispatcher(), mode, follower, watch:
            result = self.module(made)
        if _places_in(made) != before:
            # the caller sees that, and a later epoch may read it; a micro-batch is a copy
            raise UnprovedError("the model changes the containers of its batch")
        if follower.why_unused is not None:
            raise UnprovedError(follower.why_unused)
        _judge(result, self.reduction, follower)
        if follower.reason is not None:  # the model caught the error
            raise UnprovedError(follower.reason)


def _places_in(value: Any) -> Any:
    """Lists which objects are where in a batch."""
    members = children_of(value)
    if members is None:
        return id(value)
    return [(suffix, _places_in(member)) for suffix, member in members]


def _follow(run: Callable[[], None], guard: Guard, batch: Any) -> None:
    """Follows the forward, refuses what it changes, and restores that."""
    try:
        run()
        changed = _refuse_changes(guard)
        # Modules of libraries may set their own state in the first forward; a second one shows
        # whether that was all.
        if changed:
            later = guard.again(batch)
            if later is None:
                raise UnprovedError("the model's state cannot be read after its forward")
            run()
            _refuse_changes(later, may_be_libraries=False)
    finally:
        guard.restore()
    guard.forget(changed)


def _refuse_changes(guard: Guard, may_be_libraries: bool = True) -> list[Kept]:
    """Refuses changed state, except that of library modules if this may change."""
    changed = guard.changed_containers()
    users = [kept for kept in changed if not (may_be_libraries and kept.is_library)]
    names = [*(kept.difference() for kept in users), *guard.changed_names()]
    if names:
        raise UnprovedError(f"the model writes {names[0]} in its forward, once per micro-batch")
    return changed


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Runs a forward without side effects; refuses one that changed a global random state."""
    # finalizers would run inside the watched forward; autocast's cache would pass weights without
    # data to later forwards
    was_enabled, was_cached = gc.isenabled(), torch.is_autocast_cache_enabled()
    gc.disable()
    torch.set_autocast_cache_enabled(False)
    try:
        with restored_randomness(torch.device("cpu")), warnings.catch_warnings(), _unsynced():
            warnings.simplefilter("ignore")  # about shapes, which are placeholders here
            before, state = random_states(), torch.get_rng_state()
            yield
            if random_states() != before or not torch.equal(torch.get_rng_state(), state):
                what = "draws random numbers, or seeds them, once per micro-batch"
                raise UnprovedError(f"the model {what}")
    finally:
        torch.set_autocast_cache_enabled(was_cached)
        if was_enabled:
            gc.enable()


@contextmanager
def _unsynced() -> Iterator[None]:
    """In this context ``from_lengths_sync``, say, does not sum lengths to Python numbers: without
    data there are none."""
    sync = KeyedJaggedTensor.sync
    KeyedJaggedTensor.sync = lambda features: features
    try:
        yield
    finally:
        KeyedJaggedTensor.sync = sync


def _judge(result: Any, loss_reduction: str, follower: Follower) -> None:
    """Raises UnprovedError if losses and outputs of micro-batches do not add up to the batch's."""
    if not isinstance(result, tuple | list) or len(result) != 2:
        raise UnprovedError(f"the model gives a {type(result).__name__}, not losses and an output")
    found, output = result
    # losses: the kind of the reduction; a constant loss is a mean too
    parts, expected = [found], Kind.MEAN if loss_reduction == "mean" else Kind.SUM
    if loss_reduction == "ratio":
        if not isinstance(found, tuple | list) or len(found) != 2:
            raise UnprovedError(f"the loss is a {type(found).__name__}, not two sums")
        parts = list(found)
    for part in parts:
        if not isinstance(part, Tensor):
            raise UnprovedError(f"the loss is a {type(part).__name__}, not a tensor")
        kind = follower.value_of(part).kind
        if kind is not expected and (kind, expected) != (Kind.SAME, Kind.MEAN):
            raise UnprovedError(f"the loss is {kind.value}, not {expected.value}")
    if not parts[0].requires_grad:
        raise UnprovedError("the loss has no graph")
    _judge_backward(parts)
    _judge_output(output, "output", follower)
    refusal = follower.sizes.assumption() or follower.sizes.refusal()
    if refusal is not None:
        raise UnprovedError(refusal)


def _judge_backward(losses: Sequence[Tensor]) -> None:
    """Refuses a backward with a step of Python code, or of an unknown library."""
    for step in backward_steps(losses):
        if isinstance(step, torch.autograd.function.BackwardCFunction):
            name = type(step).__name__.removesuffix("Backward")
            advice = "; use_reentrant=False can be followed" if name.startswith("Checkp") else ""
            raise UnprovedError(
                f"the loss goes through {name}, a torch.autograd.Function whose backward may do "
                f"anything{advice}"
            )
        if "CppNode" in step.name() and "fbgemm" not in step.name():
            raise UnprovedError(f"the loss goes through {step.name()}, whose backward is not known")


def _judge_output(value: Any, path: str, follower: Follower) -> None:
    """Checks that joined outputs of micro-batches would be this output."""
    if isinstance(value, Awaitable):
        value = value.wait()
    if isinstance(value, KeyedJaggedTensor):
        raise UnprovedError(f"{path} is a KeyedJaggedTensor")
    if isinstance(value, JaggedTensor):
        # values in the rows that their lengths count
        feature = follower.value_of(value.lengths()).feature
        for tensor in (value.values(), value.weights_or_none()):
            if tensor is not None and not (feature and _is_list(tensor, feature, follower)):
                raise UnprovedError(f"{path} has not the rows that its lengths say")
    elif isinstance(value, KeyedTensor) and value.key_dim() == 1:
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
    """Checks one tensor of the output: in dim 0 one row per sample, or per lookup of one feature,
    which are stored sample by sample; or a 0-d mean."""
    if not isinstance(tensor, FakeTensor):
        raise UnprovedError(f"{path} is a tensor of the model, which moves with it")
    value = follower.value_of(tensor)
    if value.kind is Kind.ROWS:
        if not follower.sizes.is_list(tensor, value):
            rows = "sample" if value.rows == SAMPLES else f"lookup of {value.rows}"
            raise UnprovedError(f"{path} is not one entry for each {rows} in dim 0")
    elif value.kind not in (Kind.MEAN, Kind.SAME) or tensor.dim():
        raise UnprovedError(f"{path} is {value.kind.value}, so it cannot be joined")
    elif not tensor.is_floating_point():
        raise UnprovedError(f"{path} is a number that is no float, so it cannot be averaged")
    elif follower.is_of_outside(tensor):
        raise UnprovedError(f"{path} is a view into the model or the batch, which moves with it")


def _is_list(tensor: Tensor, rows: str, follower: Follower) -> bool:
    """Whether a tensor has one entry for each of these rows in dim 0."""
    value = follower.value_of(tensor)
    return value.rows == rows and follower.sizes.is_list(tensor, value)
