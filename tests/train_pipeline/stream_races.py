"""Finds uses of memory that two streams would race for, on the CPU, where there are no streams.

Streams of a device that is not there are told apart by name only: everything still runs in program
order. But every operator passes by here, so for each memory block it is known on which stream it
was made and last written, which stream has waited for which, and for which streams the block was
recorded. From that follows what a device could have got wrong: an operator that reads what another
stream, or an exchange that nobody has waited for, may not have written yet; memory that the
allocator may have given away meanwhile, or while an exchange still sent it. Not looked at: writing
what another stream may still read.
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

from torchrec_picasso.exchange.all_to_all import Ranks
from torchrec_picasso.exchange.waiting import Pending
from torchrec_picasso.ops import streams as device_streams

_CUDA = 1
_WIRE = 3
"""Writes what an exchange receives; nobody knows of it before the exchange was waited for."""


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
        self._seen: set[str] = set()
        self._sent: list[tuple[_Block, int]] = []
        """Memory that exchanges sent, and the stream that waited for each."""
        streams = (self.computing, self.beside, self.copying)
        self.num_ops = {stream.stream_id: 0 for stream in streams}
        self._current: torch.Stream = self.computing
        self._blocks: dict[int, _Block] = {}
        self._time = 0
        # by stream: up to when it knows what each other stream has done
        self._knows: dict[int, dict[int, int]] = {stream.stream_id: {} for stream in streams}

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

        started = Ranks.start_all_to_all

        def start_all_to_all(ranks: Any, output_m: Tensor, input_n: Tensor, *sizes: Any) -> Pending:
            self._check_use(input_n, self._current.stream_id, "all-to-all")
            return self._watch(started(ranks, output_m, input_n, *sizes), output_m, input_n)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch, "get_device_module", module_of)
            patch.setattr(Ranks, "start_all_to_all", start_all_to_all)
            patch.setattr(device_streams, "_current_stream", lambda device: self._current)
            yield

    def _watch(self, pending: Pending, output_m: Tensor, input_n: Tensor) -> Pending:
        if output_m.nbytes < output_m.untyped_storage().nbytes():
            # a slice of rows or gradients; the others' uses look like its own
            return _Watched(self, pending, None, input_n)
        self._note_write(output_m, _WIRE)
        return _Watched(self, pending, output_m, input_n)

    def note_arrival(self, output_m: Tensor | None, input_n: Tensor) -> None:
        if output_m is not None:
            self._note_write(output_m, self._current.stream_id)
        block = self._block(input_n)
        if block is not None and input_n.numel():
            self._sent.append((block, self._current.stream_id))

    @property
    def races(self) -> set[str]:
        """Returns what was found; of what exchanges sent, once they were all waited for."""
        return self._seen | {
            f"all-to-all sends memory of {block.made_on} not recorded for {stream}"
            for block, stream in self._sent
            if stream != block.made_on and stream not in block.recorded_for
        }

    def note_wait(self, waiting: int, done: dict[int, int]) -> None:
        """A stream knows from now on what others have done up to some time."""
        knows = self._knows[waiting]
        for stream, time in done.items():
            knows[stream] = max(knows.get(stream, -1), time)

    def done_by(self, stream: int) -> dict[int, int]:
        """Returns what is done when all is that was queued on a stream, by stream."""
        return {**self._knows[stream], stream: self._time}

    def watch(self, tensor: Tensor) -> None:
        """Looks at memory that was made before, and stays for all streams."""
        reference = StorageWeakRef(tensor.untyped_storage())
        stream = self._current.stream_id
        block = _Block(reference, stream, stream, -1, recorded_for={*self._knows})
        self._blocks[_storage(tensor)] = block

    def note_write(self, tensor: Tensor) -> None:
        """Tells of a write that the operator does not tell of."""
        self._note_write(tensor, self._current.stream_id)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
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
            self._note_write(tensor, stream)
        for tensor in tree_leaves(outputs):
            if isinstance(tensor, Tensor) and self._block(tensor) is None:
                shared = any(_storage(tensor) == _storage(other) for other in inputs)
                if not shared:  # else it was made before the detector watched
                    reference = StorageWeakRef(tensor.untyped_storage())
                    self._blocks[_storage(tensor)] = _Block(reference, stream, stream, self._time)
        return outputs

    def _note_write(self, tensor: Tensor, stream: int) -> None:
        block = self._block(tensor)
        if block is not None:
            block.written_on, block.written_at = stream, self._time

    def _block(self, tensor: Tensor) -> _Block | None:
        block = self._blocks.get(_storage(tensor))
        return None if block is None or block.reference.expired() else block

    def _check_use(self, tensor: Tensor, stream: int, name: str) -> None:
        block = self._block(tensor)
        if block is None or not tensor.numel():
            return
        known = self._knows[stream].get(block.written_on, -1)
        if stream != block.written_on and known < block.written_at:
            self._seen.add(f"{name} on stream {stream} does not wait for {block.written_on}")
        if stream != block.made_on and stream not in block.recorded_for:
            self._seen.add(f"{name} uses memory of {block.made_on} not recorded for {stream}")


class _NamedStream(torch.Stream):
    """A stream of a device that is not there."""

    def __new__(cls, detector: RaceDetector, stream_id: int) -> _NamedStream:
        return super().__new__(cls, stream_id=stream_id, device_index=0, device_type=_CUDA)

    def __init__(self, detector: RaceDetector, stream_id: int) -> None:
        self._detector = detector

    def wait_stream(self, stream: torch.Stream) -> None:
        self._detector.note_wait(self.stream_id, self._detector.done_by(stream.stream_id))

    def record_event(self, event: Any = None) -> dict[int, int]:
        return self._detector.done_by(self.stream_id)

    def wait_event(self, event: dict[int, int]) -> None:
        self._detector.note_wait(self.stream_id, event)


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _written(func: Any, args: Any, inputs: list[Tensor]) -> list[Tensor]:
    """The inputs that an operator writes; all of a collective's, whose schema does not tell."""
    if func.namespace == "c10d":
        return inputs
    return [
        leaf
        for argument, value in zip(func._schema.arguments, args)
        if argument.alias_info is not None and argument.alias_info.is_write
        for leaf in tree_leaves(value)
        if isinstance(leaf, Tensor)
    ]


class _Watched:
    """An exchange whose arrival the detector is told."""

    def __init__(
        self, detector: RaceDetector, pending: Pending, output_m: Tensor | None, input_n: Tensor
    ) -> None:
        self._detector = detector
        self._pending = pending
        self._output_m, self._input_n = output_m, input_n

    def wait(self) -> None:
        self._pending.wait()
        self._detector.note_arrival(self._output_m, self._input_n)
