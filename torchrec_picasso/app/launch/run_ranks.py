"""Runs a function on several gloo ranks of this machine; returns the results or the first failure.

A run ends when all ranks answered, one failed, or the deadline passed. Arguments and results are
pickled by value, and the rendezvous is a file, so no port is needed. Ranks are forked from a server
process that has imported TorchRec, so only the first run of a program pays for the import.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch.multiprocessing as mp

import torchrec_picasso
from torchrec_picasso.app.launch.rank_process import (
    STACK_SIGNAL,
    RankFailure,
    rank_main,
    stack_file,
)

PRELOADED = [
    "pandas",
    "torch.distributed.optim",
    "torch.export._trace",  # imported by fake tensors, with which a model is proved
    "torchrec.distributed.fbgemm_qcomm_codec",
]
"""Modules that the server of ranks imports beside this package, so that no rank pays for them; may
be extended before a program's first run."""

_DRAIN_S = 0.5  # after a failure: time for an earlier failure to arrive
_BLAME_S = 5.0  # after a lost connection: time for its cause to arrive
_END_S = 2.0  # between SIGTERM and SIGKILL


class RankError(RuntimeError):
    """A rank of :func:`run_ranks` failed; ``__cause__`` is its exception if it can be pickled.

    Args:
        rank: The rank that failed first.
        what: The failure, one line.
        rank_traceback: Traceback of the rank, or stack if it was still running; may be empty.
    """

    def __init__(self, rank: int, what: str, rank_traceback: str = "") -> None:
        self.rank = rank
        self.what = what
        self.rank_traceback = rank_traceback
        detail = f"\n--- rank {rank} ---\n{rank_traceback.rstrip()}" if rank_traceback else ""
        super().__init__(f"rank {rank} {what}{detail}")


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout_s: float,
    on_start: Callable[[int], None] | None = None,
) -> list[Any]:
    """Runs ``fn(rank, world_size, *args)`` on every rank of a new gloo process group.

    Args:
        fn: A function at the top level of an importable module.
        world_size: Number of processes.
        *args: Further arguments, equal on every rank.
        timeout_s: Seconds until every rank must have returned.
        on_start: Called with the rank in each process after ``torchrun``'s variables are set, which
            it may change, and before the group is joined: for settings of the group's sockets, such
            as a network namespace, ``GLOO_SOCKET_IFNAME`` or cores.

    Returns:
        Results by rank.

    Raises:
        ValueError: If ``world_size`` is less than 1, or ``fn``, ``on_start`` or an argument cannot
            be pickled.
        RankError: If a rank raised, died or was still running at the deadline. The others are
            terminated within seconds. The first failure is named, and a lost connection only if no
            cause is known.
    """
    if world_size < 1:
        raise ValueError(f"world_size is {world_size}; run_ranks needs at least 1 rank")
    try:
        call = pickle.dumps((dict(os.environ), fn, args, on_start))
    except Exception as error:
        raise ValueError(
            f"run_ranks cannot send {getattr(fn, '__qualname__', fn)!r} and its arguments to other "
            f"processes: {error}; use a function at the top level of a module, and plain data"
        ) from error
    context = mp.get_context("forkserver")
    # the library is imported lazily: import it here once, not in every rank
    library = {f"torchrec_picasso.{module}" for module in torchrec_picasso.MODULES.values()}
    frozen = "torchrec_picasso.app.launch.frozen"  # the last one
    context.set_forkserver_preload([rank_main.__module__, *sorted(library), *PRELOADED, frozen])
    with tempfile.TemporaryDirectory(prefix="picasso_ranks_") as folder:
        ranks: list[tuple[Any, Connection]] = []
        try:
            for rank in range(world_size):
                launcher_end, rank_end = context.Pipe()
                settings = (call, rank, world_size, folder, timeout_s)
                process = context.Process(target=rank_main, args=(rank_end, *settings))
                ranks.append((process, launcher_end))
                process.start()
                rank_end.close()  # the rank has the only copy, so its exit closes the pipe
            return _results(ranks, folder, timeout_s)
        finally:
            _terminate(ranks)


def _results(ranks: list[tuple[Any, Connection]], folder: str, timeout_s: float) -> list[Any]:
    rank_of = {connection: rank for rank, (_, connection) in enumerate(ranks)}
    waiting = set(rank_of)
    answers: dict[int, bytes] = {}
    failures: list[RankFailure] = []
    until_s = time.monotonic() + timeout_s
    while waiting and (ready := wait(list(waiting), max(0.0, until_s - time.monotonic()))):
        for connection in ready:
            assert isinstance(connection, Connection)
            waiting.remove(connection)
            rank = rank_of[connection]
            answer = _receive(connection, ranks[rank][0], rank)
            if isinstance(answer, bytes):
                answers[rank] = answer
                continue
            failures.append(answer)
            grace_s = _BLAME_S if all(f.is_torn_connection for f in failures) else _DRAIN_S
            until_s = min(until_s, time.monotonic() + grace_s)
    if failures:
        _raise_first(failures)
    if waiting:
        running = sorted(rank_of[connection] for connection in waiting)
        stack = _stack(ranks[running[0]][0].pid, stack_file(folder, running[0]))
        raise RankError(running[0], _overdue(running, sorted(answers), timeout_s), stack)
    for _, connection in ranks:
        with contextlib.suppress(OSError):
            connection.send_bytes(b"leave")
    for process, _ in ranks:
        process.join(_END_S)
    return [pickle.loads(answers[rank]) for rank in range(len(ranks))]


def _receive(connection: Connection, process: Any, rank: int) -> bytes | RankFailure:
    """Receives a rank's pickled result or failure, once its pipe is readable."""
    try:
        kind, content = connection.recv_bytes(), connection.recv_bytes()
    except (EOFError, OSError):
        time_s = time.monotonic()
        process.join(_END_S)
        code = process.exitcode
        name = f" ({signal.Signals(-code).name})" if code is not None and code < 0 else ""
        return RankFailure(rank, f"died with exit code {code}{name}", time_s)
    return content if kind == b"returned" else pickle.loads(content)


def _raise_first(failures: list[RankFailure]) -> None:
    first = min(failures, key=lambda failure: (failure.is_torn_connection, failure.time_s))
    also = sorted(failure.rank for failure in failures if failure is not first)
    what = first.what + (f" (then failed: ranks {also})" if also else "")
    cause = pickle.loads(first.pickled_error) if first.pickled_error else None
    raise RankError(first.rank, what, first.traceback) from cause


def _overdue(running: list[int], returned: list[int], timeout_s: float) -> str:
    others = f", and so were ranks {running[1:]}" if running[1:] else ""
    done = f"; ranks {returned} had returned" if returned else ""
    return (
        f"was still running after {timeout_s:g} s{others}{done}: it waits for a collective that "
        "another rank never joined, or needs a longer timeout_s"
    )


def _stack(pid: int, file: Path) -> str:
    """A running rank's Python stack; empty if it does not listen yet."""
    if not file.exists():
        return ""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, STACK_SIGNAL)
        until_s = time.monotonic() + _END_S
        while not file.stat().st_size and time.monotonic() < until_s:
            time.sleep(0.02)
    return file.read_text()


def _terminate(ranks: list[tuple[Any, Connection]]) -> None:
    """Terminates running ranks, SIGTERM then SIGKILL; returns when every process is gone."""
    started = [process for process, _ in ranks if process.pid is not None]
    for process in started:
        process.terminate()
    until_s = time.monotonic() + _END_S
    for process in started:
        process.join(max(0.0, until_s - time.monotonic()))
        process.kill()
        process.join()
        process.close()
    for _, connection in ranks:
        connection.close()
