"""Follows the batch through a forward's operators, each of which runs on tensors without data.

A table's input that is made ahead of the model may come from operators that mix samples or have no
rule: the table looks up the whole batch's input once, and micro-batches get their rows of it. Such
operators are *unproved*, and what is computed from their results is ``INPUT``. Only tables may get
it: an ``INPUT`` in a loss or an output is refused. An unproved operator may also raise on a part of
a batch. That is seen before the batch is trained if a table gets the result, which is then made
ahead for each part too; so unproved operators of which no table gets a result are refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from torchrec_picasso.proof import places, rules  # noqa: F401, register their rules
from torchrec_picasso.proof.call import RULES, Call, Operand
from torchrec_picasso.proof.comparison import COMMUNICATES
from torchrec_picasso.proof.values import SAME, Kind, Sizes, UnprovedError, Value
from torchrec_picasso.proof.watch import current_line

_ASKING = frozenset(
    (
        *("size", "sym_size", "stride", "sym_stride", "numel", "sym_numel", "storage_offset"),
        *("sym_storage_offset", "dim", "device", "layout", "dtype", "is_contiguous"),
        *("is_strides_like_format", "is_non_overlapping_and_dense"),
    )
)
"""Operators that read properties of a tensor and not its data."""

_DRAWING_BY_ENTRY = ("bernoulli", "native_dropout", "_scaled_dot_product")
_KNOWN = (Tensor, nn.Parameter, FakeTensor)


def memory_of(tensor: Tensor) -> int:
    """Identifies the memory of a tensor, which its views share, while a tensor on it is alive."""
    return tensor.untyped_storage()._cdata


class Follower(TorchDispatchMode):
    """A dispatch mode that records how each tensor depends on the batch. ``names`` are those of the
    model's parameters and buffers, by ``id``; with ``makes_inputs`` inputs of tables are made ahead
    of the model, and :meth:`note_input` gets them."""

    def __init__(self, sizes: Sizes, names: Mapping[int, str], makes_inputs: bool = False) -> None:
        super().__init__()
        self.sizes, self._makes_inputs = sizes, makes_inputs
        self._unproved: list[str] = []  # reasons of the unproved operators, by number
        self._unused: set[int] = set()  # numbers of those of which no table has got a result
        self._names = names
        self._known: dict[int, tuple[Tensor, Value]] = {}
        self._outside: dict[int, str] = {}
        self._in_storage: dict[int, list[int]] = {}
        self.num_operators = 0
        self.reason: str | None = None
        """The first refusal, with its place; kept because a model may catch the exception."""

    def know(self, tensor: Tensor, value: Value, *, is_input: bool = False) -> None:
        """Records how a tensor without data depends on the batch; the batch's dim may be open. The
        model must not write into an input."""
        if id(tensor) not in self._known:
            self._in_storage.setdefault(memory_of(tensor), []).append(id(tensor))
        self._known[id(tensor)] = tensor, self.sizes.locate(tensor, value)
        if is_input:
            self._outside[memory_of(tensor)] = "the batch; write into a clone"

    def value_of(self, tensor: Tensor) -> Value:
        """Returns how a tensor depends on the batch; raises if no followed operator made it."""
        if type(tensor) not in _KNOWN:
            raise UnprovedError(f"takes a {type(tensor).__name__}, not a plain tensor")
        if isinstance(tensor, FakeTensor):
            if id(tensor) not in self._known:
                raise UnprovedError("takes a tensor that came from no operator that was seen")
            return self._known[id(tensor)][1]
        return SAME  # a tensor with data: a weight or a constant of the model

    def is_of_outside(self, tensor: Tensor) -> bool:
        """Whether a tensor shares memory with the model or the batch."""
        return memory_of(tensor) in self._outside

    def note_input(self, tensors: Iterable[Tensor]) -> None:
        """Notes that a table gets these tensors as its input, which is made ahead of the model."""
        for tensor in tensors:
            self._unused -= self.value_of(tensor).operators

    @property
    def why_unused(self) -> str | None:
        """The first unproved operator of which no table got a result, with the reason why it is
        unproved; ``None`` = there is none."""
        return self._unproved[min(self._unused)] if self._unused else None

    def refuse(self, reason: str) -> None:
        """Records a reason; only the first one is kept."""
        self.reason = self.reason or reason

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        try:
            return self._follow(func, args, kwargs or {})
        except Exception as error:
            reason = str(error)
            if not isinstance(error, UnprovedError):
                text = reason.strip().partition("\n")[0][:200]
                reason = f"cannot be followed without data ({type(error).__name__}: {text})"
            self.refuse(_placed(func, reason))
            raise

    def _follow(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Checks one call, runs it, and records how its results depend on the batch."""
        namespace, _, name = func._schema.name.partition("::")
        if name in _ASKING or namespace == "profiler":
            return func(*args, **kwargs)
        if namespace in COMMUNICATES:
            raise UnprovedError("communicates, once per micro-batch")
        self.num_operators += 1
        call, num_guards = self._bound(func, args, kwargs), len(self.sizes.env.guards)
        self._check(call)
        try:
            return self._by_rule(call)
        except UnprovedError as unproved:
            if call.written or call.is_random or not self._makes_inputs:
                raise
            reason = _placed(func, str(unproved))
        # bound and run again, with the guards of the first run: a rule may come before or after it
        call = self._bound(func, args, kwargs)
        self._run(call, num_guards)
        number = len(self._unproved)
        self._unproved.append(reason)
        self._unused.add(number)
        numbers = frozenset([number]).union(*(each.value.operators for each in call.operands))
        value = Value(Kind.INPUT, operators=numbers)
        self._note_all(call, [value] * len(call.outputs))
        return call.out

    def _by_rule(self, call: Call) -> Any:
        """Runs a call, and records its results by the operator's rule. UnprovedError if the rule
        refuses, or there is none."""
        numbers = [number for each in call.operands for number in each.value.operators]
        if numbers:
            cause = self._unproved[min(numbers)]
            raise UnprovedError(f"computes with {Kind.INPUT.value}, since {cause}")
        namespace = call.operator.namespace
        name = call.name if namespace == "aten" else f"{namespace}.{call.name}"
        is_pointwise = namespace == "aten" and torch.Tag.pointwise in call.operator.tags
        rule = RULES.get("pointwise" if is_pointwise and name != "equal" else name)
        # without a rule the operator is decomposed, and the mode follows its parts
        if rule is None and call.varying:
            return self._decomposed(call)
        self._run(call, len(self.sizes.env.guards))
        values: Sequence[Value] | None = [SAME] * len(call.outputs)
        if call.varying or call.numbers or call.is_random:
            values = None if rule is None else rule(call)
        elif namespace not in ("aten", "prims", "fbgemm"):
            values = None
        if values is None and not call.written:
            return self._decomposed(call)
        if values is None:
            raise UnprovedError("has no rule")
        for wanted in call.wanted:
            self.sizes.want_same(*wanted)
        self._note_all(call, values)
        return call.out

    def _run(self, call: Call, num_guards: int) -> None:
        """Runs a call; raises if it depends on the batch's size, or gives a number of its data."""
        args, kwargs = call.given
        call.out = call.operator(*args, **kwargs)
        # a new guard on a symbol means that the operator branched on the size of the batch
        assumption = self.sizes.assumption(num_guards)
        if assumption is not None:
            raise UnprovedError(f"{assumption}: it depends on the size of the batch")
        if any(not isinstance(leaf, Tensor | None) for leaf in tree_leaves(call.out)):
            raise UnprovedError("gives a number that depends on data")

    def _bound(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Call:
        """Maps the arguments of a call to their names, with defaults and tensors' dependence."""
        arguments, base = func._schema.arguments, func._schema.name.partition("::")[2]
        if func._schema.is_mutable and base.endswith("_") and not base.endswith("__"):
            base = base[:-1]  # of the in-place variant
        bound = {a.name: a.default_value for a in arguments if a.has_default_value()}
        bound |= {a.name: given for a, given in zip(arguments, args)} | kwargs
        leaves = [(name, leaf) for name, given in bound.items() for leaf in tree_leaves(given)]
        tensors = [(name, leaf) for name, leaf in leaves if isinstance(leaf, Tensor)]
        operands = [Operand(name, leaf, self.value_of(leaf)) for name, leaf in tensors]
        return Call(func, (args, kwargs), base, bound, operands, self.sizes)

    def _check(self, call: Call) -> None:
        """Refuses what each micro-batch would do again: writes into the model or the batch, and
        random numbers except those of dropout, which are drawn entry by entry."""
        for tensor in (operand.tensor for operand in call.written):
            if not isinstance(tensor, FakeTensor):
                raise UnprovedError(f"writes into {self._name(tensor)}")
            outside = self._outside.get(memory_of(tensor))
            if outside is not None:
                raise UnprovedError(f"writes into {outside}")
        if call.is_random:
            if call.args.get("generator") is not None:
                raise UnprovedError("draws from a generator of its own, once per micro-batch")
            if not call.name.startswith(_DRAWING_BY_ENTRY):
                raise UnprovedError("draws random numbers, once per micro-batch; only dropout may")
        if {torch.Tag.out_variant, torch.Tag.out} & set(call.operator.tags):
            raise UnprovedError("writes into a tensor given as out=")

    def _name(self, tensor: Tensor) -> str:
        return f"{self._names.get(id(tensor), 'a tensor from outside')}, once per micro-batch"

    def _note_all(self, call: Call, values: Sequence[Value]) -> None:
        """Records all outputs of a call, and which of them are views into the model."""
        real = [op.tensor for op in call.operands if not isinstance(op.tensor, FakeTensor)]
        if real and any(returned.alias_info for returned in call.operator._schema.returns):
            for out in call.outputs:
                self._outside[memory_of(out)] = self._name(real[0])
        for tensor, value in zip(call.outputs, values):
            self._note(call, tensor, value)

    def _decomposed(self, call: Call) -> Any:
        """Runs an operator without a rule by its decomposition."""
        from torch._decomp import decomposition_table

        func, (args, kwargs), count = call.operator, call.given, self.num_operators
        with self:
            # inside a mode's dispatch the mode is off; `with self` follows the parts
            if func in decomposition_table:
                found = decomposition_table[func](*args, **kwargs)
            else:
                found = func.decompose(*args, **kwargs)
        self.num_operators = count  # an operator counts once
        if found is NotImplemented:
            raise UnprovedError("has no rule")
        return found

    def _note(self, call: Call, tensor: Tensor, value: Value) -> None:
        """Records one output, and checks a write into a view."""
        value = self.sizes.locate(tensor, value)
        # other tensors of the same storage would keep their old dependence
        for operand in call.written:
            if operand.tensor is tensor and torch.Tag.inplace_view not in call.operator.tags:
                inside = self._in_storage.get(memory_of(tensor), ())
                others = [self._known[key][1] for key in inside if key != id(tensor)]
                if any(other.counted or other.feature for other in others):
                    raise UnprovedError("writes into a view of lengths, or of places in the batch")
                if value != operand.value and others:
                    kinds = f"{value.kind.value} into a view of what is {operand.value.kind.value}"
                    raise UnprovedError(f"writes {kinds}")
        if isinstance(tensor, FakeTensor):
            self.know(tensor, value)
        elif value.kind is not Kind.SAME:
            raise UnprovedError("gives a tensor with data that depends on the batch")


def _placed(func: Any, reason: str) -> str:
    """Names an operator and its line in the model in front of a reason."""
    return f"{func._schema.name.replace('::', '.')} at {current_line()} {reason}"
