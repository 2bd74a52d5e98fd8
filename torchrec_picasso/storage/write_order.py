"""Orders reads of rows after their last write if two device streams could race.

Rows are written on the stream of backward, where gradients are. TorchRec's pipelines may look up
the next batch on another stream, and nothing else orders the two streams. The CPU has a single
order of operations, so the functions here do nothing there.
"""

from __future__ import annotations

import torch

__all__ = ["WriteOrder"]


class WriteOrder:
    """The event of the last write, for later readers.

    Args:
        device: Device of the rows.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._written: torch.Event | None = None

    def has_written(self) -> None:
        """Records that the current stream wrote."""
        if self._device.type != "cpu":
            self._written = self._current_stream().record_event()

    def before_reading(self) -> None:
        """Makes the current stream wait for the last write. Writers call this method too."""
        if self._written is not None:
            self._current_stream().wait_event(self._written)

    def _current_stream(self) -> torch.Stream:
        stream: torch.Stream = torch.get_device_module(self._device).current_stream()
        return stream
