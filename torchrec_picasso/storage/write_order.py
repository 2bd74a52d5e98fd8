"""Orders reads of rows after their last write where streams of a device could race for them.

Rows are written where gradients are: on the stream of backward. TorchRec's pipelines may look up
the next batch on another stream, and nothing else orders the two. On the CPU there is one order of
everything, and nothing here does anything.
"""

from __future__ import annotations

import torch

__all__ = ["WriteOrder"]


class WriteOrder:
    """Who wrote last, for those who read next.

    Args:
        device: Where the rows are.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._written: torch.Event | None = None

    def has_written(self) -> None:
        """Notes that the current stream wrote."""
        if self._device.type != "cpu":
            self._written = self._current_stream().record_event()

    def before_reading(self) -> None:
        """Has the current stream wait for the last write. Writers wait alike."""
        if self._written is not None:
            self._current_stream().wait_event(self._written)

    def _current_stream(self) -> torch.Stream:
        stream: torch.Stream = torch.get_device_module(self._device).current_stream()
        return stream
