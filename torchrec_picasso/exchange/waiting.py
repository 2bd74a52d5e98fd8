"""Waits for exchanges; the only place that does, so a profile shows exposed communication.

The profiler records when a message was posted but not when Python blocks on it; a named range
around the wait records that. Without a running profiler, a range costs one check of a flag.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from time import perf_counter

import torch.autograd.profiler as autograd_profiler

from torchrec_picasso.exchange.all_to_all import Pending
from torchrec_picasso.exchange.tally import note_waited

__all__ = ["OP_RANGE", "STEP_RANGE", "WAIT_RANGE", "named_range", "wait_for"]

WAIT_RANGE = "picasso wait"
"""Name of the profiler ranges in which a rank waits."""

STEP_RANGE, OP_RANGE = "picasso step", "picasso op"
"""First words of the names of the profiler ranges of steps and of operations."""

_NO_RANGE: AbstractContextManager[object] = nullcontext()


def named_range(*name: object) -> AbstractContextManager[object]:
    """Returns a profiler range; the words of its name are joined only while a profiler runs."""
    if not autograd_profiler._is_profiler_enabled:  # a range costs 11 us
        return _NO_RANGE
    range_: AbstractContextManager[object] = autograd_profiler.record_function(
        " ".join(map(str, name))
    )
    return range_


def wait_for(pending: Pending) -> None:
    """Waits for an operation in progress, inside a named profiler range."""
    with named_range(WAIT_RANGE):
        start = perf_counter()
        pending.wait()
        note_waited(perf_counter() - start)
