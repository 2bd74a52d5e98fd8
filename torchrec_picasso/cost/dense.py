"""Times of a model's dense part, which hides communication."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from torchrec_picasso.errors import PicassoError

__all__ = ["DenseTimes"]

_FORWARD_SHARE = 1 / 3
"""Assumed share of forward: backward has two matrix products for each product of forward."""


@dataclass(frozen=True, kw_only=True)
class DenseTimes:
    """The dense part of one step on one rank.

    Args:
        forward_ms: Forward without tables.
        backward_ms: Backward without tables.
        parameter_bytes: Bytes of the parameters whose gradients are summed over ranks.
        batch_size: Number of samples of the measured step; 0 = the planned number.
        in_parts: Measured times of the same samples in micro-batches: (number of micro-batches,
            forward ms, backward ms), ascending. They differ because smaller buffers stay in caches
            and in memory that the allocator keeps.
    """

    forward_ms: float = 0.0
    backward_ms: float = 0.0
    parameter_bytes: float = 0.0
    batch_size: int = 0
    in_parts: tuple[tuple[int, float, float], ...] = ()

    def __post_init__(self) -> None:
        counts = [1, *(count for count, _, _ in self.in_parts)]
        if any(a >= b for a, b in pairwise(counts)):
            raise PicassoError(
                f"dense.in_parts is {str(self.in_parts)[:60]}, expected ascending numbers of "
                "micro-batches from 2, each with two times"
            )

    @staticmethod
    def from_total(total_ms: float, parameter_bytes: float = 0.0) -> DenseTimes:
        """Splits a known total time of forward and backward."""
        forward_ms = _FORWARD_SHARE * total_ms
        return DenseTimes(
            forward_ms=forward_ms,
            backward_ms=total_ms - forward_ms,
            parameter_bytes=parameter_bytes,
        )

    @property
    def total_ms(self) -> float:
        """Forward and backward, in milliseconds."""
        return self.forward_ms + self.backward_ms

    def cut(self, num_micro_batches: int) -> DenseTimes:
        """Returns the times of the same samples in micro-batches, interpolated if not measured."""
        known = ((1, self.forward_ms, self.backward_ms), *self.in_parts)
        counts, *columns_ms = zip(*known)
        # linear in the logarithm of the number; constant beyond the largest measured number
        forward_ms, backward_ms = (
            float(np.interp(math.log(num_micro_batches), np.log(counts), column_ms))
            for column_ms in columns_ms
        )
        return dataclasses.replace(
            self, forward_ms=forward_ms, backward_ms=backward_ms, in_parts=()
        )

    def at(self, batch_size: int) -> DenseTimes:
        """Returns the times of another number of samples, in proportion."""
        if not self.batch_size or self.batch_size == batch_size:
            return self
        factor = batch_size / self.batch_size
        return dataclasses.replace(
            self,
            forward_ms=self.forward_ms * factor,
            backward_ms=self.backward_ms * factor,
            batch_size=batch_size,
            in_parts=tuple(
                (count, forward_ms * factor, backward_ms * factor)
                for count, forward_ms, backward_ms in self.in_parts
            ),
        )
