"""What a model's dense part takes: the work that exchanges hide under."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

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
    """

    forward_ms: float = 0.0
    backward_ms: float = 0.0
    parameter_bytes: float = 0.0
    batch_size: int = 0

    @staticmethod
    def of(total_ms: float, parameter_bytes: float = 0.0) -> DenseTimes:
        """Of a dense step whose whole time is all that is known."""
        forward_ms = _FORWARD_SHARE * total_ms
        return DenseTimes(
            forward_ms=forward_ms,
            backward_ms=total_ms - forward_ms,
            parameter_bytes=parameter_bytes,
        )

    @property
    def total_ms(self) -> float:
        """Forward and backward."""
        return self.forward_ms + self.backward_ms

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
        )
