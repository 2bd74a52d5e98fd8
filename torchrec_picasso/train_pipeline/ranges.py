"""Names of steps and operations in a profile; ``timeline/`` parses them."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass

from torchrec_picasso.exchange.waiting import named_range
from torchrec_picasso.schedule.schedule import Op

__all__ = ["OP_PREFIX", "STEP_PREFIX", "op_range", "step_range"]

STEP_PREFIX, OP_PREFIX = "picasso step ", "picasso op "


@dataclass(frozen=True)
class _Named:
    """Builds its string only when a profiler reads it."""

    prefix: str
    what: object

    def __str__(self) -> str:
        return f"{self.prefix}{self.what}"


def step_range(number: int) -> AbstractContextManager[object]:
    """Makes the profiler range of a step."""
    return named_range(_Named(STEP_PREFIX, number))


def op_range(op: Op) -> AbstractContextManager[object]:
    """Makes the profiler range of an operation."""
    return named_range(_Named(OP_PREFIX, op))
