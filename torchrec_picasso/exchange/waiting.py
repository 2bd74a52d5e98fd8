"""Waits for exchanges, and counts what the exchanges of this package send and receive.

All waits are here, so a profile shows exposed communication: the profiler records when a message
was posted but not when Python blocks on it; a named range around the wait records that. Without a
running profiler a range costs one check of a flag; without a :func:`tallied` context a note costs
one check of a list.
"""

from __future__ import annotations

import atexit
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch.autograd.profiler as autograd_profiler

WAIT_RANGE, STEP_RANGE, OP_RANGE = "picasso wait", "picasso step", "picasso op"
"""First words of the names of the profiler ranges of waits, of steps and of operations."""

_EXIT_S = 0.1
"""Time for gloo's threads to release the tensors of the last collectives."""

_NO_RANGE: AbstractContextManager[object] = nullcontext()


def outlast_gloo_threads() -> None:
    """Delays the end of the interpreter, so that gloo's threads can release their tensors first.

    A gloo thread takes the GIL to release a tensor. If the interpreter has begun to end, as when a
    rank exits right after its last collective on a busy host, torch then aborts the process
    (``terminate called without an active exception``; pytorch issue 190489).
    """
    atexit.unregister(_wait_for_gloo_threads)
    atexit.register(_wait_for_gloo_threads)


def _wait_for_gloo_threads() -> None:
    time.sleep(_EXIT_S)


class Pending(Protocol):
    """An operation in progress that can be waited for."""

    def wait(self) -> object:
        """Returns when the operation is done; an accelerator's current stream is ordered after
        it."""


@dataclass
class WireTally:
    """Communication counts of one rank."""

    sent_bytes: int = 0
    """Bytes sent to other ranks, as by the usual bandwidth-optimal algorithm of each collective;
    protocol headers are not counted."""
    received_bytes: int = 0
    """The same of bytes received from other ranks."""
    waited_s: float = 0.0
    """Seconds that the host waited for exchanges, without the waiting time of an accelerator."""


_watching: list[WireTally] = []


@contextmanager
def tallied() -> Iterator[WireTally]:
    """Context in which bytes and waiting time are counted."""
    tally = WireTally()
    _watching.append(tally)
    try:
        yield tally
    finally:
        _watching.remove(tally)


def is_watched() -> bool:
    """Whether any :func:`tallied` context is active."""
    return bool(_watching)


def note_bytes(sent: int, received: int) -> None:
    """Adds bytes sent to other ranks, and those received from them."""
    for tally in _watching:
        tally.sent_bytes += sent
        tally.received_bytes += received


def note_all_reduce(num_bytes: int, world_size: int) -> None:
    """Adds the bytes that a rank sends, and receives as many, in a ring all-reduce: reduce-scatter,
    then all-gather."""
    each_way = 2 * (world_size - 1) * num_bytes // world_size
    note_bytes(each_way, each_way)


def named_range(*name: object) -> AbstractContextManager[object]:
    """Returns a profiler range; the words of its name are joined only while a profiler runs."""
    if not autograd_profiler._is_profiler_enabled:  # a range takes 0.3 to 0.9 us without one
        return _NO_RANGE
    words = " ".join(map(str, name))
    return autograd_profiler.record_function(words)


def wait_for(pending: Pending) -> None:
    """Waits for an operation in progress, inside a named profiler range, and notes the time."""
    with named_range(WAIT_RANGE):
        start = time.perf_counter()
        pending.wait()
        for tally in _watching:
            tally.waited_s += time.perf_counter() - start
