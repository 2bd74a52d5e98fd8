"""Keeps memory that one stream allocated until another stream no longer uses it.

The allocator returns freed memory to the stream that allocated it. If another stream may still use
the memory, as when TorchRec's pipelines look up on one stream and compute on another, the tensor
must be recorded for that stream. The CPU has a single order of operations, so the functions here do
nothing there.
"""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor

__all__ = ["keep_for_current_stream"]

_Optional = TypeVar("_Optional", Tensor, Tensor | None)


def keep_for_current_stream(tensor: _Optional) -> _Optional:
    """Keeps a tensor's memory until the work that the current stream has queued is done.

    Args:
        tensor: Any tensor; ``None`` = nothing to keep.

    Returns:
        The tensor.
    """
    if tensor is not None and (stream := _current_stream(tensor.device)) is not None:
        tensor.record_stream(stream)
    return tensor


def _current_stream(device: torch.device) -> torch.Stream | None:
    """Returns the current stream; ``None`` if the device has no streams."""
    if device.type == "cpu":
        return None
    stream: torch.Stream = torch.get_device_module(device).current_stream()
    return stream
