"""The process of one rank of ``run_ranks``: joins the group, calls the function, answers.

A rank answers through its pipe *before* it leaves the process group, so the launcher receives a
failure before other ranks lose their connection; and it leaves only after all ranks have answered,
so a fast rank never closes the connections of a slow one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import faulthandler
import multiprocessing
import os
import pickle
import signal
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path

import torch
import torch.distributed as dist

STACK_SIGNAL = signal.SIGUSR1
"""On this signal a rank writes its Python stack to :func:`stack_file`, even in a collective."""

_GLOO_SLACK_S = 60.0  # gloo times out after the launcher, which names the rank
_LOST_CONNECTION = ("closed by peer", "reset by peer", "broken pipe", "pair closure")
"""gloo's words for a lost peer: a consequence of another rank's failure."""


@dataclasses.dataclass(frozen=True)
class RankFailure:
    """Failure of a rank; ``what`` is one line that follows "rank R"."""

    rank: int
    what: str
    time_s: float  # time.monotonic(), one clock for all processes of a machine
    traceback: str = ""
    pickled_error: bytes = b""  # empty if the exception cannot be pickled

    @property
    def is_torn_connection(self) -> bool:
        """Whether the rank only lost its connection to another rank."""
        return any(words in self.traceback.lower() for words in _LOST_CONNECTION)


def stack_file(folder: str | Path, rank: int) -> Path:
    """File of a rank's stack, written on :data:`STACK_SIGNAL`; exists once the rank listens."""
    return Path(folder, f"stack_{rank}")


def rank_main(
    connection: Connection,
    call: bytes,
    rank: int,
    world_size: int,
    folder: str,
    timeout_s: float,
) -> None:
    """Runs the pickled ``call`` of the launcher; sends "returned" or "raised", then the content."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # on Ctrl-C the launcher terminates the ranks
    with open(stack_file(folder, rank), "w") as file:
        faulthandler.register(STACK_SIGNAL, file, all_threads=False)
        try:
            environment, fn, args, on_start = pickle.loads(call)
            os.environ.clear()  # the fork server may be older than the launcher's variables
            os.environ.update(environment)
            _join_group(rank, world_size, folder, timeout_s, on_start)
            content = _pickled_result(fn(rank, world_size, *args))
        except BaseException as error:
            _answer(connection, b"raised", pickle.dumps(_described(rank, error)))
            os._exit(1)  # a group with a broken collective may not shut down
        _answer(connection, b"returned", content)
        with contextlib.suppress(EOFError, OSError):
            connection.recv_bytes()  # until every rank has answered
        if dist.is_initialized():
            dist.destroy_process_group()


def _join_group(
    rank: int,
    world_size: int,
    folder: str,
    timeout_s: float,
    on_start: Callable[[int], None] | None,
) -> None:
    # torchrun's variables; OMP_NUM_THREADS for libraries with their own thread pools
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE=str(world_size),
        OMP_NUM_THREADS="1",
    )
    if on_start is not None:
        on_start(rank)  # still of one thread, so it may enter another user namespace
    threading.Thread(target=_end_with_launcher, daemon=True).start()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(str(Path(folder, "store")), world_size),
        rank=rank,
        world_size=world_size,
        timeout=datetime.timedelta(seconds=timeout_s + _GLOO_SLACK_S),
    )


def _pickled_result(result: object) -> bytes:
    try:
        return pickle.dumps(result)
    except Exception as error:
        raise TypeError(
            f"the rank's result, a {type(result).__name__}, cannot be sent back: {error}; "
            "return plain data or CPU tensors"
        ) from error


def _described(rank: int, error: BaseException) -> RankFailure:
    time_s = time.monotonic()
    try:
        pickled = pickle.dumps(error)
        pickle.loads(pickled)
    except Exception:
        pickled = b""
    what = f"raised {type(error).__name__}: {error}"
    return RankFailure(rank, what, time_s, traceback.format_exc(), pickled)


def _answer(connection: Connection, kind: bytes, content: bytes) -> None:
    with contextlib.suppress(OSError):  # the launcher may be gone
        connection.send_bytes(kind)
        connection.send_bytes(content)


def _end_with_launcher() -> None:
    launcher = multiprocessing.parent_process()
    if launcher is not None:
        wait([launcher.sentinel])
        os._exit(1)
