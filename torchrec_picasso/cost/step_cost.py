"""Predicted cost of the embedding part of a step: milliseconds by phase, and bytes."""

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
    """Predicted cost of the embedding part of one step on the busiest rank, without overlap.

    Args:
        input_dist_ms: Exchange of ids: communication and local work.
        forward_compute_ms: Gather and pooling.
        forward_comms_ms: Communication of rows.
        backward_compute_ms: Gradients of rows, and the update.
        backward_comms_ms: Communication of gradients.
        input_dist_wire_ms: The communication in ``input_dist_ms``.
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
        """Forward, including the input dist."""
        return self.input_dist_ms + self.forward_compute_ms + self.forward_comms_ms

    @property
    def backward_ms(self) -> float:
        """Backward, including the update."""
        return self.backward_compute_ms + self.backward_comms_ms

    @property
    def total_ms(self) -> float:
        """Forward and backward."""
        return self.forward_ms + self.backward_ms

    @property
    def wire_ms(self) -> float:
        """All communication."""
        return self.input_dist_wire_ms + self.forward_comms_ms + self.backward_comms_ms

    @property
    def exposed_ms(self) -> float:
        """The total without the communication that TorchRec's pipelines hide: the input dist of
        the next batch."""
        return self.total_ms - self.input_dist_wire_ms

    @property
    def total_bytes(self) -> float:
        """Bytes that a rank sends per step, mean over ranks."""
        return sum(self.sent_bytes.values())

    def plus(self, other: StepCost, times: float = 1.0) -> StepCost:
        """Adds ``times`` another cost; ``times=-1`` subtracts it."""
        names = {**self.sent_bytes, **other.sent_bytes}
        return StepCost(
            **{name: getattr(self, name) + times * getattr(other, name) for name in _MILLISECONDS},
            sent_bytes={
                name: self.sent_bytes.get(name, 0.0) + times * other.sent_bytes.get(name, 0.0)
                for name in names
            },
        )


def sum_columns(rows: Iterable[Sequence[float]], num_columns: int) -> list[float]:
    """Sums each column, adding rows in the given order.

    Args:
        rows: Rows of ``num_columns`` numbers.
        num_columns: Number of columns.

    Returns:
        One sum per column; 0 without rows.
    """
    zeros = [0.0] * num_columns
    # np.sum adds pairwise, which rounds differently; cumsum adds one row after another
    last: list[float] = np.cumsum([zeros, *rows], axis=0, dtype=float)[-1].tolist()
    return last
