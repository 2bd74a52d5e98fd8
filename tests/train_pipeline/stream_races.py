"""Finds uses of memory that two streams would race for, on the CPU, where there are no streams.

Streams of a device that is not there are told apart by name only: everything still runs in program
order. But every operator passes by here, so for each memory block it is known on which stream it
was made and last written, which stream has waited for which, and for which streams the block was
recorded. From that follows what a device could have got wrong: an operator that reads what another
stream may not have written yet, or memory that the allocator may have given away meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["RaceDetector"]

_CUDA = 1


@dataclass
class _Block:
    """A memory block that was made while the detector watched."""

    reference: StorageWeakRef
    made_on: int
    written_on: int
    written_at: int
    recorded_for: set[int] = field(default_factory=set)


class RaceDetector(TorchDispatchMode):
    """Watches what runs within it."""

    def __init__(self) -> None:
        super().__init__()
        self.computing = _NamedStream(self, 0)
        self.beside = _NamedStream(self, 1)
        self.copying = _NamedStream(self, 2)
        self.races: set[str] = set()
        self.num_ops = {stream.stream_id: 0 for stream in (self.computing, self.beside)}
        self._current: torch.Stream = self.computing
        self._blocks: dict[int, _Block] = {}
        self._time = 0
        self._waited: dict[tuple[int, int], int] = {}

    # -- the device's module, as far as pipelines use it ---------------------------------------

    def current_stream(self) -> torch.Stream:
        return self._current

    @contextmanager
    def stream(self, stream: torch.Stream) -> Iterator[None]:
        before, self._current = self._current, stream
        try:
            yield
        finally:
            self._current = before

    @contextmanager
    def in_place_of_the_device(self) -> Iterator[None]:
        """Whoever asks for CUDA's module gets this."""
        original = torch.get_device_module

        def module_of(device: Any = None) -> Any:
            is_ours = device is not None and torch.device(device).type == "cuda"
            return self if is_ours else original(device)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch, "get_device_module", module_of)
            yield

    def note_wait(self, waiting: int, waited_for: int) -> None:
        self._waited[waiting, waited_for] = self._time

    # ------------------------------------------------------------------------------------------

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self._time += 1
        stream = self._current.stream_id
        self.num_ops[stream] += 1
        if func is torch.ops.aten.record_stream.default:
            tensor, recorded = args
            block = self._block(tensor)
            if block is not None:
                block.recorded_for.add(recorded.stream_id)
            return None
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if not func.is_view:
            for tensor in inputs:
                self._check_use(tensor, stream, str(func))
        outputs = func(*args, **(kwargs or {}))
        for tensor in _written(func, args, inputs):
            block = self._block(tensor)
            if block is not None:
                block.written_on, block.written_at = stream, self._time
        for tensor in tree_leaves(outputs):
            if isinstance(tensor, Tensor) and self._block(tensor) is None:
                shared = any(_storage(tensor) == _storage(other) for other in inputs)
                if not shared:  # else it was made before the detector watched
                    reference = StorageWeakRef(tensor.untyped_storage())
                    self._blocks[_storage(tensor)] = _Block(reference, stream, stream, self._time)
        return outputs

    def _block(self, tensor: Tensor) -> _Block | None:
        block = self._blocks.get(_storage(tensor))
        return None if block is None or block.reference.expired() else block

    def _check_use(self, tensor: Tensor, stream: int, name: str) -> None:
        block = self._block(tensor)
        if block is None:
            return
        waited_at = self._waited.get((stream, block.written_on), -1)
        if stream != block.written_on and waited_at < block.written_at:
            self.races.add(f"{name} on stream {stream} does not wait for {block.written_on}")
        if stream != block.made_on and stream not in block.recorded_for:
            self.races.add(f"{name} uses memory of {block.made_on} not recorded for {stream}")


class _NamedStream(torch.Stream):
    """A stream of a device that is not there."""

    def __new__(cls, detector: RaceDetector, stream_id: int) -> _NamedStream:
        return super().__new__(cls, stream_id=stream_id, device_index=0, device_type=_CUDA)

    def __init__(self, detector: RaceDetector, stream_id: int) -> None:
        self._detector = detector

    def wait_stream(self, stream: torch.Stream) -> None:
        self._detector.note_wait(self.stream_id, stream.stream_id)


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _written(func: Any, args: Any, inputs: list[Tensor]) -> list[Tensor]:
    """The inputs that an operator writes; all of a collective's, whose schema does not tell."""
    if func.namespace == "c10d":
        return inputs
    arguments = func._schema.arguments
    return [
        value
        for argument, value in zip(arguments, args)
        if argument.alias_info is not None and argument.alias_info.is_write
        if isinstance(value, Tensor)
    ]
