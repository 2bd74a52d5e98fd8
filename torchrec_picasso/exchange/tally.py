"""Communication of this rank, counted inside :func:`tallied`: bytes sent, and time waited.

Only exchanges of this package are counted, by the bandwidth-optimal algorithm of each;
:mod:`.meter` counts all collectives the same way. Outside :func:`tallied` a note costs one check of
a list.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

__all__ = ["WireTally", "is_watched", "note_all_reduce", "note_sent", "note_waited", "tallied"]


@dataclass
class WireTally:
    """Communication counts of one rank."""

    sent_bytes: int = 0
    """Bytes sent to other ranks."""
    waited_s: float = 0.0
    """Seconds that the host waited for exchanges, without the waiting time of an accelerator."""


_watching: list[WireTally] = []


@contextmanager
def tallied() -> Iterator[WireTally]:
    """Context in which sent bytes and waiting time are counted."""
    tally = WireTally()
    _watching.append(tally)
    try:
        yield tally
    finally:
        _watching.remove(tally)


def is_watched() -> bool:
    """Whether any :func:`tallied` context is active."""
    return bool(_watching)


def note_sent(num_bytes: int) -> None:
    """Adds bytes sent to other ranks."""
    for tally in _watching:
        tally.sent_bytes += num_bytes


def note_all_reduce(num_bytes: int, world_size: int) -> None:
    """Adds the bytes that a rank sends in a ring all-reduce: reduce-scatter, then all-gather."""
    note_sent(2 * (world_size - 1) * num_bytes // world_size)


def note_waited(seconds: float) -> None:
    """Adds seconds of waiting."""
    for tally in _watching:
        tally.waited_s += seconds
