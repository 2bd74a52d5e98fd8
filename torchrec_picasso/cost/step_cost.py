"""Predicted cost of the embedding part of a step: milliseconds by phase, and bytes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar

__all__ = ["StepCost", "sum_fields"]

_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True)
class StepCost:
    """Predicted cost of the embedding part of one step on the busiest rank, without overlap."""

    input_dist_ms: float = 0.0  # exchange of ids: communication and local work
    forward_compute_ms: float = 0.0  # gather and pooling
    forward_comms_ms: float = 0.0  # communication of rows
    backward_compute_ms: float = 0.0  # gradients of rows, and the update
    backward_comms_ms: float = 0.0  # communication of gradients
    input_dist_wire_ms: float = 0.0  # the communication in input_dist_ms
    sent_bytes: Mapping[str, float] = field(default_factory=dict)
    """Bytes that a rank sends, by purpose; mean over ranks."""

    @property
    def total_ms(self) -> float:
        """Forward with the input dist, and backward with the update."""
        forward_ms = self.input_dist_ms + self.forward_compute_ms + self.forward_comms_ms
        return forward_ms + (self.backward_compute_ms + self.backward_comms_ms)

    @property
    def wire_ms(self) -> float:
        """All communication."""
        return self.input_dist_wire_ms + self.forward_comms_ms + self.backward_comms_ms

    @property
    def exposed_ms(self) -> float:
        """The total without the input dist of the next batch, which TorchRec's pipelines hide."""
        return self.total_ms - self.input_dist_wire_ms

    @property
    def total_bytes(self) -> float:
        """Bytes that a rank sends per step, mean over ranks."""
        return sum(self.sent_bytes.values())

    def plus(self, other: StepCost, times: float = 1.0) -> StepCost:
        """Adds ``times`` another cost; ``times=-1`` subtracts it."""
        changed: dict[str, Any] = {
            name: getattr(self, name) + times * getattr(other, name)
            for name in vars(self)
            if name != "sent_bytes"
        }
        sent = dict(self.sent_bytes)
        for name, num_bytes in other.sent_bytes.items():
            sent[name] = sent.get(name, 0.0) + times * num_bytes
        return StepCost(**changed, sent_bytes=sent)


def sum_fields(zero: _T, items: Iterable[_T]) -> _T:
    """Sums dataclasses of numbers field by field, in the given order, starting at ``zero``."""
    found = list(items)
    names = [field.name for field in fields(zero)]  # type: ignore[arg-type]
    sums: dict[str, Any] = {
        name: sum((getattr(item, name) for item in found), getattr(zero, name)) for name in names
    }
    return replace(zero, **sums)  # type: ignore[type-var]
