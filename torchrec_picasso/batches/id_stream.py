"""The stream on which ids of later batches are prepared, beside the computing stream.

Ids cannot be exchanged without asking the device how many there are. On the computing stream such a
host sync would wait for everything that is queued there, and the device would then wait for the
host. On a separate stream it waits only for the batch's copy, for kernels on integers and for
exchanges of ids. The results are handed over once per batch: the computing stream waits for them,
and the allocator does not reuse their memory before the computing stream is done with it.

On the CPU all work is in one order, and every method here does nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from torchrec_picasso._torchrec import wait_for_batch
from torchrec_picasso.batches.members import children_of


class IdStream:
    """The stream of ids, and the stream that copies batches."""

    def __init__(self, stream: torch.Stream | None, copy_stream: torch.Stream | None) -> None:
        self.stream = stream
        """The stream of ids; ``None`` = the device has none."""
        self._copy_stream = copy_stream

    def working(self) -> AbstractContextManager[Any]:
        """Context in which kernels are queued on this stream."""
        if self.stream is None:
            return nullcontext()
        return torch.get_device_module(self.stream.device).stream(self.stream)

    def take_batch(self, batch: Any) -> None:
        """Makes this stream wait for the copy of a batch. Call it inside :meth:`working`."""
        wait_for_batch(batch, self._copy_stream)

    def take_over(self, tensors: Iterable[Tensor]) -> None:
        """Makes the computing stream's tensors safe to read here, after their batch has ended too.

        Call it outside :meth:`working`.
        """
        if self.stream is None:
            return
        self.stream.wait_stream(torch.get_device_module(self.stream.device).current_stream())
        for tensor in tensors:
            tensor.record_stream(self.stream)

    def hand_over(self, batches: Iterable[Any], tensors: Iterable[Tensor]) -> None:
        """Makes tensors of this stream, and batches that it took or split, safe to read elsewhere.

        Call it outside :meth:`working`.
        """
        if self.stream is None:
            return
        computing = torch.get_device_module(self.stream.device).current_stream()
        computing.wait_stream(self.stream)
        for value in (*batches, *tensors):
            _record(value, computing)


def _record(value: Any, stream: torch.Stream) -> None:
    """Records a stream on all memory of a tensor or batch, so that it is not reused too early."""
    if hasattr(value, "record_stream"):
        value.record_stream(stream)
        return
    for _, member in children_of(value) or ():
        _record(member, stream)
