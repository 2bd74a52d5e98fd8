"""One call of an operator, with the facts that rules need."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

from torchrec_picasso.proof.sizes import Sizes, is_symbolic
from torchrec_picasso.proof.values import SAMPLES, Kind, UnprovedError, Value

__all__ = ["RULES", "Call", "Rule", "rule"]


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
    """A call that has run.

    Args:
        name: Name of the operator, without the underscore of an in-place variant.
        args: Arguments by the names of the operator's schema, with defaults.
        operands: Tensors among the arguments; tensors in lists are listed one by one.
        out: Result of the call.
        sizes: Sizes of the batch.
        where: Operator and line of the model.
        is_pointwise: Whether PyTorch tags the operator as elementwise.
    """

    name: str
    args: dict[str, Any]
    operands: Sequence[Operand]
    out: Any
    sizes: Sizes
    where: str
    is_pointwise: bool = False

    def of(self, name: str) -> Operand:
        """Returns the tensor of an argument."""
        return next(operand for operand in self.operands if operand.name == name)

    def find(self, name: str) -> Operand | None:
        """Returns the tensor of an optional argument, or ``None``."""
        return next((operand for operand in self.operands if operand.name == name), None)

    @property
    def varying(self) -> list[Operand]:
        """The tensors that depend on the batch."""
        return [operand for operand in self.operands if not operand.is_same]

    @property
    def outputs(self) -> list[Tensor]:
        """The tensors in the result."""
        return [out for out in tree_leaves(self.out) if isinstance(out, Tensor)]

    @property
    def numbers(self) -> list[Any]:
        """Arguments that are symbolic numbers, computed from the batch's size."""
        return [leaf for leaf in tree_leaves(list(self.args.values())) if is_symbolic(leaf)]

    def with_scratch(self, value: Value) -> list[Value]:
        """Makes one value for all outputs, and ``HIDDEN`` for outputs without a batch dim.

        Operators return the latter for their backward; a model does not read them.
        """
        hidden = Value(Kind.HIDDEN)
        return [value if self.sizes.batch_dims(out) else hidden for out in self.outputs]

    def dims(self, operand: Operand, name: str = "dim") -> list[int] | None:
        """Lists the dims that an argument names, counted from 0; ``None`` = all dims.

        Args:
            operand: Tensor that the dims belong to.
            name: Name of the argument.
        """
        given = self.args.get(name)
        if given is None or (isinstance(given, Sequence) and not given):
            return None
        given = [given] if isinstance(given, int) else given
        return [dim % max(operand.tensor.dim(), 1) for dim in given]

    def refuse_numbers(self) -> None:
        """Refuses symbolic numbers of the batch's size where they would be data or indices."""
        if self.numbers:
            raise UnprovedError("uses the batch's size as a number")

    def same_rows(self, operands: Iterable[Operand]) -> Value:
        """Returns the rows that all operands share; the caller has compared their dims.

        Raises:
            UnprovedError: If they hold other entries than rows, or rows in different orders.
        """
        operands = list(operands)
        first = operands[0].value
        for operand in operands:
            if operand.value.kind is not Kind.ROWS:
                raise UnprovedError(f"takes {operand.value.kind.value}, beside entries of rows")
            if operand.value.outer != first.outer:
                raise UnprovedError("takes samples in different orders")
            self.sizes.want_same(first.rows, operand.value.rows, self.where)
        return Value(Kind.ROWS, rows=self._best(operands), outer=first.outer)

    def _best(self, operands: Sequence[Operand]) -> str:
        """Chooses between equal row counts; the samples' name keeps most information."""
        names = [operand.value.rows for operand in operands]
        return SAMPLES if SAMPLES in names else names[0]

    def aligned(self, operands: Iterable[Operand]) -> Value:
        """Returns the rows of tensors that broadcast with equal batch dims from the right.

        Raises:
            UnprovedError: If batch dims differ, or another tensor has several entries there.
        """
        operands = list(operands)
        rows = [operand for operand in operands if not operand.is_same]
        if not rows:
            return Value(Kind.SAME)
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


Rule = Callable[[Call], "Value | Sequence[Value]"]
RULES: dict[str, Rule] = {}
"""Rule of each operator: returns one value for all outputs, or one for each; the batch's dim may
be open (see :class:`.Value`)."""


def rule(names: str) -> Callable[[Rule], Rule]:
    """Makes a function the rule of some operators.

    Args:
        names: Names of the operators, separated by blanks; FBGEMM's begin with "fbgemm.".
    """

    def note(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(names.split(), function))
        return function

    return note
