"""What a timeline is made of: operations, exchanges and waits, with their beginnings and ends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torchrec_picasso.schedule.kinds import Op

__all__ = ["COMPUTE", "DONE", "EXCHANGE", "RETURNED", "WAIT", "WAITED_FOR", "HasSpans", "Span"]

COMPUTE, EXCHANGE, WAIT = "compute", "exchange", "wait"
"""Kinds of spans: an operation, waits in it included; what it sent; a wait."""

RETURNED, DONE, WAITED_FOR = "returned", "done", "waited_for"
"""What a span ends with: the call returned; the exchange was done; its wait returned, so that the
exchange was done then or earlier."""


@dataclass(frozen=True, kw_only=True)
class Span:
    """Something that took time.

    Args:
        step: Number of the step, counted from the pipeline's first.
        op: The operation; of an exchange, the one that posted it.
        kind: ``"compute"``, ``"exchange"`` or ``"wait"``; waits lie within their operation.
        start_ms: Since the first operation of the timeline.
        end_ms: Since the same.
        ends: ``"returned"``, ``"done"``, or ``"waited_for"``: done then or earlier.
    """

    step: int
    op: Op
    kind: str
    start_ms: float
    end_ms: float
    ends: str


class HasSpans(Protocol):
    """What can be drawn."""

    @property
    def spans(self) -> tuple[Span, ...]:
        """By their start."""
