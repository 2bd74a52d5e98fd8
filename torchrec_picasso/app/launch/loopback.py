"""What the kernel counted on the loopback interface: a witness for the byte meter."""

from __future__ import annotations

from pathlib import Path

__all__ = ["loopback_sent_bytes"]

_COUNTERS = Path("/proc/net/dev")
_SENT_BYTES_FIELD = 8  # after the colon: 8 receive fields, then bytes sent


def loopback_sent_bytes() -> int | None:
    """Bytes that all processes of this network namespace sent over ``lo`` since it came up.

    Protocol headers are included.

    Returns:
        The count, or ``None`` on a system without that file.
    """
    if not _COUNTERS.is_file():
        return None
    for line in _COUNTERS.read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == "lo":
            return int(counters.split()[_SENT_BYTES_FIELD])
    return None
