"""A progress bar on a terminal, a line now and then elsewhere, nothing on other ranks."""

from __future__ import annotations

import sys
import threading
import time

from tqdm import tqdm

__all__ = ["Progress"]

_SECONDS_BETWEEN_LINES = 10.0


class Progress:
    """Shows how far a long piece of work is, on stderr.

    Args:
        label: What is being done.
        total: Steps in all.
        shown: Whether this process speaks; one rank of a group does.
    """

    def __init__(self, label: str, total: int, shown: bool = True) -> None:
        self._label = label
        self._total = total
        self._done = 0
        self._facts = ""
        self._shown = shown
        self._on_terminal = shown and sys.stderr.isatty()
        self._prints_lines = shown and not self._on_terminal
        self._last_line_s = time.monotonic()
        tqdm.set_lock(threading.RLock())  # its default lock outlives a rank that is ended
        self._bar = tqdm(
            total=total, desc=label, unit="step", file=sys.stderr, disable=not self._on_terminal
        )

    def advance(self, num_steps: int = 1) -> None:
        """Counts finished steps."""
        self._done += num_steps
        self._bar.update(num_steps)
        now_s = time.monotonic()
        if self._prints_lines and now_s - self._last_line_s >= _SECONDS_BETWEEN_LINES:
            self._last_line_s = now_s
            facts = f", {self._facts}" if self._facts else ""
            print(f"{self._label}: step {self._done} of {self._total}{facts}", file=sys.stderr)

    def tell(self, facts: str) -> None:
        """Shows facts behind the bar, such as the newest loss."""
        self._facts = facts
        self._bar.set_postfix_str(facts)

    def say(self, line: str) -> None:
        """Prints a line on stdout without tearing the bar."""
        if self._shown:
            tqdm.write(line, file=sys.stdout)
            sys.stdout.flush()

    def close(self) -> None:
        """Leaves the last state of the bar on the screen."""
        self._bar.close()
