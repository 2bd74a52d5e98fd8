"""Times steps without blocking the device.

On the CPU a step has ended when its call returns. On a device the host runs ahead: reading the time
at every step would wait for the device, and a different setting would win. So events are recorded
on the stream, and read after a turn of several steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import Any

import torch

__all__ = ["StepClock"]


class StepClock:
    """Records timestamps and computes the seconds between them.

    Args:
        device: Device that runs the steps.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def stamp(self) -> Any:
        """Returns a timestamp of the current moment on the host (CPU) or the current stream."""
        if self._device.type == "cpu":
            return perf_counter()
        event = torch.Event(self._device, enable_timing=True)
        event.record(torch.get_device_module(self._device).current_stream())
        return event

    def seconds(self, spans: Sequence[tuple[Any, Any]]) -> list[float]:
        """Returns the seconds of each span, a pair of timestamps; waits for the last span."""
        if self._device.type == "cpu":
            return [end - start for start, end in spans]
        # Spans ascend in time, so all earlier events are complete as well.
        if spans:
            spans[-1][1].synchronize()
        return [start.elapsed_time(end) / 1e3 for start, end in spans]
