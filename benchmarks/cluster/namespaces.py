"""A network namespace without a name: it lives as long as a file descriptor of this process.

``ip netns add`` would leave its namespaces behind when their maker is killed. A descriptor cannot:
the kernel closes it with the process, however that ends, and takes the namespace and its links
with it. Nor can two clusters collide, there being no names. The price: to look inside from a shell,
``nsenter --net=/proc/PID/fd/FD``.
"""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from torchrec_picasso.app.launch import shaped_loopback
from torchrec_picasso.app.launch.shaped_loopback import call_libc

_CLONE_NEWNET, _CLONE_NEWUTS = 0x40000000, 0x04000000
_OWN_NAMESPACE = "/proc/thread-self/ns/net"
_ADMIN_FOLDERS = ("/usr/sbin", "/sbin")  # where iproute2 is, and the PATH of many users is not

_Result = TypeVar("_Result")


class ClusterError(RuntimeError):
    """The emulated cluster cannot be made or entered; the message says what to do."""


class Namespace:
    """A new network namespace, empty but for its loopback device.

    Raises:
        ClusterError: If this process may not make one, or this is not Linux.
    """

    def __init__(self) -> None:
        self._file = _in_thread(_new_namespace)

    @property
    def path(self) -> str:
        """Where other processes, and ``ip``, find it while this process keeps it."""
        return f"/proc/{os.getpid()}/fd/{self._file}"

    def run(self, *command: str) -> str:
        """Runs a command inside and returns what it printed.

        Raises:
            ClusterError: If it is not installed, or fails; the message ends in its own words.
        """

        def enter_and_run() -> str:
            enter_namespace(self.path)
            return _output(command)

        return _in_thread(enter_and_run)

    def close(self) -> None:
        """Gives it up; it goes, links and all, once no process is left inside."""
        os.close(self._file)


def enter_namespace(path: str) -> None:
    """Moves the calling thread, and whatever threads and processes it starts later.

    Raises:
        ClusterError: If the namespace is gone, or this process may not enter it.
    """
    try:
        shaped_loopback.enter_namespace(path)
    except OSError as error:
        raise ClusterError(
            f"cannot enter the network namespace {path}: {error.strerror}; run as root, while the "
            "process that made it keeps it"
        ) from error


def leave_host_name() -> None:
    """Gives the calling thread, and what it starts later, a host name that may be changed."""
    call_libc("unshare", _CLONE_NEWUTS)


def tool_path(name: str) -> str:
    """Where a tool of iproute2 is: on the PATH, else where administrators' tools are.

    Raises:
        ClusterError: If it is in none of them.
    """
    folders = filter(None, (*os.environ.get("PATH", "").split(os.pathsep), *_ADMIN_FOLDERS))
    found = shutil.which(name, path=os.pathsep.join(folders))
    if found is None:
        raise ClusterError(f"{name!r} is not installed; install iproute2")
    return found


def _new_namespace() -> int:
    try:
        call_libc("unshare", _CLONE_NEWNET)
        return os.open(_OWN_NAMESPACE, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise ClusterError(
            f"cannot make a network namespace: {error.strerror}; "
            + ("run as root" if error.errno == errno.EPERM else "it takes a Linux that allows them")
        ) from error


def _in_thread(work: Callable[[], _Result]) -> _Result:
    """Runs ``work`` in a thread of its own: a namespace is a thread's, so the caller stays put."""
    with ThreadPoolExecutor(max_workers=1) as thread:
        return thread.submit(work).result()


def _output(command: tuple[str, ...]) -> str:
    found = (tool_path(command[0]), *command[1:])
    done = subprocess.run(found, capture_output=True, text=True, check=False)
    if done.returncode:
        words = " ".join((done.stderr or done.stdout).split()) or f"exit code {done.returncode}"
        raise ClusterError(f"`{' '.join(command)}` failed: {words}")
    return done.stdout
