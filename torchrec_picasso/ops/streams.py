"""Memory and rows that two device streams use: kept long enough, read after their last write.

TorchRec's pipelines look up on one stream and compute on another. The allocator returns freed
memory to the stream that allocated it, so a tensor must be recorded for any other stream that uses
it. Rows are written on the stream of backward, and nothing else orders a lookup on another stream
after that write. The CPU has a single order of operations, so the functions here do nothing there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import is_dataclass
from functools import lru_cache
from typing import Any, TypeVar

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

_Kept = TypeVar("_Kept")
_Optional = TypeVar("_Optional", Tensor, Tensor | None)


def keep_for_current_stream(tensor: _Optional) -> _Optional:
    """Keeps a tensor's memory until the work that the current stream has queued is done."""
    if tensor is not None and (stream := _current_stream(tensor.device)) is not None:
        tensor.record_stream(stream)
    return tensor


def kept_by_stream(make: Callable[..., _Kept], maxsize: int | None = 16) -> Callable[..., _Kept]:
    """Keeps the last results of a function of a device and hashable arguments, for constants that
    steps need again. Each stream that asks has its own, so none reads what another one writes."""
    kept = lru_cache(maxsize)(lambda stream, device, *given: make(device, *given))
    return lambda device, *given: kept(_current_stream(device), device, *given)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yields every tensor in dataclasses, dicts and sequences, and those of a KeyedJaggedTensor."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, KeyedJaggedTensor):
        found = (value.values(), value.lengths(), value.weights_or_none(), value.offsets_or_none())
        yield from tensors_in(found)
    elif isinstance(value, list | tuple):
        for member in value:
            yield from tensors_in(member)
    elif isinstance(value, dict):
        yield from tensors_in(list(value.values()))
    elif is_dataclass(value):
        yield from tensors_in(vars(value))


class WriteOrder:
    """The event of the last write of rows, for later readers; ``device`` is that of the rows."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._written: torch.Event | None = None

    def has_written(self) -> None:
        """Records that the current stream wrote."""
        if (stream := _current_stream(self._device)) is not None:
            self._written = stream.record_event()

    def before_reading(self) -> None:
        """Makes the current stream wait for the last write. Writers call this method too."""
        stream = _current_stream(self._device)
        if stream is not None and self._written is not None:
            stream.wait_event(self._written)


def _current_stream(device: torch.device) -> torch.Stream | None:
    """Returns the current stream; ``None`` if the device has no streams."""
    if device.type == "cpu":
        return None
    return torch.get_device_module(device).current_stream()
