"""Runs one function on several gloo ranks of this machine and brings results, or the failure, home.

The launcher decides when a run is over: all ranks answered, one failed, or the deadline passed. It
trades generality for certainty: what goes in and out is pickled by value, and the rendezvous is a
file, so no port is taken. Ranks are forked from a server process that has imported TorchRec and
holds no group and no device, so only a program's first run pays that import (seconds); the next
ones start in tenths.
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

__all__ = ["PRELOADED", "RankError", "run_ranks"]

PRELOADED = [
    "pandas",
    "torch.distributed.optim",
    "torch.export._trace",  # imported by fake tensors, with which a model is proved
    "torchrec.distributed.fbgemm_qcomm_codec",
]
"""Modules that the server of ranks imports beside this package, so that no rank pays for them; may
be extended before a program's first run."""

_DRAIN_S = 0.5  # after a failure: time for an earlier one to be heard
_BLAME_S = 5.0  # after a torn connection: time for the rank that tore it to be heard
_END_S = 2.0  # between SIGTERM and SIGKILL


class RankError(RuntimeError):
    """A rank of :func:`run_ranks` failed; the message tells which one, how and where.

    ``__cause__`` is the rank's own exception where it could be pickled.

    Args:
        rank: The rank that failed first.
        what: How it failed, one line.
        rank_traceback: Its traceback, or its stack if it was still running; empty if it left none.
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
    threads_per_rank: int = 1,
    on_start: Callable[[int], None] | None = None,
) -> list[Any]:
    """Runs ``fn(rank, world_size, *args)`` on every rank of a new gloo process group.

    Args:
        fn: A function at the top level of an importable module.
        world_size: How many processes to start.
        *args: Further arguments, pickled by value and equal on every rank.
        timeout_s: Seconds from the start until every rank must have returned.
        threads_per_rank: Threads of each rank's tensor operators.
        on_start: Called with the rank in each process, before it joins the group and after the
            variables of ``torchrun`` are set, which it may change; pickled by value. For what the
            group's sockets depend on: a network namespace, ``GLOO_SOCKET_IFNAME``, cores.

    Returns:
        What each rank returned, by rank; each result is pickled by value.

    Raises:
        ValueError: If ``world_size`` is less than 1, or ``fn``, ``on_start`` or an argument cannot
            be pickled.
        RankError: If a rank raised, died or was still running at the deadline. The others are ended
            within seconds, and the failure named is the first one: a connection lost because a peer
            ended is never named while its cause is known.
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
    # the library loads on first use: load it here once, not in every rank for seconds
    library = {f"torchrec_picasso.{module}" for module in torchrec_picasso.MODULES.values()}
    frozen = "torchrec_picasso.app.launch.frozen"  # the last one
    context.set_forkserver_preload([rank_main.__module__, *sorted(library), *PRELOADED, frozen])
    with tempfile.TemporaryDirectory(prefix="picasso_ranks_") as folder:
        ranks: list[tuple[Any, Connection]] = []
        try:
            for rank in range(world_size):
                ours, theirs = context.Pipe()
                settings = (call, rank, world_size, folder, timeout_s, threads_per_rank)
                process = context.Process(target=rank_main, args=(theirs, *settings))
                ranks.append((process, ours))
                process.start()
                theirs.close()  # the rank holds the only copy, so its end closes the pipe
            return _results(ranks, folder, timeout_s)
        finally:
            _end(ranks)


def _results(ranks: list[tuple[Any, Connection]], folder: str, timeout_s: float) -> list[Any]:
    rank_of = {connection: rank for rank, (_, connection) in enumerate(ranks)}
    unheard = set(rank_of)
    answers: dict[int, bytes] = {}
    failures: list[RankFailure] = []
    until_s = time.monotonic() + timeout_s
    while unheard and (ready := wait(list(unheard), max(0.0, until_s - time.monotonic()))):
        for connection in ready:
            assert isinstance(connection, Connection)
            unheard.remove(connection)
            rank = rank_of[connection]
            answer = _hear(connection, ranks[rank][0], rank)
            if isinstance(answer, bytes):
                answers[rank] = answer
                continue
            failures.append(answer)
            grace_s = _BLAME_S if all(f.is_torn_connection for f in failures) else _DRAIN_S
            until_s = min(until_s, time.monotonic() + grace_s)
    if failures:
        _raise_first(failures)
    if unheard:
        running = sorted(rank_of[connection] for connection in unheard)
        stack = _stack(ranks[running[0]][0].pid, stack_file(folder, running[0]))
        raise RankError(running[0], _overdue(running, sorted(answers), timeout_s), stack)
    for _, connection in ranks:
        with contextlib.suppress(OSError):
            connection.send_bytes(b"leave")
    for process, _ in ranks:
        process.join(_END_S)
    return [pickle.loads(answers[rank]) for rank in range(len(ranks))]


def _hear(connection: Connection, process: Any, rank: int) -> bytes | RankFailure:
    """A rank's pickled result, or how it failed; called once its pipe can be read."""
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


def _end(ranks: list[tuple[Any, Connection]]) -> None:
    """Ends what still runs, SIGTERM then SIGKILL; returns when every process is gone."""
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
