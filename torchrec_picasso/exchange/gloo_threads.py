"""gloo's threads, a little less urgent than the thread that trains.

A thread of gloo's moves what its sockets are ready for. Woken on the core of the thread that
trains, it takes that core at once; and where it was woken by the answer to a message that is just
being posted, the connection's lock is held by the thread it took the core from. It then asks for
the lock again and again until its time slice is over: 3 ms for an exchange of a few bytes (gloo of
torch 2.13, Linux 6.18, one core for both). A step of 8 micro-batches has some twenty exchanges.

Being less urgent, it waits until the thread that trains waits itself or has used up its own slice.
Its share of a core that both want all the time is then a quarter, not a half; on a core of its own
nothing changes.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

__all__ = ["let_training_go_first"]

_NAME = "gloo_tcp_loop"
_NICE = 5
"""More frees more of the core, and leaves the wire idle where the wire decides."""
_MOST_NICE = 19


def let_training_go_first() -> None:
    """Makes gloo's threads of this process nicer than the calling thread, unless they are already.

    On systems without ``/proc``, or where it is not allowed, they stay as they are.
    """
    if sys.platform != "linux":
        return
    nice = min(_MOST_NICE, os.getpriority(os.PRIO_PROCESS, 0) + _NICE)
    for thread in _threads():
        with contextlib.suppress(OSError):  # it has just ended, or may not be changed
            if os.getpriority(os.PRIO_PROCESS, thread) < nice:
                os.setpriority(os.PRIO_PROCESS, thread, nice)


def _threads() -> Iterator[int]:
    """gloo's threads, by id."""
    for folder in Path("/proc/self/task").glob("*"):
        with contextlib.suppress(OSError):
            if (folder / "comm").read_text().strip() == _NAME:
                yield int(folder.name)
