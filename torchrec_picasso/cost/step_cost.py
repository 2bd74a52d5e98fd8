"""The answer of the cost model: one step of one placement in milliseconds and bytes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

__all__ = ["StepCost", "sum_columns"]

_MILLISECONDS = (
    "input_dist_ms",
    "forward_compute_ms",
    "forward_comms_ms",
    "backward_compute_ms",
    "backward_comms_ms",
    "input_dist_wire_ms",
)


@dataclass(frozen=True, kw_only=True)
class StepCost:
    """Expected cost of the embedding part of one step, on the busiest rank.

    Args:
        input_dist_ms: Ids to their homes: wire and work; a pipeline hides the wire's part.
        forward_compute_ms: Gather and pooling.
        forward_comms_ms: Rows on the wire.
        backward_compute_ms: Gradients of rows, and the update.
        backward_comms_ms: Gradients on the wire.
        input_dist_wire_ms: The wire's part of ``input_dist_ms``.
        sent_bytes: Bytes that a rank sends, by purpose; mean over ranks.
    """

    input_dist_ms: float = 0.0
    forward_compute_ms: float = 0.0
    forward_comms_ms: float = 0.0
    backward_compute_ms: float = 0.0
    backward_comms_ms: float = 0.0
    input_dist_wire_ms: float = 0.0
    sent_bytes: Mapping[str, float] = field(default_factory=dict)

    @property
    def forward_ms(self) -> float:
        """Forward with its input dist."""
        return self.input_dist_ms + self.forward_compute_ms + self.forward_comms_ms

    @property
    def backward_ms(self) -> float:
        """Backward with the update."""
        return self.backward_compute_ms + self.backward_comms_ms

    @property
    def total_ms(self) -> float:
        """The whole step, nothing hidden."""
        return self.forward_ms + self.backward_ms

    @property
    def wire_ms(self) -> float:
        """What all of it has on the wire."""
        return self.input_dist_wire_ms + self.forward_comms_ms + self.backward_comms_ms

    @property
    def hidden_ms(self) -> float:
        """What TorchRec's pipelines hide: the wire of the next batch's input dist."""
        return self.input_dist_wire_ms

    @property
    def exposed_ms(self) -> float:
        """What stays in the step's way under TorchRec's pipelines."""
        return self.total_ms - self.hidden_ms

    @property
    def total_bytes(self) -> float:
        """Bytes that a rank sends per step."""
        return sum(self.sent_bytes.values())

    def plus(self, other: StepCost, times: float = 1.0) -> StepCost:
        """The sum with ``times`` the other; ``times=-1`` gives what a table adds."""
        names = {**self.sent_bytes, **other.sent_bytes}
        return StepCost(
            **{name: getattr(self, name) + times * getattr(other, name) for name in _MILLISECONDS},
            sent_bytes={
                name: self.sent_bytes.get(name, 0.0) + times * other.sent_bytes.get(name, 0.0)
                for name in names
            },
        )


def sum_columns(rows: Iterable[Sequence[float]], num_columns: int) -> list[float]:
    """Sums each column from the first row to the last, in the order in which they come.

    Args:
        rows: As many numbers each.
        num_columns: How many.

    Returns:
        One sum per column; 0 without rows.
    """
    zeros = [0.0] * num_columns
    # numpy's sum adds in pairs, which rounds otherwise; cumsum adds one by one
    last: list[float] = np.cumsum([zeros, *rows], axis=0, dtype=float)[-1].tolist()
    return last
