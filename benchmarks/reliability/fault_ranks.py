"""Ranks under a fault: a run of the command line, with a fault injected on one of them.

Under torchrun: ``python -m benchmarks.reliability.fault_ranks CONFIG RESULT CASE``; a fault strikes
on the first start only. CASE ``-`` is a run without one.
"""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import io
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn

from benchmarks.reliability.broken_writes import broken_writes, disk_is_full, kill_me
from benchmarks.reliability.fault_cases import Case
from torchrec_picasso.app.cli import train as train_command
from torchrec_picasso.app.cli.main import main as command_line
from torchrec_picasso.app.config import load_config
from torchrec_picasso.app.runs.train import train_on_rank
from torchrec_picasso.app.runs.trainer import Trainer

OWN_WORDS = "what a user's model says"
GROUP_TIMEOUT_S = 3.0
_STUCK_S = 100.0  # after which a rank shows where it is


def run_on_rank(
    rank: int, world_size: int, config: str, case: Case | None, resume: bool
) -> tuple[dict[str, Any], str]:
    """Trains, and gives what training gave and what was said."""
    with contextlib.redirect_stdout(io.StringIO()) as said, _struck(rank, case):
        result = train_on_rank(rank, world_size, load_config(config), resume)
    return result, said.getvalue()


def join_again(rank: int, world_size: int, folder: str, timeout_s: float) -> None:
    """Replaces the process group by one with a timeout of its own. Collective."""
    dist.barrier()  # so that joining takes none of the timeout
    dist.destroy_process_group()
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(str(Path(folder, "store")), world_size),
        rank=rank,
        world_size=world_size,
        timeout=datetime.timedelta(seconds=timeout_s),
    )


def named_on_rank(
    rank: int, world_size: int, config: str, case: Case, folder: str
) -> tuple[str, str, float]:
    """Kind and text of what ended a rank's run, and seconds since the fault at most."""
    join_again(rank, world_size, folder, GROUP_TIMEOUT_S)
    try:
        run_on_rank(rank, world_size, config, case, False)
    except Exception as error:
        struck = Path(folder, "struck")
        since_s = time.time() - struck.stat().st_mtime if struck.exists() else float("inf")
        dist.destroy_process_group()  # as the end of the process would
        return type(error).__name__, str(error), since_s
    return "nothing", "", 0.0


@contextlib.contextmanager
def _struck(rank: int, case: Case | None) -> Iterator[None]:
    """Lets a case's fault strike within it."""
    if case is None or (rank != case.rank and case.kind != "kill_job"):
        yield
        return
    if case.kind in ("kill_write", "disk_full"):
        with broken_writes("", case.room, kill_me if case.kind == "kill_write" else disk_is_full):
            yield
        return
    steps = Trainer.steps
    taken = [0]

    def counted(trainer: Trainer, *args: Any) -> Iterator[Any]:
        for loss in steps(trainer, *args):
            if taken[0] == case.step:
                _strike(rank, case, trainer.model)
            taken[0] += 1
            yield loss

    Trainer.steps = counted  # type: ignore[method-assign]
    try:
        yield
    finally:
        Trainer.steps = steps  # type: ignore[method-assign]


def _strike(rank: int, case: Case, model: nn.Module) -> None:
    if case.kind in ("raise", "hang"):
        dense = next(module for module in model.modules() if isinstance(module, nn.Linear))
        dense.register_forward_pre_hook(_raise if case.kind == "raise" else _hang)
        return
    if case.kind == "kill_job" and rank != case.rank:
        time.sleep(600)  # it is killed from outside, like all
    if case.kind == "kill_job":
        Path(os.environ["FAULT_FOLDER"], "struck").touch()
        time.sleep(600)
    kill_me()


def _raise(*args: object) -> None:
    Path(os.environ["FAULT_FOLDER"], "struck").touch()
    raise RuntimeError(OWN_WORDS)


def _hang(*args: object) -> None:
    Path(os.environ["FAULT_FOLDER"], "struck").touch()
    time.sleep(4 * GROUP_TIMEOUT_S)


def _main(config: str, result: str, name: str) -> int:
    """A rank of torchrun."""
    faulthandler.dump_traceback_later(_STUCK_S)
    rank = int(os.environ["RANK"])
    is_first = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
    kind, launcher, seed = name.split("-") if name != "-" else ("", "", "0")
    case = Case(kind, launcher, int(seed)) if kind and is_first else None
    Path(result).with_name(f"pid_{rank}").write_text(str(os.getpid()))

    def struck_run(*args: Any) -> dict[str, Any]:
        with _struck(rank, case):
            found = train_on_rank(*args)
        if rank == 0:
            Path(result).write_text(json.dumps(found))
        return found

    train_command.train_on_rank = struck_run
    return command_line(["train", "--config", config, "--resume", "auto"])


if __name__ == "__main__":
    sys.exit(_main(*sys.argv[1:]))
