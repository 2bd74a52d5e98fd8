"""How gloo words the loss of a peer: a consequence of another rank's end, not a cause."""

from __future__ import annotations

__all__ = ["tells_of_torn_connection"]

_WORDS = ("closed by peer", "reset by peer", "broken pipe", "pair closure")


def tells_of_torn_connection(text: str) -> bool:
    """Whether an error's text or traceback tells that a connection ended."""
    text = text.lower()
    return any(words in text for words in _WORDS)
