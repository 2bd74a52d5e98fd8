"""One call of an operator, with the facts that rules need, and the rules' register."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from torchrec_picasso.proof.values import (
    SAME,
    SAMPLES,
    Kind,
    Sizes,
    UnprovedError,
    Value,
    is_symbolic,
)
from torchrec_picasso.proof.watch import current_line


@dataclass(frozen=True)
class Operand:
    """A tensor among the arguments of a call, and how it depends on the batch."""

    name: str
    tensor: Tensor
    value: Value

    @property
    def is_same(self) -> bool:
        """Whether the tensor is the same for every batch."""
        return self.value.kind is Kind.SAME

    @property
    def place(self) -> int:
        """The batch's dim counted from the right, as in broadcasting; negative."""
        return self.value.dim - self.tensor.dim()


@dataclass
class Call:
    """A call of an operator; rules see it after it has run."""

    operator: Any
    given: tuple[Sequence[Any], Mapping[str, Any]]  # arguments by position and by name
    name: str
    """Name of the operator, without the underscore of an in-place variant."""
    args: dict[str, Any]
    """Arguments by the names of the operator's schema, with defaults."""
    operands: Sequence[Operand]
    """Tensors among the arguments; tensors in lists are listed one by one."""
    sizes: Sizes
    out: Any = None
    wanted: list[tuple[str, str, str]] = field(default_factory=list)
    """Equal numbers of rows that the rule needs, which another operator must ensure, and why."""

    @property
    def is_random(self) -> bool:
        """Whether the operator draws random numbers."""
        return torch.Tag.nondeterministic_seeded in self.operator.tags

    @cached_property
    def written(self) -> list[Operand]:
        """The tensors that the operator writes into."""
        infos = {a.name: a.alias_info for a in self.operator._schema.arguments}
        return [op for op in self.operands if (info := infos[op.name]) and info.is_write]

    @cached_property
    def varying(self) -> list[Operand]:
        """The tensors that depend on the batch."""
        return [operand for operand in self.operands if not operand.is_same]

    @cached_property
    def outputs(self) -> list[Tensor]:
        """The tensors in the result."""
        return [out for out in tree_leaves(self.out) if isinstance(out, Tensor)]

    @cached_property
    def numbers(self) -> list[Any]:
        """Arguments that are symbolic numbers, computed from the batch's size."""
        return [leaf for leaf in tree_leaves(list(self.args.values())) if is_symbolic(leaf)]

    def operand(self, name: str) -> Operand:
        """Returns the tensor of an argument."""
        return next(operand for operand in self.operands if operand.name == name)

    def only(self) -> Operand:
        """Returns the one tensor that depends on the batch."""
        if len(self.varying) != 1:
            raise UnprovedError(f"takes {len(self.varying)} tensors that depend on the batch")
        return self.varying[0]

    def dims(self, operand: Operand) -> list[int]:
        """Lists the dims of an operand that the call names, or all, counted from 0."""
        num_dims, given = operand.tensor.dim(), self.args.get("dim", self.args.get("dims"))
        given = [given] if isinstance(given, int) else given or range(num_dims)
        return [dim % max(num_dims, 1) for dim in given]

    def filled(self) -> Value:
        """Returns the value of an output with equal entries; along the batch each row gets one."""
        (out,) = self.outputs
        sizes = [out.shape[dim] for dim in self.sizes.batch_dims(out)]
        if not sizes:
            return SAME
        found = self.sizes.rows_of(sizes[0])
        if found is None:
            raise UnprovedError(f"makes a tensor of {sizes[0]} entries, which is no batch")
        return Value(Kind.ROWS, rows=found[0])

    def want_same(self, one: str, other: str) -> None:
        """Notes that a rule needs two equal numbers of rows."""
        if not self.sizes.are_same(one, other):
            self.wanted.append((one, other, f"{self.name} at {current_line()}"))

    def require_single(self, operand: Operand) -> None:
        """Requires one entry of the batch's dim for each row."""
        if operand.value.outer != 1 or self.sizes.inner(operand.tensor, operand.value) != 1:
            raise UnprovedError("takes entries of different samples for those of one")

    def same_rows(self, operands: Iterable[Operand]) -> Value:
        """Returns the rows that all operands share, in one order; the caller compares the dims."""
        operands = list(operands)
        first = operands[0].value
        for operand in operands:
            if operand.value.kind is not Kind.ROWS:
                raise UnprovedError(f"takes {operand.value.kind.value}, beside entries of rows")
            if operand.value.outer != first.outer:
                raise UnprovedError("takes samples in different orders")
            self.want_same(first.rows, operand.value.rows)
        # between equal row counts the samples' name keeps most information
        names = [operand.value.rows for operand in operands]
        rows = SAMPLES if SAMPLES in names else names[0]
        return Value(Kind.ROWS, rows=rows, outer=first.outer)

    def aligned(self, operands: Iterable[Operand]) -> Value:
        """Returns the rows of tensors that broadcast with equal batch dims from the right. Another
        tensor must not have several entries there."""
        operands = list(operands)
        rows = [operand for operand in operands if not operand.is_same]
        if not rows:
            return SAME
        found = self.same_rows(rows)
        (place, *others) = {operand.place for operand in rows}
        if others:
            # e.g. (B, 1) and (B,): broadcasting makes (B, B)
            raise UnprovedError("puts every sample beside every other sample")
        for operand in operands:
            tensor = operand.tensor
            if operand.is_same and tensor.dim() >= -place and tensor.shape[place] != 1:
                raise UnprovedError("has different constants for different places in the batch")
        return found


@dataclass(frozen=True)
class Rule:
    """The rule of an operator."""

    function: Callable[[Call], Value | Sequence[Value] | None]
    """Returns one value for all outputs, or one for each, where the batch's dim may be open (see
    :class:`.Value`); ``None`` = look at the operator's parts instead."""
    numbers: bool = False
    """Whether arguments may be numbers computed from the batch's size."""
    linear: bool = False
    """Whether a mean or a sum over samples stays one, if only ``self`` varies."""
    partial: bool = False
    """Whether ``function`` takes other calls with means and sums."""
    places: bool = False
    """Whether ``function`` takes positions in the batch."""

    def __call__(self, call: Call) -> Sequence[Value] | None:
        """Returns the value of each output of a call; ``None`` = the rule does not know."""
        varying = call.varying
        if call.numbers and not self.numbers:
            raise UnprovedError("uses the batch's size as a number")
        is_self = len(varying) == 1 and varying[0].name == "self"
        if self.linear and is_self and varying[0].value.is_partial:
            kind, dtype = varying[0].value.kind, varying[0].tensor.dtype
            if call.numbers:
                raise UnprovedError(f"puts {kind.value} beside every sample")
            if any(out.dtype != dtype and not out.is_floating_point() for out in call.outputs):
                raise UnprovedError(f"rounds {kind.value}")
            return [Value(kind)] * len(call.outputs)
        for value in (operand.value for operand in varying):
            if value.is_partial and not self.partial:
                raise UnprovedError(f"is not linear in {value.kind.value}")
            if not value.is_partial and value.kind is not Kind.ROWS and not self.places:
                raise UnprovedError(f"computes with {value.kind.value}")
            if value.counted and not self.places:
                raise UnprovedError("computes with places in the batch")
        found = self.function(call)
        return [found] * len(call.outputs) if isinstance(found, Value) else found


RULES: dict[str, Rule] = {}
"""Rule of each operator."""


def rule(names: str, **options: bool) -> Callable[[Any], Any]:
    """Makes a function the rule of operators, named with blanks between; ``options`` of Rule."""

    def note(function: Any) -> Any:
        RULES.update(dict.fromkeys(names.split(), Rule(function, **options)))
        return function

    return note
