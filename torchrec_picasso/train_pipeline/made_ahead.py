"""Makes tables' inputs ahead of the model, per batch and micro-batch (slices: ``input_slice.py``).

A slice runs on the whole batch when the batch is read. The model's forward of a whole batch gets
the results of the slice's operators instead of computing them again, and each module checks that it
is called with the input that was made ahead, since state may have changed. Micro-batches get their
parts of what the whole batch's input looked up, as in a plain loop. The slice runs on each of them
too, for its other layers and the same check, which results of the whole batch would not allow; a
batch whose input is not that of its parts is not cut, unless a proof shows that only tables get it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.fx import Node
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._pytree import tree_leaves
from torchrec.sparse.tensor_dict import maybe_td_to_kjt

from torchrec_picasso._torchrec import ArgInfo, BaseArgInfoStep, CallArgs, TrainPipelineContext
from torchrec_picasso.batches.members import arguments_of
from torchrec_picasso.batches.split import split_output
from torchrec_picasso.errors import CompatError
from torchrec_picasso.exchange.agreement import agree_on
from torchrec_picasso.train_pipeline.batch_watch import (
    WRITES,
    BatchWatch,
    WrittenBatchError,
    described,
)
from torchrec_picasso.train_pipeline.input_slice import (
    InputSlice,
    outside_of,
    run_node,
    settings_of_floats,
    slice_of,
    traced,
)

_KEY = "input slices"
"""Key of :class:`_SliceResults` among the results that TorchRec's context of a batch keeps."""

_ASKING = ("__get__", "numel", "size", "dim")
"""Names of functions that read properties of a tensor, such as its shape: they compute nothing."""


class _Step(BaseArgInfoStep):
    """A step of TorchRec's from a batch to the input of module ``name``: the module's slice."""

    def __init__(self, made_ahead: MadeAhead, name: str) -> None:
        super().__init__()
        self._made_ahead, self._name = made_ahead, name

    def process(self, arg: Any) -> Any:
        """Returns the module's input for the batch ``arg``."""
        return self._made_ahead.input_of(self._name, arg)


class MadeAhead:
    """The slices of the modules ``names``, which TorchRec does not pipeline; ``model`` is inside
    its wrapper. In training and in evaluation the slices of a module may differ."""

    def __init__(self, model: nn.Module, names: Sequence[str]) -> None:
        self._model, self._asked = model, names
        self._context = TrainPipelineContext()
        self._by_mode: dict[bool, dict[str, InputSlice]] = {True: {}, False: {}}
        self._checked_now: _SliceResults | None = None
        self._take: Callable[[list[Tensor]], None] | None = None  # see telling()
        self.refused: dict[str, str] = {}
        """Modules that cannot be interleaved: the line of the model, and what it does there."""
        for is_training in (model.training, not model.training) if names else ():
            self._find_slices(names, is_training)

    def _find_slices(self, names: Sequence[str], is_training: bool) -> None:
        """Finds the slices of one mode. Two traces show state that the model's forward changes."""
        try:
            with _in_mode(self._model, is_training):
                graphs = traced(self._model), traced(self._model)
        except Exception as error:  # any error of a forward that TorchRec has not traced
            self.refused |= {name: f"{_mode_name(is_training)} raises {error}" for name in names}
            return
        for name in names:
            first, again = (slice_of(graph, name, self._model) for graph in graphs)
            if isinstance(first, str):
                self.refused.setdefault(name, f"{first} ({_mode_name(is_training)})")
            elif isinstance(first, InputSlice) and isinstance(again, InputSlice):
                if not first.is_like(again):
                    line = first.call.meta["line"]
                    self.refused.setdefault(name, f"{line} gives what the forward changes")
                # Both modes share a slice unless modules inside may compute by their mode.
                other = self._by_mode[not is_training].get(name, first)
                is_shared = other.is_like(first) and not other.has_modules
                self._by_mode[is_training][name] = other if is_shared else first

    @property
    def names(self) -> list[str]:
        """Modules whose input is made ahead."""
        found = {**self._by_mode[True], **self._by_mode[False]}
        return [name for name in self._asked if name in found and name not in self.refused]

    def examine(self, batch: Any, pg: dist.ProcessGroup, device: torch.device) -> None:
        """Runs the slices on copies of a batch, and refuses on all ranks those that may not run
        ahead. Collective."""
        reasons: dict[str, str | None] = {}
        for is_training, slices in self._by_mode.items():
            with _in_mode(self._model, is_training):
                for name in [name for name in self.names if name in slices]:
                    why = slices[name].why_not_ahead(batch, self._model)
                    why = why and f"{why} ({_mode_name(is_training)})"
                    reasons[name] = reasons.get(name) or why
        # a trace may end otherwise on another rank
        for name in self._asked:
            own = None if name in self.names else "no call of it is seen"
            reason = agree_on(pg, device, self.refused.get(name) or reasons.get(name) or own)
            if reason is not None:
                self.refused[name] = reason

    def arguments(self, name: str) -> CallArgs:
        """Returns a module's arguments in TorchRec's form."""
        return CallArgs([ArgInfo([_Step(self, name)])], {})

    def set_context(self, context: TrainPipelineContext) -> None:
        """Sets the context of the batch that is read next; TorchRec treats this object, as its own
        postprocs, by this method and :meth:`get_context`."""
        self._context = context

    def get_context(self) -> TrainPipelineContext:
        """Returns the context that was set."""
        return self._context

    def input_of(self, name: str, batch: Any) -> Any:
        """Makes the input of a module. Nodes that slices share run once per batch."""
        if self.is_of_other_mode(self._context):
            del self._context.postproc_fwd_results[_KEY]
        results = self._context.postproc_fwd_results.setdefault(_KEY, self._new_results())
        if name not in results.unwritten:
            self._make(name, results, batch, BatchWatch(batch))
        return results.values[self._slice(name).input]

    def make_part(self, context: TrainPipelineContext, micro_batch: Any, number: int) -> None:
        """Makes the modules' inputs for a micro-batch, by its position in the batch."""
        results, part = context.postproc_fwd_results[_KEY], self._new_results()
        results.parts[number:] = [part]
        watch = BatchWatch(micro_batch)
        for name in self.names:
            self._make(name, part, micro_batch, watch)

    def check_parts(self, context: TrainPipelineContext, sizes: Sequence[int]) -> None:
        """Compares inputs of micro-batches, of these numbers of samples, with the whole batch's.

        Raises CompatError if they are not its parts.
        """
        for name in self.names:
            results, found = context.postproc_fwd_results[_KEY], self._slice(name)
            whole = maybe_td_to_kjt(results.values[found.input], None)
            parts = split_output(whole, sizes, f"{name} gets")
            made = [part.values[found.input] for part in results.parts]
            if not all(map(_are_same, made, parts)):
                raise CompatError(f"{found.call.meta['line']} gives {name} other parts of a batch")

    def _new_results(self) -> _SliceResults:
        return _SliceResults(self, self._model.training)

    def _make(self, name: str, results: _SliceResults, batch: Any, watch: BatchWatch) -> None:
        """Makes the input of a module, and adds it to the results."""
        found = self._slice(name)
        with results.recording(watch):
            for node in found.nodes:
                if node in results.values:
                    continue
                results.outside |= {id(each): each for each in outside_of(node, self._model)}
                try:
                    with results:  # not around the watch, which reads a version of each tensor
                        results.values[node] = run_node(node, batch, results.values, self._model)
                except Exception as error:  # any error of the model's code
                    raised = f"{node.meta['line']} raises {type(error).__name__}: {error}"
                    raise CompatError(raised) from error
                # a layer may replace a member; what other functions replaced is found at the end
                may_be_replaced = node.op == "call_module" or node is found.input
                if watch.is_written() or (may_be_replaced and watch.is_replaced()):
                    raise WrittenBatchError(f"{node.meta['line']} {WRITES}; write into a clone")
        results.unwritten[name] = described(arguments_of(results.values[found.input]))

    def _slice(self, name: str) -> InputSlice:
        """Returns the slice of the model's mode; of the other mode if this one has no call."""
        modes = self._model.training, not self._model.training
        return next(self._by_mode[mode][name] for mode in modes if name in self._by_mode[mode])

    def tensors(self, context: TrainPipelineContext) -> list[Tensor]:
        """Lists the tensors that were made for a batch."""
        results = context.postproc_fwd_results.get(_KEY)
        return [] if results is None else results.tensors()

    def is_of_other_mode(self, context: TrainPipelineContext) -> bool:
        """Whether a batch was read in another mode than the model's, by slices that differ, or
        before the model was attached again."""
        results: _SliceResults | None = context.postproc_fwd_results.get(_KEY)
        if results is None or results.made_by is not self:
            return results is not None
        if results.is_training == self._model.training:
            return False
        slices, others = self._by_mode[True], self._by_mode[False]
        return any(slices[n] is not others.get(n, slices[n]) for n in self.names if n in slices)

    @contextmanager
    def in_forward(self, context: TrainPipelineContext, micro_batch: int | None) -> Iterator[None]:
        """In this context the model runs forward on a batch, or on one of its micro-batches."""
        results: _SliceResults | None = context.postproc_fwd_results.get(_KEY)
        if results is None:
            yield
            return
        if micro_batch is not None:
            results = results.parts[micro_batch]
        results.to_check, self._checked_now = set(self.names), results
        try:
            with results.replaying():
                yield
        finally:
            self._checked_now = None

    @contextmanager
    def telling(self, take: Callable[[list[Tensor]], None]) -> Iterator[None]:
        """In this context ``take`` gets the tensors of each input that a module is called with."""
        self._take = take
        try:
            yield
        finally:
            self._take = None

    def check(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Compares the input that a module is called with, with the one that was made ahead.

        Raises CompatError if they differ.
        """
        given, results = next(iter((*args, *kwargs.values()))), self._checked_now
        if self._take is not None:
            parts = tree_leaves(arguments_of(maybe_td_to_kjt(given, None)))
            self._take([part for part in parts if isinstance(part, Tensor)])
        if results is None:
            return
        results.to_check.discard(name)
        if not results.to_check:  # the rest of the forward has no use for results
            results.stop_replay()
        found = self._slice(name)
        ahead, line = results.values[found.input], found.call.meta["line"]
        if described(arguments_of(ahead)) != results.unwritten[name]:
            raise CompatError(
                f"{line} gives {name} what was made ahead of the model, and a layer has written "
                "into it, or into the result of an equal call; write into a clone"
            )
        if not _are_same(given, ahead):
            raise CompatError(
                f"{line} gives {name} another input than ahead of the model: the model's forward "
                "reads state that has changed, such as an attribute, a buffer or autocast. Call "
                "detach() and reset() after such a change, or read it off the batch"
            )


def _mode_name(is_training: bool) -> str:
    return "in training" if is_training else "in evaluation"


@contextmanager
def _in_mode(model: nn.Module, is_training: bool) -> Iterator[None]:
    """Puts a model into training or evaluation, and puts the modes of its modules back."""
    before = [(module, module.training) for module in model.modules()]
    try:
        if model.training != is_training:
            model.train(is_training)
        yield
    finally:
        for module, mode in before:
            if module.training != mode:
                module.training = mode


class _Result(NamedTuple):
    """The result of an operator."""

    value: Any
    arguments: Any
    """Kept alive, so that no other object gets their identity."""
    settings: Hashable
    """Settings that the value depends on; ``None`` = on none."""


class _SliceResults(TorchFunctionMode):
    """Results of the slices of a batch, which a later forward takes instead of computing them.

    An operator has the same result if its tensors are the same objects, not written since, and its
    other arguments are equal; with floating numbers, autocast and default type too.
    """

    def __init__(self, made_by: MadeAhead, is_training: bool) -> None:
        super().__init__()
        self.made_by, self.is_training = made_by, is_training
        """Owner of the slices, and mode of the model that they are of."""
        self.values: dict[Node, Any] = {}
        """Values of the slices' nodes."""
        self.parts: list[_SliceResults] = []
        """The same of the batch's micro-batches."""
        self.unwritten: dict[str, Hashable] = {}
        """The modules' inputs as they were made, by name."""
        self.outside: dict[int, Tensor] = {}
        """Tensors of the model that slices read, by identity. Their data may be written without a
        trace, so operators that read them run again."""
        self.to_check: set[str] = set()
        """Modules that the current forward has not called."""
        self._by_call: dict[Hashable, list[_Result]] = {}
        """Results of equal calls, in their order."""
        self._is_recording = self._is_entered = False
        self._watch: BatchWatch  # of the batch, while operators are recorded
        self._has_written = False
        self._stance = ExitStack()

    def __deepcopy__(self, memo: Any) -> _SliceResults:
        """Returns itself: copies of a batch are not read again."""
        return self

    def tensors(self) -> list[Tensor]:
        """Lists the tensors that were made, for micro-batches too."""
        made = [result.value for results in self._by_call.values() for result in results]
        made += [part.tensors() for part in self.parts]
        return [leaf for leaf in tree_leaves(made) if isinstance(leaf, Tensor)]

    @contextmanager
    def recording(self, watch: BatchWatch) -> Iterator[None]:
        """In this context the mode keeps the results of operators, and tells a watch of them
        first."""
        self._is_recording, self._watch = True, watch
        try:
            # tensors of the inference mode could not be used in training
            with torch.inference_mode(False), _uncompiled():
                yield
        finally:
            self._is_recording = False
        if self._has_written:  # later writes do not repeat, so the forward computes all again
            self._by_call.clear()

    @contextmanager
    def replaying(self) -> Iterator[None]:
        """Operators of this context take kept results, until :meth:`stop_replay`."""
        self._is_entered = bool(self._by_call)
        if self._is_entered:
            self._stance.enter_context(_uncompiled())
            self.__enter__()
        try:
            yield
        finally:
            self.stop_replay()

    def stop_replay(self) -> None:
        """Drops the results, and leaves the mode unless the model has entered one of its own."""
        self._by_call.clear()
        self._stance.close()
        if self._is_entered and _get_current_function_mode_stack()[-1] is self:
            self._is_entered = False
            self.__exit__(None, None, None)

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._is_recording:
            self._watch.note(func)
        is_asking = getattr(func, "__name__", "") in _ASKING
        if is_asking or not (self._is_recording or self._by_call):
            return func(*args, **kwargs)
        call = described((func, args, kwargs))
        if not self._is_recording:
            found = self._by_call.get(call, [])
            if found and found[0].settings in (None, settings_of_floats()):
                return found.pop(0).value
            return func(*args, **kwargs)
        result = func(*args, **kwargs)
        # A written argument has another version now.
        self._has_written |= call != described((func, args, kwargs))
        leaves = tree_leaves(result)
        given = tree_leaves((args, kwargs)) if self.outside else ()  # takes longer than all else
        is_inside = not any(id(leaf) in self.outside for leaf in given)
        if is_inside and all(isinstance(leaf, Tensor | int | float) for leaf in leaves):
            is_floating = any(isinstance(x, Tensor) and x.is_floating_point() for x in leaves)
            own = list(result) if type(result) is list else result  # the model may change its list
            kept = _Result(own, (args, kwargs), settings_of_floats() if is_floating else None)
            self._by_call.setdefault(call, []).append(kept)
        return result


def _uncompiled() -> AbstractContextManager[Any]:
    """Context in which compiled functions run as they are: dynamo computes something else if a
    function mode is active."""
    stance: AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
    return stance


def _are_same(one: Any, other: Any) -> bool:
    """Whether two features have the same keys, ids, lengths and weights."""
    if one is other:
        return True
    parts, others = (arguments_of(maybe_td_to_kjt(each, None)) or {} for each in (one, other))
    is_alike = bool(parts) and parts.keys() == others.keys()
    return is_alike and all(map(_is_equal, parts.values(), others.values()))


def _is_equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one is other or (one.dtype == other.dtype and torch.equal(one, other))
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(_is_equal, one, other))
    return bool(one is other or one == other)
