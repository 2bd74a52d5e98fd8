"""A loopback that is held to a rate, in a network namespace that needs no privileges.

``unshare`` makes the namespace, and a user namespace that owns it; a shell inside shapes the
loopback with ``tc`` and stays until its input ends, so nothing outlives this process. Ranks move
into both namespaces before they have threads or sockets.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

_UNSHARE = ("unshare", "--map-root-user", "--net", "sh", "-c")
_MIN_BURST_BYTES = 128 << 10  # a packet of the loopback has up to 64 KiB


class NamespaceError(RuntimeError):
    """This machine makes no network namespace with a shaped loopback; the message says why."""


@dataclass(frozen=True)
class EnterNamespace:
    """Moves a rank into the namespaces of another process; picklable, for ``run_ranks``.

    Args:
        pid: The other process.
    """

    pid: int

    def __call__(self, rank: int) -> None:
        """Enters the user namespace first, which gives the right to enter the other."""
        for kind in ("user", "net"):
            enter_namespace(f"/proc/{self.pid}/ns/{kind}")


@contextlib.contextmanager
def shaped_loopback(rate_mbit: float, ranks: int) -> Iterator[EnterNamespace]:
    """Makes a loopback that ranks share; it is gone at the end of the context.

    Args:
        rate_mbit: Rate of each rank, Mbit/s.
        ranks: Number of ranks, which all send over the one loopback.

    Yields:
        ``on_start`` of ``run_ranks``.

    Raises:
        NamespaceError: If ``unshare`` or ``tc`` is not installed or not permitted.
    """
    bits = int(rate_mbit * 1e6) * ranks
    burst = max(_MIN_BURST_BYTES, bits // 8000)  # what passes at once: 1 ms
    shape = (
        "PATH=$PATH:/usr/sbin:/sbin; ip link set dev lo up && "
        f"tc qdisc add dev lo root tbf rate {bits}bit burst {burst}b latency 50ms"
    )
    command = (*_UNSHARE, f"{shape} && echo && exec cat")
    pipe = subprocess.PIPE
    try:
        shell = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
    except OSError as error:
        raise NamespaceError(f"{_UNSHARE[0]}: {error.strerror}") from error
    with shell:  # closes the shell's input and waits for its end
        assert shell.stdout is not None
        assert shell.stderr is not None
        if not shell.stdout.readline():
            raise NamespaceError(shell.stderr.readline().strip() or "it failed without a message")
        yield EnterNamespace(shell.pid)


def enter_namespace(path: str) -> None:
    """Moves the calling thread, and the threads and processes that it starts later.

    Raises:
        OSError: If the namespace is gone, or this process may not enter it.
    """
    with open(path, "rb") as namespace:
        call_libc("setns", namespace.fileno(), 0)


def call_libc(name: str, *args: int) -> None:
    """Calls a function of the C library that returns 0 or sets ``errno``; ``os`` has ``setns`` and
    ``unshare`` from Python 3.12 on.

    Raises:
        OSError: If the function fails, or the system has none of this name.
    """
    function = getattr(ctypes.CDLL(None, use_errno=True), name, None)
    if function is None:
        raise OSError(errno.ENOSYS, f"this system has no {name}()")
    if function(*args):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
