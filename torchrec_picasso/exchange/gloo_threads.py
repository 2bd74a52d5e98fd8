"""Lowers the scheduling priority of gloo's I/O threads below the training thread's.

A gloo thread moves data when its sockets are ready. If the thread wakes up on the core of the
training thread, it preempts the training thread at once. If the answer to a message that is just
being posted woke it up, the preempted training thread holds the connection's lock. The gloo thread
then retries the lock until its time slice is over: 3 ms for an exchange of a few bytes (gloo of
torch 2.13, Linux 6.18, one core for both). A step of 8 micro-batches has some twenty exchanges.

With a lower priority the gloo thread waits until the training thread blocks or has used its own
slice. On a core that both threads always want, its share is a quarter instead of a half; on a
separate core nothing changes.
"""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

__all__ = ["let_training_go_first"]

_NAME = "gloo_tcp_loop"
_NICE = 5
"""A higher value frees more of the core, but leaves the link idle where communication dominates."""
_MOST_NICE = 19


def let_training_go_first() -> None:
    """Raises the nice value of this process's gloo threads above the calling thread's.

    Threads that are nicer already are not changed. On systems without ``/proc``, or without
    permission, the function does nothing.
    """
    if sys.platform != "linux":
        return
    nice = min(_MOST_NICE, os.getpriority(os.PRIO_PROCESS, 0) + _NICE)
    for folder in Path("/proc/self/task").glob("*"):
        with contextlib.suppress(OSError):  # the thread has ended, or permission is missing
            # gloo names its I/O threads; the name is visible in /proc only.
            is_of_gloo = (folder / "comm").read_text().strip() == _NAME
            thread = int(folder.name)
            if is_of_gloo and os.getpriority(os.PRIO_PROCESS, thread) < nice:
                os.setpriority(os.PRIO_PROCESS, thread, nice)
