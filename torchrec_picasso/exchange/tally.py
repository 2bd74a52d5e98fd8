"""What exchanges cost this rank, counted while somebody watches: bytes sent, and time waited.

Bytes are those of the exchanges of this package, by the bandwidth-optimal algorithm of each, as
:mod:`.meter` counts those of anybody. While nobody watches, a note costs one look at a list.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

__all__ = ["WireTally", "is_watched", "note_sent", "note_waited", "tallied"]


@dataclass
class WireTally:
    """Counts of one rank."""

    sent_bytes: int = 0
    """Bytes for other ranks."""
    waited_s: float = 0.0
    """Seconds that the host waited for exchanges; what an accelerator waits is not among them."""


_watching: list[WireTally] = []


@contextmanager
def tallied() -> Iterator[WireTally]:
    """Within it, what is sent and waited for is counted."""
    tally = WireTally()
    _watching.append(tally)
    try:
        yield tally
    finally:
        _watching.remove(tally)


def is_watched() -> bool:
    """Whether anybody counts."""
    return bool(_watching)


def note_sent(num_bytes: int) -> None:
    """Counts bytes for other ranks."""
    for tally in _watching:
        tally.sent_bytes += num_bytes


def note_waited(seconds: float) -> None:
    """Counts seconds of waiting."""
    for tally in _watching:
        tally.waited_s += seconds
