"""The stream on which the ids of later batches are made ready, beside the one that computes.

Ids cannot be exchanged without asking the device how many there are. On the computing stream each
such question would wait for everything that is queued there, and the device would then wait for the
host. On a stream of their own they wait for the batch's copy, for kernels on integers and for
exchanges of ids. What is made there is handed over once per batch: the computing stream waits for
it, and its memory is not used anew before the computing stream is done with it.

On the CPU there is one order of everything, and nothing here does anything.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from torchrec_picasso._torchrec import wait_for_batch
from torchrec_picasso.batches.split import children_of

__all__ = ["IdStream"]


class IdStream:
    """A stream of its own for ids, or none.

    Args:
        stream: The stream; ``None`` = the device has none.
        copy_stream: The stream on which batches are copied to the device.
    """

    def __init__(self, stream: torch.Stream | None, copy_stream: torch.Stream | None) -> None:
        self._stream = stream
        self._copy_stream = copy_stream

    def working(self) -> AbstractContextManager[Any]:
        """Within it, kernels go to this stream."""
        if self._stream is None:
            return nullcontext()
        return torch.get_device_module(self._stream.device).stream(self._stream)

    def take_batch(self, batch: Any) -> None:
        """Has this stream wait for the copy of a batch. Call it while :meth:`working`."""
        wait_for_batch(batch, self._copy_stream)

    def take_over(self, tensors: Iterable[Tensor]) -> None:
        """Gives what outlives a batch to this stream. Call it while not :meth:`working`.

        Args:
            tensors: Tensors made on the computing stream, which this one is to read.
        """
        if self._stream is None:
            return
        self._stream.wait_stream(torch.get_device_module(self._stream.device).current_stream())
        for tensor in tensors:
            tensor.record_stream(self._stream)

    def hand_over(self, batches: Iterable[Any], tensors: Iterable[Tensor]) -> None:
        """Gives what was made here to the computing stream. Call it while not :meth:`working`.

        Args:
            batches: Batches that this stream took or cut.
            tensors: Tensors made on this stream.
        """
        if self._stream is None:
            return
        computing = torch.get_device_module(self._stream.device).current_stream()
        computing.wait_stream(self._stream)
        for value in (*batches, *tensors):
            _record(value, computing)


def _record(value: Any, stream: torch.Stream) -> None:
    """Keeps the memory of everything in a tensor or a batch until a stream is done with it."""
    if hasattr(value, "record_stream"):
        value.record_stream(stream)
        return
    for _, member in children_of(value) or ():
        _record(member, stream)
