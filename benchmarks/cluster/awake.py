"""Keeps the cores awake while links are measured.

A virtual core that has nothing to do may sleep, and wake late: links of 1 Gbit/s then carried 29
instead of 105 MB/s of an all-to-all on one and the same machine, in one hour and in the next. A
process on each core that runs only when nothing else wants to (``SCHED_IDLE``) keeps them awake,
and takes no time from other work.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_SPIN = (
    "import os, sys; os.sched_setaffinity(0, {int(sys.argv[1])});"
    "os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0));\n"
    "while os.getppid() == int(sys.argv[2]): sum(range(10_000))\n"
)
"""Ends by itself when its parent process is gone."""


@contextmanager
def cores_awake() -> Iterator[list[int]]:
    """Inside it no core sleeps, where the system can do that (Linux).

    Yields:
        The processes that keep them awake, by id.
    """
    if not hasattr(os, "SCHED_IDLE"):
        yield []
        return
    command = [sys.executable, "-S", "-c", _SPIN]
    spinning = [
        subprocess.Popen([*command, str(core), str(os.getpid())])
        for core in sorted(os.sched_getaffinity(0))
    ]
    try:
        yield [process.pid for process in spinning]
    finally:
        for process in spinning:
            process.kill()
        for process in spinning:
            process.wait()
