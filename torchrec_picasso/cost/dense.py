"""What a model's dense part takes: the work that exchanges hide under."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from torchrec_picasso.cost.read_numbers import read_dataclass, read_numbers, shown_shortly
from torchrec_picasso.errors import PicassoError

__all__ = ["DenseTimes"]

_FORWARD_SHARE = 1 / 3
"""Of a dense step whose parts are not known: backward has two products for each of forward's."""


@dataclass(frozen=True, kw_only=True)
class DenseTimes:
    """One rank's dense part of one step.

    Args:
        forward_ms: Without the tables.
        backward_ms: Likewise.
        parameter_bytes: Bytes of the parameters whose gradients all ranks sum.
        batch_size: Samples that the times are of; 0 = those of the plan.
        in_parts: Where measured, what the same samples take in micro-batches, ascending: how many,
            forward and backward. Smaller buffers stay in caches, and in memory that is kept.
    """

    forward_ms: float = 0.0
    backward_ms: float = 0.0
    parameter_bytes: float = 0.0
    batch_size: int = 0
    in_parts: tuple[tuple[int, float, float], ...] = ()

    @staticmethod
    def from_total(total_ms: float, parameter_bytes: float = 0.0) -> DenseTimes:
        """Of a dense step whose whole time is all that is known."""
        forward_ms = _FORWARD_SHARE * total_ms
        return DenseTimes(
            forward_ms=forward_ms,
            backward_ms=total_ms - forward_ms,
            parameter_bytes=parameter_bytes,
        )

    @staticmethod
    def from_dict(document: Mapping[str, Any]) -> DenseTimes:
        """Reads what ``dataclasses.asdict`` made of it.

        Raises:
            PicassoError: If a time is no number of at least 0, or parts are not ascending.
        """
        in_parts = tuple(tuple(of) for of in document.get("in_parts", ()))
        read_numbers(("dense.in_parts", number) for of in in_parts for number in of)
        pieces = [1, *(of[0] for of in in_parts)]
        if any(len(of) != 3 for of in in_parts) or any(a >= b for a, b in pairwise(pieces)):
            raise PicassoError(
                f"dense.in_parts is {shown_shortly(in_parts)}, expected ascending numbers of "
                "parts, each with two times"
            )
        return read_dataclass(DenseTimes, document, "dense", in_parts=in_parts)

    @property
    def total_ms(self) -> float:
        """Forward and backward."""
        return self.forward_ms + self.backward_ms

    def cut(self, num_micro_batches: int) -> DenseTimes:
        """The same samples in micro-batches, between two that were measured in proportion."""
        known = ((1, self.forward_ms, self.backward_ms), *self.in_parts)
        places, *times = zip(*known)
        forward_ms, backward_ms = (
            float(np.interp(math.log(num_micro_batches), np.log(places), of)) for of in times
        )
        return dataclasses.replace(
            self, forward_ms=forward_ms, backward_ms=backward_ms, in_parts=()
        )

    def at(self, batch_size: int) -> DenseTimes:
        """The same for another number of samples, in proportion."""
        if not self.batch_size or self.batch_size == batch_size:
            return self
        factor = batch_size / self.batch_size
        return dataclasses.replace(
            self,
            forward_ms=self.forward_ms * factor,
            backward_ms=self.backward_ms * factor,
            batch_size=batch_size,
            in_parts=tuple(
                (pieces, forward_ms * factor, backward_ms * factor)
                for pieces, forward_ms, backward_ms in self.in_parts
            ),
        )
