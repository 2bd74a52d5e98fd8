"""Reports to each rank why a peer does not answer, through the process group's store.

A rank whose peer has failed only sees a broken connection, or nothing until a timeout. So a rank
that fails writes its error message into the store before it ends, and a rank whose exchange broke
writes the operation that it waited in. A rank without an entry hangs, or was ended from outside.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import torch.distributed as dist

from torchrec_picasso.errors import PeerError

_PREFIX = "picasso/failed/"
_GRACE_S = 1.0  # for entries of peers whose exchanges broke as well
_POLL_S = 0.02
# gloo has no exception type of its own. Most messages begin with their place in its source.
_GLOO_ERROR = re.compile(
    r"\[\S.*\bgloo/\S+\.(cc|h):\d+\]"
    "|Application timeout caused pair closure|Connection closed by peer"
)


class Peers:
    """The other ranks of a process group, in case of a failure. For a group without a store, errors
    only name this rank's wait."""

    def __init__(self, pg: dist.ProcessGroup) -> None:
        self._rank, self._size = pg.rank(), pg.size()
        self._has_entry = True  # an earlier pipeline of the group may have one
        self._store: dist.Store | None = None
        with suppress(RuntimeError):
            self._store = pg.get_group_store()

    @contextmanager
    def propagate_errors(self, doing: Callable[[], str]) -> Iterator[None]:
        """Context of a collective operation: an error inside names the rank that caused it.

        ``doing`` describes this rank's current operation. Raises PeerError if another rank failed,
        with its message, or does not answer.
        """
        if self._has_entry and self._store is not None:  # it continued: its entry is outdated
            with suppress(RuntimeError):
                self._store.delete_key(f"{_PREFIX}{self._rank}")
        self._has_entry = False
        try:
            yield
        except (PeerError, StopIteration):
            raise
        except Exception as error:
            # A broken exchange is a symptom: look for its cause. Any other error is a cause: report
            # it.
            is_of_gloo = type(error) is RuntimeError and _GLOO_ERROR.match(str(error))
            if is_of_gloo or isinstance(error, dist.DistError):
                raise PeerError(self._why(doing(), error)) from error
            self._write_entry(f"{doing()}: {type(error).__name__}: {error}", has_failed=True)
            raise

    def _why(self, doing: str, error: Exception) -> str:
        """Describes what is known of the peers after an exchange broke."""
        self._write_entry(doing, has_failed=False)
        until_s = time.monotonic() + _GRACE_S
        while True:
            # Poll until all peers have an entry, one of them failed, or the grace period is over.
            entries = self._read_entries()
            for rank, (text, has_failed) in entries.items():
                if has_failed:
                    return f"rank {rank} failed in {text}"
            silent = sorted(set(range(self._size)) - {self._rank, *entries})
            if not silent or time.monotonic() > until_s:
                break
            time.sleep(_POLL_S)
        reason = (str(error).strip().splitlines() or [repr(error)])[0]
        found = [f"rank {self._rank} got no answer in {doing} ({reason})"]
        found += [f"rank {rank} waited in {text}" for rank, (text, _) in sorted(entries.items())]
        if len(silent) > 1:  # by host, a rank may wait for one whose own exchange broke
            ranks = ", ".join(map(str, silent))
            found.append(f"ranks {ranks} said nothing: at least one of them hangs or was ended")
        elif silent:
            found.append(f"rank {silent[0]} said nothing: it hangs or was ended")
        else:
            found.append("a link between them is down, or they are not in the same step")
        return "; ".join(found)

    def _write_entry(self, text: str, has_failed: bool) -> None:
        """Writes this rank's entry into the store, unless it already has one."""
        self._has_entry = True
        key = f"{_PREFIX}{self._rank}"
        try:
            if self._store is not None and not self._store.check([key]):
                self._store.set(key, json.dumps([text, has_failed]))
        except (dist.DistError, RuntimeError):
            self._store = None  # the store ended with the rank that hosted it

    def _read_entries(self) -> dict[int, tuple[str, bool]]:
        """Reads the entries of the other ranks: text, and whether the rank failed."""
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
