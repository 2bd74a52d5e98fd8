"""The sizes of a batch as symbols, and which of them a model's forward depends on.

A model's forward runs once with symbols where a batch has numbers: of samples, of each feature's
lookups. PyTorch notes what it had to assume of them to go on; beyond "2 or more" a proof may assume
nothing but that two are equal, where an operator fails if they are not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sympy
import torch
from torch import Tensor
from torch._dynamo.source import ConstantSource
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from torch.utils._sympy.numbers import int_oo
from torch.utils._sympy.value_ranges import ValueRanges

from torchrec_picasso.proof.values import SAMPLES, Kind, UnprovedError, Value

__all__ = ["Sizes", "is_symbolic"]

_LEAST = 2
"""Sizes 0 and 1 are special to PyTorch; rules see to these."""


def is_symbolic(number: Any) -> bool:
    """Whether a number depends on the batch's sizes."""
    return isinstance(number, torch.SymInt | torch.SymFloat | torch.SymBool) and bool(
        number.node.expr.free_symbols
    )


class Sizes:
    """The numbers of rows that a batch has of each kind."""

    def __init__(self) -> None:
        self.env = ShapeEnv(
            duck_shape=False,
            specialize_zero_one=False,
            allow_scalar_outputs=False,
            allow_dynamic_output_shape_ops=False,
        )
        self._counts: dict[str, torch.SymInt] = {}
        self._names: dict[sympy.Expr, str] = {}
        self._same_as: dict[str, str] = {}
        self._wanted: list[tuple[str, str, str]] = []
        self._num_known = 0

    def begin(self) -> None:
        """Begins anew, for another forward."""
        self._same_as.clear()
        self._wanted.clear()
        self._num_known = len(self.env.guards)

    def add(self, rows: str, count: int) -> torch.SymInt:
        """A symbol for a number of rows.

        Args:
            rows: Whose.
            count: The number in the batch that is looked at.
        """
        # a shift keeps what is equal equal, and numbers away from 0 and 1
        hint, source = count + _LEAST, ConstantSource(f"rows_{len(self._counts)}")
        symbol = self.env.create_symbol(
            hint, source=source, dynamic_dim=DimDynamic.DYNAMIC, positive=None
        )
        self.env.var_to_range[symbol] = ValueRanges(_LEAST, int_oo)
        found = self.env.create_symintnode(symbol, hint=hint, source=source)
        assert isinstance(found, torch.SymInt)
        self._counts[rows], self._names[symbol] = found, rows
        return found

    def count(self, rows: str) -> sympy.Expr:
        """The number of rows as an expression of now."""
        return self._counts[rows].node.expr

    def times(self, size: Any, rows: str) -> int | None:
        """How often a size is a number of rows; ``None`` = it is no multiple."""
        if not is_symbolic(size):
            return None
        factor, rest = size.node.expr.as_coeff_Mul()
        return int(factor) if rest == self.count(rows) and factor.is_Integer else None

    def rows_of(self, size: Any) -> tuple[str, int] | None:
        """Which rows a size is a multiple of, and of how many times; ``None`` = of no batch's."""
        for rows in self._counts:
            times = self.times(size, rows)
            if times is not None:
                return rows, times
        return None

    def is_sum(self, size: Any, rows: Sequence[str], times: int = 1) -> bool:
        """Whether a size is the sum of these numbers of rows, so many times."""
        expr = size.node.expr if isinstance(size, torch.SymInt) else sympy.Integer(size)
        total = sum((self.count(of) for of in rows), sympy.Integer(0))
        return bool(sympy.expand(expr - times * total) == 0)

    def batch_dims(self, tensor: Tensor) -> list[int]:
        """Dims whose size depends on the batch."""
        return [dim for dim, size in enumerate(tensor.shape) if is_symbolic(size)]

    def locate(self, tensor: Tensor, value: Value) -> Value:
        """The value with the dim that has its rows.

        Raises:
            UnprovedError: If there is none, or the sizes depend on the batch in another way.
        """
        dims = self.batch_dims(tensor)
        shape = "(" + ", ".join(map(str, tensor.shape)) + ")"
        if value.kind is Kind.HIDDEN:
            return value
        if value.kind in (Kind.SAME, Kind.MEAN, Kind.SUM):
            if dims:
                raise UnprovedError(
                    f"gives a tensor of shape {shape}, with an entry for each sample"
                )
            return value
        if len(dims) != 1:
            raise UnprovedError(
                f"gives a tensor of shape {shape}, with {len(dims)} dims that have the batch's size"
            )
        (dim,) = dims
        if value.kind is Kind.ROWS:
            times = self.times(tensor.shape[dim], value.rows)
            if times is None or times % value.outer:
                raise UnprovedError(f"gives a tensor of shape {shape}, not of samples")
        return Value(**{**vars(value), "dim": dim})

    def inner(self, tensor: Tensor, value: Value) -> int:
        """Entries that each row has in the batch's dim of a tensor."""
        times = self.times(tensor.shape[value.dim], value.rows)
        assert times is not None
        return times // value.outer

    # -- equal numbers of rows -----------------------------------------------------------------

    def _root(self, rows: str) -> str:
        while rows in self._same_as:
            rows = self._same_as[rows]
        return rows

    def are_same(self, one: str, other: str) -> bool:
        """Whether an operator fails on every part of a batch in which these are not as many."""
        return self._root(one) == self._root(other)

    def fail_unless_same(self, one: str, other: str) -> None:
        """Notes such an operator: it does not broadcast."""
        if not self.are_same(one, other):
            roots = {self._root(one), self._root(other)}
            first, second = sorted(roots, key=lambda of: of != SAMPLES)
            self._same_as[second] = first

    def want_same(self, one: str, other: str, where: str) -> None:
        """Notes that a rule holds only if they are as many, which another operator must ensure."""
        if not self.are_same(one, other):
            self._wanted.append((one, other, where))

    def complaint(self) -> str | None:
        """What else than allowed was assumed of the sizes."""
        for one, other, where in self._wanted:
            if not self.are_same(one, other):
                return f"{where} takes {one} and {other} for equally many, which they may not be"
        return None

    def assumption(self, start: int | None = None) -> str | None:
        """What PyTorch assumed of the sizes to go on.

        Args:
            start: Assumptions that were looked at already; ``None`` = those of other forwards.
        """
        for guard in self.env.guards[self._num_known if start is None else start :]:
            for equal in _equalities(guard.expr):
                if not isinstance(equal, sympy.Eq) or not all(
                    of in self._names for of in equal.args
                ):
                    names = {symbol: sympy.Symbol(rows) for symbol, rows in self._names.items()}
                    return f"assumes {guard.expr.xreplace(names)}"
                one, other = (self._names[side] for side in equal.args)
                self.want_same(one, other, "an operator")
        return None


def _equalities(expr: Any) -> list[Any]:
    """What of an assumption is left for sizes of 2 or more, without common factors."""
    parts = [part for part in sympy.Or.make_args(expr) if not _is_of_small_size(part)]
    if len(parts) != 1 or not isinstance(parts[0], sympy.Eq):
        return [expr]
    one, other = (side.as_coeff_Mul() for side in parts[0].args)
    return [sympy.Eq(one[1], other[1]) if one[0] == other[0] else expr]


def _is_of_small_size(part: Any) -> bool:
    if not isinstance(part, sympy.Eq):
        return False
    symbols = [side for side in part.args if side.is_Symbol]
    numbers = [side for side in part.args if side in (0, 1)]
    return len(symbols) == len(numbers) == 1
