"""Runs one function on several gloo ranks of this machine and brings its results, or its failure, home.

The launcher decides when a run is over: all ranks answered, one failed, or the deadline passed. It
trades generality for certainty: ranks are fresh processes, what goes in and out is pickled by value,
and the rendezvous is a file, so no port is taken. A rank waits for the others' answers before it
leaves, so a quick rank never tears the connections of a slow one. A start costs one import of
TorchRec per rank (seconds).
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import faulthandler
import os
import pickle
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

__all__ = ["RankError", "run_ranks"]

_DRAIN_S = 0.5  # after a failure: time for an earlier cause to be heard
_BLAME_S = 5.0  # after a torn connection: time for the rank that tore it to be heard
_END_S = 2.0  # between SIGTERM and SIGKILL
_STORE_SLACK_S = 60.0  # gloo's own timeout comes after the deadline, so that the deadline speaks

# How gloo words the loss of a peer: a consequence of another rank's end, not a cause.
_TORN_CONNECTION = ("closed by peer", "reset by peer", "broken pipe", "pair closure")


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


@dataclasses.dataclass(frozen=True)
class _Failure:
    rank: int
    what: str
    time_s: float  # monotonic, one clock for all processes of a machine
    traceback: str = ""
    pickled_error: bytes = b""

    @property
    def order(self) -> tuple[bool, float]:
        """Causes before consequences, then the earliest."""
        torn = any(words in self.traceback.lower() for words in _TORN_CONNECTION)
        return torn, self.time_s


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout_s: float,
    threads_per_rank: int = 1,
) -> list[Any]:
    """Runs ``fn(rank, world_size, *args)`` on every rank of a new gloo process group.

    Args:
        fn: A function at the top level of an importable module.
        world_size: How many processes to start.
        *args: Further arguments, pickled by value and equal on every rank.
        timeout_s: Seconds from the first start until every rank must have returned.
        threads_per_rank: Threads of each rank's tensor operators.

    Returns:
        What each rank returned, by rank; each result is pickled by value.

    Raises:
        ValueError: If ``world_size`` is less than 1, or ``fn`` or an argument cannot be pickled.
        RankError: If a rank raised, died or was still running at the deadline. The others are ended
            within seconds, and the failure named is the first one: a connection lost because a peer
            ended is never named while its cause is known.
    """
    if world_size < 1:
        raise ValueError(f"world_size is {world_size}; run_ranks needs at least 1 rank")
    try:
        call = pickle.dumps((fn, args))
    except Exception as error:
        raise ValueError(
            f"run_ranks cannot send {getattr(fn, '__qualname__', fn)!r} and its arguments to other "
            f"processes: {error}; use a function at the top level of a module, and plain data"
        ) from error
    context = mp.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="picasso_ranks_") as folder:
        ranks: list[tuple[Any, Connection]] = []
        try:
            for rank in range(world_size):
                ours, theirs = context.Pipe()
                process = context.Process(
                    target=_rank_main,
                    args=(theirs, call, rank, world_size, folder, timeout_s, threads_per_rank),
                    name=f"rank-{rank}",
                )
                process.start()
                theirs.close()  # the rank holds the only copy, so its end closes the pipe
                ranks.append((process, ours))
            return _results(ranks, Path(folder), timeout_s)
        finally:
            _end(ranks)


def _results(ranks: list[tuple[Any, Connection]], folder: Path, timeout_s: float) -> list[Any]:
    rank_of = {connection: rank for rank, (_, connection) in enumerate(ranks)}
    open_ = set(rank_of)
    answers: dict[int, bytes] = {}
    failures: list[_Failure] = []
    deadline_s = time.monotonic() + timeout_s
    while open_:
        ready = wait(list(open_), max(0.0, deadline_s - time.monotonic()))
        if not ready:
            break
        for connection in ready:
            assert isinstance(connection, Connection)
            open_.remove(connection)
            rank = rank_of[connection]
            answer = _answer(connection, ranks[rank][0], rank)
            if isinstance(answer, _Failure):
                failures.append(answer)
                grace_s = _BLAME_S if min(f.order for f in failures)[0] else _DRAIN_S
                deadline_s = min(deadline_s, time.monotonic() + grace_s)
            else:
                answers[rank] = answer
    if failures:
        _raise_first(failures)
    if open_:
        running = sorted(rank_of[connection] for connection in open_)
        others = f" (so were ranks {running[1:]})" if running[1:] else ""
        done = f"; ranks {sorted(answers)} had returned" if answers else ""
        raise RankError(
            running[0],
            f"was still running after {timeout_s:g} s{others}{done}; it may wait for a collective "
            "that another rank never joins, or need a longer timeout_s",
            _stack(ranks[running[0]][0].pid, folder / f"stack_{running[0]}"),
        )
    for _, connection in ranks:
        connection.send_bytes(b"leave")
    for process, _ in ranks:
        process.join(_END_S)
    return [pickle.loads(answers[rank]) for rank in range(len(ranks))]


def _answer(connection: Connection, process: Any, rank: int) -> bytes | _Failure:
    """A rank's pickled result, or how it failed; called once its pipe can be read."""
    try:
        kind, content = connection.recv_bytes(), connection.recv_bytes()
    except (EOFError, OSError):
        heard_s = time.monotonic()
        process.join(_END_S)
        code = process.exitcode
        signal_name = f" ({signal.Signals(-code).name})" if code is not None and code < 0 else ""
        return _Failure(rank, f"died with exit code {code}{signal_name}", heard_s)
    return content if kind == b"returned" else pickle.loads(content)


def _raise_first(failures: list[_Failure]) -> None:
    first = min(failures, key=lambda failure: failure.order)
    also = sorted(failure.rank for failure in failures if failure is not first)
    what = first.what + (f" (ranks {also} failed after it)" if also else "")
    cause = None
    with contextlib.suppress(Exception):
        cause = pickle.loads(first.pickled_error)
    raise RankError(first.rank, what, first.traceback) from cause


def _stack(pid: int, file: Path) -> str:
    """Asks a rank for its Python stack, which it writes even inside a collective."""
    with contextlib.suppress(OSError):
        if file.exists():
            os.kill(pid, signal.SIGUSR1)
            until_s = time.monotonic() + _END_S
            while not file.stat().st_size and time.monotonic() < until_s:
                time.sleep(0.02)
            return file.read_text()
    return ""


def _end(ranks: list[tuple[Any, Connection]]) -> None:
    """Ends what still runs: SIGTERM, then SIGKILL; returns when every process is gone."""
    for process, connection in ranks:
        connection.close()
        if process.is_alive():
            process.terminate()
    until_s = time.monotonic() + _END_S
    for process, _ in ranks:
        process.join(max(0.0, until_s - time.monotonic()))
        if process.is_alive():
            process.kill()
        process.join()
        process.close()


def _rank_main(
    connection: Connection,
    call: bytes,
    rank: int,
    world_size: int,
    folder: str,
    timeout_s: float,
    threads_per_rank: int,
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # on Ctrl-C the launcher ends the ranks
    with open(Path(folder, f"stack_{rank}"), "w") as stack_file:
        faulthandler.register(signal.SIGUSR1, stack_file, all_threads=False)
        try:
            with _process_group(rank, world_size, folder, timeout_s, threads_per_rank):
                fn, args = pickle.loads(call)
                result = pickle.dumps(fn(rank, world_size, *args))
                connection.send_bytes(b"returned")
                connection.send_bytes(result)
                with contextlib.suppress(EOFError, OSError):
                    connection.recv_bytes()  # until every rank has answered
        except BaseException as error:
            with contextlib.suppress(OSError):
                connection.send_bytes(b"raised")
                connection.send_bytes(pickle.dumps(_described(rank, error)))


def _described(rank: int, error: BaseException) -> _Failure:
    heard_s = time.monotonic()
    pickled = b""
    with contextlib.suppress(Exception):
        pickled = pickle.dumps(error)
        pickle.loads(pickled)
    name = type(error).__name__
    return _Failure(rank, f"raised {name}: {error}", heard_s, traceback.format_exc(), pickled)


@contextlib.contextmanager
def _process_group(
    rank: int, world_size: int, folder: str, timeout_s: float, threads_per_rank: int
) -> Iterator[None]:
    # What torchrun would set; OMP_NUM_THREADS for libraries that start their own pools.
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE=str(world_size),
        OMP_NUM_THREADS=str(threads_per_rank),
    )
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(threads_per_rank)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(str(Path(folder, "store")), world_size),
        rank=rank,
        world_size=world_size,
        timeout=datetime.timedelta(seconds=timeout_s + _STORE_SLACK_S),
    )
    try:
        yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
