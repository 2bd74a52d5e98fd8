"""Makes input slices ahead of the model, once per batch, and gives their results to its forward.

A slice runs on the whole batch when the batch is read. The model's forward of a whole batch gets
the results of the slice's operators instead of computing them again, and each module checks that it
is called with the input that was made ahead, since state may have changed. Micro-batches get their
parts of what the whole batch's input looked up, as in a plain loop. The slice runs on each of them
too, for its other layers and the same check; a batch whose input is not that of its parts is not
cut.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.fx import Node
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._pytree import tree_leaves
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.sparse.tensor_dict import maybe_td_to_kjt

from torchrec_picasso._torchrec import ArgInfo, BaseArgInfoStep, CallArgs, TrainPipelineContext
from torchrec_picasso.batches.members import arguments_of
from torchrec_picasso.batches.split import split_output
from torchrec_picasso.errors import CompatError
from torchrec_picasso.exchange.agreement import agree_on
from torchrec_picasso.train_pipeline.input_slice import (
    InputSlice,
    outside_of,
    run_node,
    settings_of_floats,
    slice_of,
    traced,
)

_KEY = "input slices"
"""Key among the results that TorchRec keeps for a batch."""


class _Step(BaseArgInfoStep):
    """TorchRec's way from a batch to a module's input: its slice."""

    def __init__(self, made: MadeAhead, name: str) -> None:
        super().__init__()
        self.made, self.name = made, name

    def process(self, arg: Any) -> Any:
        """Returns the input for a batch."""
        return self.made.input_of(self.name, arg)


class MadeAhead:
    """Slices of a model inside its wrapper, for modules that TorchRec does not pipeline, by name.

    In training and in evaluation the slices may differ. As for TorchRec's postprocs, the context
    of a batch holds what was made for it.
    """

    def __init__(self, model: nn.Module, names: Sequence[str]) -> None:
        self._model = model
        self._context = TrainPipelineContext()
        self._by_mode: dict[bool, dict[str, InputSlice]] = {True: {}, False: {}}
        self._in_forward: _Once | None = None
        self._asked = names
        self.refused: dict[str, str] = {}
        """Modules that cannot be interleaved: the line of the model, and what it does there."""
        for mode in (model.training, not model.training) if names else ():
            self._find(names, mode)

    def _find(self, names: Sequence[str], mode: bool) -> None:
        """Traces the model twice, to see state that its forward changes."""
        try:
            with _in_mode(self._model, mode):
                one, other = traced(self._model), traced(self._model)
        except Exception as error:  # any error of a forward that TorchRec has not traced
            self.refused |= {name: f"{_word(mode)} raises {error}" for name in names}
            return
        for name in names:
            first, again = (slice_of(graph, name, self._model) for graph in (one, other))
            if isinstance(first, str):
                self.refused.setdefault(name, f"{first} ({_word(mode)})")
            elif isinstance(first, InputSlice) and isinstance(again, InputSlice):
                if not first.is_like(again):
                    line = first.call.meta["line"]
                    self.refused.setdefault(name, f"{line} gives what the forward changes")
                known = self._by_mode[not mode].get(name)
                is_known = known is not None and known.is_like(first) and not known.has_modules
                self._by_mode[mode][name] = known if known is not None and is_known else first

    @property
    def names(self) -> list[str]:
        """Modules whose input is made ahead."""
        found = {**self._by_mode[True], **self._by_mode[False]}
        return [name for name in self._asked if name in found and name not in self.refused]

    def try_on(self, batch: Any, pg: dist.ProcessGroup, device: torch.device) -> None:
        """Runs the slices on a batch, and refuses on all ranks those that may not run ahead.
        Collective."""
        found: dict[str, str | None] = {}
        for mode, slices in self._by_mode.items():
            with _in_mode(self._model, mode):
                for name in [name for name in self.names if name in slices]:
                    reason = slices[name].why_not_ahead(batch, self._model)
                    found[name] = found.get(name) or (reason and f"{reason} ({_word(mode)})")
        # a trace may end otherwise on another rank
        for name in self._asked:
            own = None if name in self.names else "no call of it is seen"
            reason = agree_on(pg, device, self.refused.get(name) or found.get(name) or own)
            if reason is not None:
                self.refused[name] = reason

    def arguments(self, name: str) -> CallArgs:
        """Returns a module's arguments in TorchRec's form."""
        return CallArgs([ArgInfo([_Step(self, name)])], {})

    def set_context(self, context: TrainPipelineContext) -> None:
        """Sets the context of the batch that is read next."""
        self._context = context

    def get_context(self) -> TrainPipelineContext:
        """Returns the context that was set."""
        return self._context

    def input_of(self, name: str, batch: Any) -> Any:
        """Makes the input of a module; what has run for the batch does not run again."""
        if self.is_of_other_mode(self._context):
            del self._context.postproc_fwd_results[_KEY]
        results = self._context.postproc_fwd_results
        return self._made(name, batch, results.setdefault(_KEY, self._new()))

    def _new(self) -> _Once:
        return _Once(self, self._model.training)

    def _made(self, name: str, batch: Any, once: _Once) -> Any:
        found = self._slice(name)
        with once.recording():
            for node in found.nodes:
                if node in once.values:
                    continue
                once.outside |= {id(each): each for each in outside_of(node, self._model)}
                try:
                    once.values[node] = run_node(node, batch, once.values, self._model)
                except Exception as error:  # any error of the model's code
                    raised = f"{node.meta['line']} raises {type(error).__name__}: {error}"
                    raise CompatError(raised) from error
        made = once.values[found.input]
        once.unwritten.setdefault(name, _key_of(arguments_of(made)))
        return made

    def make_part(self, context: TrainPipelineContext, micro_batch: Any, number: int) -> None:
        """Makes the modules' inputs for a micro-batch, by its position in the batch."""
        once, part = context.postproc_fwd_results[_KEY], self._new()
        once.parts[number:] = [part]
        for name in self.names:
            self._made(name, micro_batch, part)

    def check_parts(self, context: TrainPipelineContext, sizes: Sequence[int]) -> None:
        """Compares inputs of micro-batches, of these numbers of samples, with the whole batch's.

        Raises CompatError if they are not its parts.
        """
        for name in self.names:
            once = context.postproc_fwd_results[_KEY]
            found = self._slice(name)
            whole = maybe_td_to_kjt(once.values[found.input], None)
            parts = split_output(whole, sizes, f"{name} gets")
            made = [part.values[found.input] for part in once.parts]
            if not all(map(_is_same, made, parts)):
                raise CompatError(f"{found.call.meta['line']} gives {name} other parts of a batch")

    def _slice(self, name: str) -> InputSlice:
        modes = self._model.training, not self._model.training
        return next(self._by_mode[mode][name] for mode in modes if name in self._by_mode[mode])

    def tensors(self, context: TrainPipelineContext) -> list[Tensor]:
        """Lists the tensors that were made for a batch."""
        once = context.postproc_fwd_results.get(_KEY)
        return [] if once is None else once.tensors()

    def is_of_other_mode(self, context: TrainPipelineContext) -> bool:
        """Whether a batch was read in training for evaluation, or so, and this matters, or before
        the model was attached again."""
        once: _Once | None = context.postproc_fwd_results.get(_KEY)
        if once is None or once.made_by is not self:
            return once is not None
        if once.training == self._model.training:
            return False
        slices, others = self._by_mode[True], self._by_mode[False]
        return any(slices[n] is not others.get(n, slices[n]) for n in self.names if n in slices)

    @contextmanager
    def in_forward(
        self, context: TrainPipelineContext, micro_batch: int | None = None
    ) -> Iterator[None]:
        """In this context the model runs forward on a batch, or on one of its micro-batches."""
        once: _Once | None = context.postproc_fwd_results.get(_KEY)
        if once is None:
            yield
            return
        if micro_batch is not None:
            once = once.parts[micro_batch]
        once.to_check, self._in_forward = set(self.names), once
        try:
            with once.giving():
                yield
        finally:
            self._in_forward = None

    def check(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Compares the input that a module is called with, with the one that was made ahead.

        Raises CompatError if they differ.
        """
        once = self._in_forward
        if once is None:
            return
        once.to_check.discard(name)
        if not once.to_check:
            once.leave()
        found = self._slice(name)
        given, ahead = next(iter((*args, *kwargs.values()))), once.values[found.input]
        is_written = _key_of(arguments_of(ahead)) != once.unwritten[name]
        if is_written or not _is_same(given, ahead):
            line = found.call.meta["line"]
            raise CompatError(_stale(f"{line} gives {name} another input than ahead of the model"))


def _word(mode: bool) -> str:
    return "in training" if mode else "in evaluation"


def _stale(what: str) -> str:
    return (
        f"{what}: the model's forward reads state that has changed, such as an attribute, a buffer "
        "or autocast. Call detach() and reset() after such a change, or read it off the batch"
    )


@contextmanager
def _in_mode(model: nn.Module, training: bool) -> Iterator[None]:
    """Puts a model into training or evaluation, and puts the modes of its modules back."""
    before = [(module, module.training) for module in model.modules()]
    try:
        if model.training != training:
            model.train(training)
        yield
    finally:
        for module, mode in before:
            if module.training != mode:
                module.training = mode


class _Once(TorchFunctionMode):
    """Operators of a batch's slices with their results, which a later forward takes instead.

    An operator has the same result if its tensors are the same objects, not written since, and its
    other arguments are equal; with floating numbers, autocast and default type too. Arguments are
    kept, so that no other object gets their identity.
    """

    def __init__(self, made_by: MadeAhead, training: bool) -> None:
        super().__init__()
        self.made_by, self.training = made_by, training
        """Owner of the slices, and mode of the model that they are of."""
        self.values: dict[Node, Any] = {}
        """Values of the slices' nodes."""
        self.parts: list[_Once] = []
        """The same of the batch's micro-batches."""
        self.unwritten: dict[str, Hashable] = {}
        """The modules' inputs as they were made, by name."""
        self.outside: dict[int, Tensor] = {}
        """Tensors of the model that slices read, by identity. Their data may be written without a
        trace, so operators that read them run again."""
        self.to_check: set[str] = set()
        """Modules that the current forward has not called."""
        self._made: dict[Hashable, list[tuple[Any, Any, Hashable]]] = {}
        self._is_recording = self._is_entered = False
        self._is_pure = True
        self._stance = ExitStack()

    def __deepcopy__(self, memo: Any) -> _Once:
        """Returns itself: copies of a batch are not read again."""
        return self

    def tensors(self) -> list[Tensor]:
        """Lists the tensors that were made, for micro-batches too."""
        made = [result for kept in self._made.values() for result, _, _ in kept]
        made += [part.tensors() for part in self.parts]
        return [leaf for leaf in tree_leaves(made) if isinstance(leaf, Tensor)]

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Keeps the results of the operators that run in this context."""
        self._is_recording = True
        try:
            # tensors of the inference mode could not be used in training
            with torch.inference_mode(False), _uncompiled(), self:
                yield
        finally:
            self._is_recording = False
        if not self._is_pure:
            self._made.clear()

    @contextmanager
    def giving(self) -> Iterator[None]:
        """Operators of this context take kept results, until :meth:`leave`."""
        self._is_entered = bool(self._made)
        if self._is_entered:
            self._stance.enter_context(_uncompiled())
            self.__enter__()
        try:
            yield
        finally:
            self.leave()

    def leave(self) -> None:
        """Drops the results; ends :meth:`giving` unless the model has entered a mode of its own."""
        self._made.clear()
        self._stance.close()
        if self._is_entered and _get_current_function_mode_stack()[-1] is self:
            self._is_entered = False
            self.__exit__(None, None, None)

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        # properties, such as a shape, compute nothing
        is_property = getattr(func, "__name__", "") == "__get__"
        if is_property or not (self._is_recording or self._made):
            return func(*args, **kwargs)
        key = _key_of((func, args, kwargs))
        if not self._is_recording:
            found = self._made.get(key, [])
            if found and found[0][2] in (None, settings_of_floats()):
                return found.pop(0)[0]
            return func(*args, **kwargs)
        result = func(*args, **kwargs)
        # results that are written later are not those of their operators
        self._is_pure &= key == _key_of((func, args, kwargs))
        leaves = tree_leaves(result)
        is_inside = not any(id(leaf) in self.outside for leaf in tree_leaves((args, kwargs)))
        if is_inside and all(isinstance(leaf, Tensor | int | float) for leaf in leaves):
            is_floating = any(isinstance(x, Tensor) and x.is_floating_point() for x in leaves)
            own = list(result) if type(result) is list else result
            kept = own, (args, kwargs), settings_of_floats() if is_floating else None
            self._made.setdefault(key, []).append(kept)
        return result


def _uncompiled() -> AbstractContextManager[Any]:
    """Context in which compiled functions run as they are: dynamo computes something else if a
    function mode is active."""
    stance: AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
    return stance


def _key_of(value: Any) -> Hashable:
    """Describes a call so that equal descriptions give equal results."""
    if isinstance(value, Tensor):
        return "tensor", id(value), None if value.is_inference() else value._version
    if isinstance(value, tuple | list):
        return tuple, *map(_key_of, value)
    if isinstance(value, dict):
        return dict, *map(_key_of, value.items())
    if isinstance(value, slice):
        return slice, *map(_key_of, (value.start, value.stop, value.step))
    return type(value), value if isinstance(value, Hashable) else id(value)


def _is_same(one: Any, other: Any) -> bool:
    """Whether two features are the same ids with the same lengths and weights."""
    if one is other:
        return True
    one, other = maybe_td_to_kjt(one, None), maybe_td_to_kjt(other, None)
    if not isinstance(one, KeyedJaggedTensor) or not isinstance(other, KeyedJaggedTensor):
        return False
    parts, others = arguments_of(one) or {}, arguments_of(other) or {}
    return parts.keys() == others.keys() and all(map(_is_equal, parts.values(), others.values()))


def _is_equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one is other or (one.dtype == other.dtype and torch.equal(one, other))
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(_is_equal, one, other))
    return bool(one is other or one == other)
