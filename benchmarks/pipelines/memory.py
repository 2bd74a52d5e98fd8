"""The memory that a variant takes at most, of a process that holds all variants."""

from __future__ import annotations

import ctypes
from pathlib import Path

_STATUS, _RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_RESET_PEAK = "5"


class PeakMemory:
    """Bytes of this process above those that it holds now: tables, state, buffers, steps.

    Freed memory is given back to the system first, or one variant would reuse what another has
    left. Only Linux reports these figures.
    """

    def __init__(self) -> None:
        self._before: int | None = None
        if _RESET.exists():
            ctypes.CDLL(None).malloc_trim(0)
            _RESET.write_text(_RESET_PEAK)
            self._before = _status_bytes("VmRSS")

    def read(self) -> int | None:
        """The most that was held so far; ``None`` where the system does not tell."""
        if self._before is None:
            return None
        return max(0, _status_bytes("VmHWM") - self._before)


def _status_bytes(name: str) -> int:
    (line,) = (line for line in _STATUS.read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) << 10
