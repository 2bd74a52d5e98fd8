"""Why a peer does not answer: what a rank that fails leaves in the process group's store.

A rank whose peer has failed only feels a torn connection, or nothing until a timeout. So a rank
that fails writes its own message into the store before it ends, and one that waited in vain writes
where; whoever is left over without a word is the one that hangs, or was ended from outside.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import torch.distributed as dist

from torchrec_picasso.errors import PeerError

__all__ = ["Peers"]

_PREFIX = "picasso/failed/"
_GRACE_S = 1.0  # for peers that wait as well to say so
_POLL_S = 0.02
# gloo has no type of its own for errors. Most begin with their place in its source.
_OF_GLOO = re.compile(
    r"\[\S.*\bgloo/\S+\.(cc|h):\d+\]"
    "|Application timeout caused pair closure|Connection closed by peer"
)


class Peers:
    """The other ranks of a process group, when something fails.

    Args:
        pg: Process group; one without a store still has its waits named.
    """

    def __init__(self, pg: dist.ProcessGroup) -> None:
        self._rank, self._size = pg.rank(), pg.size()
        self._has_told = False
        self._store: dist.Store | None = None
        with suppress(RuntimeError):
            self._store = pg.get_group_store()

    @contextmanager
    def hear_of_failures(self, doing: Callable[[], str]) -> Iterator[None]:
        """Around what all ranks do together.

        Args:
            doing: Says what this rank was at.

        Raises:
            PeerError: Where another rank failed, with its message, or does not answer.
        """
        if self._has_told:  # and goes on: what it told is over
            self._forget()
        try:
            yield
        except (PeerError, StopIteration):
            raise
        except Exception as error:
            if _is_of_transport(error):
                raise PeerError(self._why(doing(), error)) from error
            self._tell(f"{doing()}: {type(error).__name__}: {error}", has_failed=True)
            raise

    def _why(self, doing: str, error: Exception) -> str:
        """What is known of the peers once an exchange broke."""
        self._tell(doing, has_failed=False)
        until_s = time.monotonic() + _GRACE_S
        while True:
            told = self._told()
            for rank, (text, has_failed) in told.items():
                if has_failed:
                    return f"rank {rank} failed in {text}"
            silent = sorted(set(range(self._size)) - {self._rank, *told})
            if not silent or time.monotonic() > until_s:
                break
            time.sleep(_POLL_S)
        reason = (str(error).strip().splitlines() or [repr(error)])[0]
        found = [f"rank {self._rank} waited in vain in {doing} ({reason})"]
        found += [f"rank {rank} waited in {text}" for rank, (text, _) in sorted(told.items())]
        found += [f"rank {rank} said nothing: it hangs or was ended" for rank in silent]
        if not silent:
            found.append("a link between them is down, or they are not in the same step")
        return "; ".join(found)

    def _tell(self, text: str, has_failed: bool) -> None:
        self._has_told = True
        key = f"{_PREFIX}{self._rank}"
        try:
            if self._store is not None and not self._store.check([key]):
                self._store.set(key, json.dumps([text, has_failed]))
        except (dist.DistError, RuntimeError):
            self._store = None  # it ended with the rank that held it

    def _told(self) -> dict[int, tuple[str, bool]]:
        """What the others told."""
        found: dict[int, tuple[str, bool]] = {}
        try:
            for rank in range(self._size):
                key = f"{_PREFIX}{rank}"
                if rank != self._rank and self._store is not None and self._store.check([key]):
                    text, has_failed = json.loads(self._store.get(key))
                    found[rank] = text, has_failed
        except (dist.DistError, RuntimeError):
            self._store = None
        return found

    def _forget(self) -> None:
        self._has_told = False
        if self._store is not None:
            self._store.delete_key(f"{_PREFIX}{self._rank}")


def _is_of_transport(error: Exception) -> bool:
    """Whether an exchange broke, rather than what this rank does with it."""
    if isinstance(error, dist.DistError):
        return True
    return type(error) is RuntimeError and _OF_GLOO.match(str(error)) is not None
