"""Python as a user starts it, and waiting for what other processes do."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from tests.support.packaging import ROOT

TIMEOUT_S = 120.0


def environment(*before: Path) -> dict[str, str]:
    """Of a process that imports this checkout, after what lies in other folders."""
    path = os.pathsep.join(map(str, (*before, ROOT)))
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


def run_python(*argv: str, before: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Python with these arguments, and what it said."""
    return subprocess.run(
        [sys.executable, *argv],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        env=environment(*[] if before is None else [before]),
        check=False,
    )


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float = 60.0) -> None:
    until_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < until_s, f"not within {timeout_s:g} s: {what}"
        time.sleep(0.02)
