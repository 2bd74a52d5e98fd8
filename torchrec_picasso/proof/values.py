"""Values of the proof: how a tensor depends on the batch, and the sizes of the batch.

A model's forward runs once with symbols in place of the number of samples and of each feature's
lookups. PyTorch records what it had to assume about them. Beyond "2 or more" a proof may assume
only that two sizes are equal, and only where an operator fails if they are not.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import sympy
import torch
from torch import Tensor
from torch._dynamo.source import ConstantSource
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from torch.utils._sympy.numbers import int_oo
from torch.utils._sympy.value_ranges import ValueRanges

SAMPLES = "samples"
"""Name of the rows of which a batch has one per sample; other rows are a feature's lookups."""


class UnprovedError(Exception):
    """The reason why a model is unproved; completes a sentence that begins with the place."""


class Kind(Enum):
    """How a tensor depends on the samples of a batch.

    A ``ROWS`` tensor has an entry for each row, computed from that row's inputs alone. A ``MEAN``
    stays one if a term is added that is the same for every batch, because shares sum to 1.
    """

    SAME = "the same for every batch"
    ROWS = "entries of samples"
    MEAN = "a mean over samples"
    SUM = "a sum over the batch"
    OFFSETS = "where each sample's lookups begin and end"
    LOOKUPS = "lookups of all features; take those of one by to_dict()"
    HIDDEN = "what an operator keeps for its backward"
    INPUT = "a tensor that only tables may get"


@dataclass(frozen=True)
class Value:
    """The dependence of one tensor on the batch."""

    kind: Kind
    rows: str = ""
    """Rows along its batch dim: :data:`SAMPLES`, or the name of a feature's lookups."""
    dim: int = -1
    """Index of the batch dim. Its size is ``outer * rows * inner``: entry i of row r in block o is
    at ``(o * rows + r) * inner + i``."""
    outer: int = 1
    """Number of blocks of rows in this dim."""
    counted: str = ""
    """Rows that the entries are integer positions in, counted from the batch's first row; a part of
    the batch counts from its own first row. Empty = entries are no positions."""
    is_own: bool = False
    """Whether such a position is that of the entry's own row."""
    feature: str = ""
    """Name of the feature whose lengths or offsets these are."""
    operators: frozenset[int] = frozenset()
    """Numbers of the unproved operators that an ``INPUT`` comes from (see :mod:`.follow`)."""

    @property
    def is_partial(self) -> bool:
        """Whether the values of a batch's parts add up to the value of the batch."""
        return self.kind in (Kind.MEAN, Kind.SUM)


SAME = Value(Kind.SAME)


def plain(value: Value) -> Value:
    """Keeps the rows of a value, and drops all else that is known about its entries."""
    return replace(value, counted="", is_own=False, feature="")


_LEAST = 2
"""Smallest size of a symbol: PyTorch treats 0 and 1 specially, and rules cover these."""


def is_symbolic(number: Any) -> bool:
    """Whether a number depends on the batch's sizes."""
    return isinstance(number, torch.SymInt | torch.SymFloat | torch.SymBool) and bool(
        number.node.expr.free_symbols
    )


class Sizes:
    """Symbols for the numbers of rows of a batch: samples, and lookups of each feature."""

    def __init__(self) -> None:
        self.env = ShapeEnv(
            duck_shape=False,
            specialize_zero_one=False,
            allow_scalar_outputs=False,
            allow_dynamic_output_shape_ops=False,
        )
        self._counts: dict[str, torch.SymInt] = {}
        self._names: dict[sympy.Expr, str] = {}
        # union-find of row names that an operator forces to be equal; equalities that rules need,
        # with their place
        self._same_as: dict[str, str] = {}
        self._wanted: list[tuple[str, str, str]] = []

    def add(self, rows: str, count: int) -> torch.SymInt:
        """Makes a symbol for the number of these rows, ``count`` in the batch of the proof."""
        # the shift keeps equal counts equal, and hints away from 0 and 1
        hint, source = count + _LEAST, ConstantSource(f"rows_{len(self._counts)}")
        symbol = self.env.create_symbol(
            hint, source=source, dynamic_dim=DimDynamic.DYNAMIC, positive=None
        )
        self.env.var_to_range[symbol] = ValueRanges(_LEAST, int_oo)
        found: Any = self.env.create_symintnode(symbol, hint=hint, source=source)
        self._counts[rows], self._names[symbol] = found, rows
        return found

    def times(self, size: Any, rows: str) -> int | None:
        """Divides a tensor's size by the number of these rows; ``None`` = it is no multiple."""
        if not is_symbolic(size):
            return None
        # a node's expression has all simplifications so far
        factor, rest = size.node.expr.as_coeff_Mul()
        is_multiple = rest == self._counts[rows].node.expr and factor.is_Integer
        return int(factor) if is_multiple else None

    def rows_of(self, size: Any) -> tuple[str, int] | None:
        """Finds rows whose number divides a size, and the quotient; ``None`` = none do."""
        found = ((rows, self.times(size, rows)) for rows in self._counts)
        return next(((rows, times) for rows, times in found if times is not None), None)

    def batch_dims(self, tensor: Tensor) -> list[int]:
        """Lists the dims of a tensor whose size depends on the batch."""
        return [dim for dim, size in enumerate(tensor.shape) if is_symbolic(size)]

    def locate(self, tensor: Tensor, value: Value) -> Value:
        """Sets the dim of a tensor's value: the one dim with the batch's size, if it needs one."""
        dims = self.batch_dims(tensor)
        has_none = value.is_partial or value.kind is Kind.SAME
        if value.kind in (Kind.HIDDEN, Kind.INPUT) or (has_none and not dims):
            return value
        if has_none:
            problem = "with an entry for each sample"
        elif len(dims) != 1:
            problem = f"with {len(dims)} dims that have the batch's size"
        else:
            located = replace(value, dim=dims[0])
            if value.kind is not Kind.ROWS or self.inner(tensor, located) is not None:
                return located
            problem = "not of samples"
        shape = ", ".join(map(str, tensor.shape))
        raise UnprovedError(f"gives a tensor of shape ({shape}), {problem}")

    def inner(self, tensor: Tensor, value: Value) -> int | None:
        """Counts the entries of each row in the batch's dim; ``None`` = no whole blocks of rows."""
        times = self.times(tensor.shape[value.dim], value.rows)
        return None if times is None or times % value.outer else times // value.outer

    def is_list(self, tensor: Tensor, value: Value) -> bool:
        """Whether a tensor has one entry for each row, in dim 0, and these are no positions."""
        is_first = value.kind is Kind.ROWS and value.dim == 0 and not value.counted
        return is_first and value.outer == 1 and self.inner(tensor, value) == 1

    def _root(self, rows: str) -> str:
        """The representative of all row names with an equal count."""
        while rows in self._same_as:
            rows = self._same_as[rows]
        return rows

    def are_same(self, one: str, other: str) -> bool:
        """Whether two numbers of rows are equal in every part of a batch that does not fail."""
        return self._root(one) == self._root(other)

    @property
    def equal_rows(self) -> list[list[str]]:
        """Groups of names of rows whose numbers an operator forces to be equal."""
        groups: dict[str, list[str]] = {}
        for rows in self._counts:
            groups.setdefault(self._root(rows), []).append(rows)
        return [names for names in groups.values() if len(names) > 1]

    def fail_unless_same(self, one: str, other: str) -> None:
        """Records that an operator fails unless two numbers are equal: it does not broadcast."""
        # the samples become the representative if they are one of the two
        first, second = sorted((self._root(one), self._root(other)), key=lambda r: r != SAMPLES)
        if first != second:
            self._same_as[second] = first

    def want_same(self, one: str, other: str, where: str) -> None:
        """Records that a rule needs two equal numbers, which another operator must enforce."""
        self._wanted.append((one, other, where))

    def refusal(self) -> str | None:
        """Describes a needed equality that no operator enforces; ``None`` = there is none."""
        for one, other, where in self._wanted:
            if not self.are_same(one, other):
                return f"{where} takes {one} and {other} for equally many, which they may not be"
        return None

    def assumption(self, start: int = 0) -> str | None:
        """Describes an assumption of PyTorch's other than an equality; ``None`` = none. Equalities
        are recorded as needed. Guards before ``start`` are skipped."""
        for guard in self.env.guards[start:]:
            one, other = (self._names.get(side) for side in _equal_sides(guard.expr))
            if one is None or other is None:
                names = {symbol: sympy.Symbol(rows) for symbol, rows in self._names.items()}
                return f"assumes {guard.expr.xreplace(names)}"
            self.want_same(one, other, "an operator")
        return None


def _equal_sides(expr: Any) -> tuple[Any, Any]:
    """Two sizes that an assumption takes for equal, reduced; ``None`` = it is another one."""
    parts = [part for part in sympy.Or.make_args(expr) if not _is_of_small_size(part)]
    if len(parts) == 1 and isinstance(parts[0], sympy.Eq):
        (factor, one), (other_factor, other) = (side.as_coeff_Mul() for side in parts[0].args)
        if factor == other_factor:
            return one, other
    return None, None


def _is_of_small_size(part: Any) -> bool:
    """Whether an assumption is that a size is 0 or 1, which sizes here are not."""
    sides = part.args if isinstance(part, sympy.Eq) else ()
    return any(side.is_Symbol for side in sides) and any(side in (0, 1) for side in sides)
