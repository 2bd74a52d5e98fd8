"""Times steps without holding the device up.

On the CPU a step has ended when it returns. On a device the host runs ahead: asking for the time
there would wait for the device after every step, and another setting would win than without asking.
So events are left in the stream, and read once a turn of several steps has ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import Any

import torch

__all__ = ["StepClock"]


class StepClock:
    """Gives stamps, and the seconds between them.

    Args:
        device: Where steps run.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def stamp(self) -> Any:
        """Marks this moment."""
        if self._device.type == "cpu":
            return perf_counter()
        event = torch.Event(self._device, enable_timing=True)
        event.record(torch.get_device_module(self._device).current_stream())
        return event

    def seconds(self, spans: Sequence[tuple[Any, Any]]) -> list[float]:
        """Seconds of each span from a stamp to a later one; waits for the last of them."""
        if self._device.type == "cpu":
            return [end - start for start, end in spans]
        if spans:
            spans[-1][1].synchronize()
        return [start.elapsed_time(end) / 1e3 for start, end in spans]
