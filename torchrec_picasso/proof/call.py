"""One operator's call, as rules see it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

from torchrec_picasso.proof.sizes import Sizes, is_symbolic
from torchrec_picasso.proof.values import SAMPLES, Kind, Unproved, Value

__all__ = ["RULES", "Call", "Rule", "rule"]


@dataclass(frozen=True)
class Operand:
    """A tensor among the arguments and what is known of it."""

    name: str
    tensor: Tensor
    value: Value

    @property
    def is_same(self) -> bool:
        """Whether it is the same for every batch."""
        return self.value.kind is Kind.SAME

    @property
    def place(self) -> int:
        """The batch's dim counted from the right, as broadcasting does."""
        return self.value.dim - self.tensor.dim()


@dataclass
class Call:
    """A call that has run.

    Args:
        name: Of the operator, in-place variants like the others.
        overload: Which of them.
        args: By the names of its schema, defaults too.
        operands: Its tensors, those in lists one by one.
        out: What it gave.
        sizes: Of the batch.
        where: The line of the model.
    """

    name: str
    overload: str
    args: dict[str, Any]
    operands: Sequence[Operand]
    out: Any
    sizes: Sizes
    where: str
    is_pointwise: bool = False

    def of(self, name: str) -> Operand:
        """The tensor of an argument."""
        return next(operand for operand in self.operands if operand.name == name)

    def find(self, name: str) -> Operand | None:
        """The tensor of an optional argument."""
        return next((operand for operand in self.operands if operand.name == name), None)

    @property
    def varying(self) -> list[Operand]:
        """Tensors that depend on the batch."""
        return [operand for operand in self.operands if not operand.is_same]

    @property
    def outputs(self) -> list[Tensor]:
        """Tensors that it gave."""
        return [out for out in tree_leaves(self.out) if isinstance(out, Tensor)]

    @property
    def numbers(self) -> list[Any]:
        """Arguments that are numbers of the batch's size."""
        return [leaf for leaf in tree_leaves(list(self.args.values())) if is_symbolic(leaf)]

    def with_scratch(self, value: Value) -> list[Value]:
        """A value for all outputs but those without the batch's size, which a model never reads."""
        hidden = Value(Kind.HIDDEN)
        return [value if self.sizes.batch_dims(out) else hidden for out in self.outputs]

    def dims(self, operand: Operand, name: str = "dim") -> list[int] | None:
        """Dims that an argument names, counted from 0; ``None`` = all."""
        given = self.args.get(name)
        if given is None or (isinstance(given, Sequence) and not given):
            return None
        given = [given] if isinstance(given, int) else given
        return [dim % max(operand.tensor.dim(), 1) for dim in given]

    def refuse_numbers(self) -> None:
        """Refuses numbers of the batch's size where they would be values or places."""
        if self.numbers:
            raise Unproved("uses the batch's size as a number")

    def same_rows(self, operands: Iterable[Operand]) -> Value:
        """The rows that all of these have, whose dims a caller has compared."""
        operands = list(operands)
        first = operands[0].value
        for operand in operands:
            if operand.value.kind is not Kind.ROWS:
                raise Unproved(f"takes {operand.value.kind.value}, beside entries of rows")
            if operand.value.outer != first.outer:
                raise Unproved("takes samples in different orders")
            self.sizes.want_same(first.rows, operand.value.rows, self.where)
        return Value(Kind.ROWS, rows=self._best(operands), outer=first.outer)

    def _best(self, operands: Sequence[Operand]) -> str:
        names = [operand.value.rows for operand in operands]
        return SAMPLES if SAMPLES in names else names[0]

    def aligned(self, operands: Iterable[Operand]) -> Value:
        """The rows of tensors that broadcast, their batch dims at the same place from the right.

        Raises:
            Unproved: If they are not, or another tensor has several entries there.
        """
        operands = list(operands)
        rows = [operand for operand in operands if not operand.is_same]
        if not rows:
            return Value(Kind.SAME)
        found = self.same_rows(rows)
        (place, *others) = {operand.place for operand in rows}
        if others:
            raise Unproved("puts every sample beside every other sample")
        for operand in operands:
            tensor = operand.tensor
            if operand.is_same and tensor.dim() >= -place and tensor.shape[place] != 1:
                raise Unproved("has different constants for different places in the batch")
        return found


Rule = Callable[[Call], "Value | Sequence[Value]"]
RULES: dict[str, Rule] = {}
"""By operator; gives one value for all outputs, or one for each, batch dims left open."""


def rule(names: str) -> Callable[[Rule], Rule]:
    """Makes a function the rule of these operators.

    Args:
        names: With blanks between them; those of FBGEMM begin with "fbgemm.".
    """

    def note(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(names.split(), function))
        return function

    return note
