"""Keeps memory that one stream allocated until another stream is done with it.

The allocator gives freed memory back to the stream that it was made on. Where another stream may
still use it, as when TorchRec's pipelines look up on one stream and compute on another, it must be
recorded for that stream. On the CPU there is one order of everything, and nothing here does
anything.
"""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor

__all__ = ["keep_for_current_stream"]

_Optional = TypeVar("_Optional", Tensor, Tensor | None)


def keep_for_current_stream(tensor: _Optional) -> _Optional:
    """Keeps a tensor's memory until what the current stream has queued by its end is done.

    Args:
        tensor: Any; ``None`` = nothing to keep.

    Returns:
        The tensor.
    """
    if tensor is not None and (stream := _current_stream(tensor.device)) is not None:
        tensor.record_stream(stream)
    return tensor


def _current_stream(device: torch.device) -> torch.Stream | None:
    """``None`` = the device has no streams."""
    if device.type == "cpu":
        return None
    stream: torch.Stream = torch.get_device_module(device).current_stream()
    return stream
