"""Progress of a long task: a bar on a terminal, else a line every 10 seconds."""

from __future__ import annotations

import sys
import threading
import time

from tqdm import tqdm

_SECONDS_BETWEEN_LINES = 10.0


class Progress:
    """Shows progress on stderr.

    Args:
        label: Name of the task.
        total: Number of steps.
        shown: Whether this process prints; one rank of a group does.
    """

    def __init__(self, label: str, total: int, shown: bool = True) -> None:
        self._label = label
        self._total = total
        self._done = 0
        self._status = ""
        self._shown = shown
        self._on_terminal = shown and sys.stderr.isatty()
        self._prints_lines = shown and not self._on_terminal
        self._last_line_s = time.monotonic()
        tqdm.set_lock(threading.RLock())  # the default lock outlives a killed rank
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
            status = f", {self._status}" if self._status else ""
            print(f"{self._label}: step {self._done} of {self._total}{status}", file=sys.stderr)

    def tell(self, status: str) -> None:
        """Shows a status behind the bar, such as the newest loss."""
        self._status = status
        self._bar.set_postfix_str(status)

    def say(self, line: str) -> None:
        """Prints a line on stdout, above the bar."""
        if self._shown:
            tqdm.write(line, file=sys.stdout)
            sys.stdout.flush()

    def close(self) -> None:
        """Closes the bar; its last state stays on the screen."""
        self._bar.close()
