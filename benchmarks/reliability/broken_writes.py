"""Files that stop being written at a chosen byte: a full disk, or the end of the process."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn


def disk_is_full() -> NoReturn:
    """Raises the error of a write to a full disk."""
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def kill_me() -> None:
    """Ends this process as ``kill -9`` does."""
    os.kill(os.getpid(), signal.SIGKILL)


@contextmanager
def broken_writes(part: str, room: int, stop: Callable[[], None]) -> Iterator[None]:
    """Within it, files opened for writing by ``Path.open`` take so many bytes and then no more."""
    opened = Path.open
    left = [room]

    def open_limited(path: Path, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        file = opened(path, mode, *args, **kwargs)
        return _Limited(file, left, stop) if "w" in mode and part in path.name else file

    Path.open = open_limited  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        Path.open = opened  # type: ignore[method-assign]


class _Limited:
    def __init__(self, file: Any, left: list[int], stop: Callable[[], None]) -> None:
        self._file, self._left, self._stop = file, left, stop

    def write(self, data: Any) -> int:
        whole = data if isinstance(data, str) else memoryview(data).cast("B")
        self._file.write(whole[: max(0, self._left[0])])
        self._left[0] -= len(whole)
        if self._left[0] < 0:
            self._file.flush()
            self._stop()
        return len(whole)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def __enter__(self) -> _Limited:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)
