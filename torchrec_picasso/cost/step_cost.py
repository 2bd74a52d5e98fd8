"""Predicted cost of the embedding part of a step: milliseconds by phase, and bytes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import reduce
from typing import Any, TypeVar

__all__ = ["StepCost", "Summable"]

_T = TypeVar("_T", bound="Summable")


class Summable:
    """Base of dataclasses of numbers, or of numbers by name, that are summed field by field."""

    def plus(self: _T, other: _T, times: float = 1.0) -> _T:
        """Adds ``times`` the other one; ``times=-1`` subtracts it."""
        sums: dict[str, Any] = {}
        for name, own in vars(self).items():
            added = getattr(other, name)
            if isinstance(own, Mapping):
                keys = {**own, **added}
                sums[name] = {key: own.get(key, 0.0) + times * added.get(key, 0.0) for key in keys}
            else:
                sums[name] = own + times * added
        return type(self)(**sums)

    @classmethod
    def sum(cls: type[_T], items: Iterable[_T]) -> _T:
        """Adds up any number of them."""
        return reduce(cls.plus, items, cls())


@dataclass(frozen=True, kw_only=True)
class StepCost(Summable):
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
