"""The launcher names the rank that failed first, and how; it never hangs, and leaves no process.

Ranks of one start agree on a part of a store, whatever earlier starts left in it.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.processes import environment, run_python, wait_until
from torchrec_picasso.app.launch.fresh_store import fresh_store
from torchrec_picasso.app.launch.run_ranks import RankError, run_ranks
from torchrec_picasso.app.launch.shaped_loopback import NamespaceError, shaped_loopback
from torchrec_picasso.errors import InputError

TIMEOUT_S = 60.0


def sum_over_ranks(rank: int, world_size: int, factor: float) -> dict[str, Any]:
    total = torch.tensor([factor * (rank + 1)])
    dist.all_reduce(total)
    return {"rank": rank, "total": total, "threads": torch.get_num_threads()}


def one_rank_raises(rank: int, world_size: int) -> None:
    if rank == 1:
        raise InputError("table 'clicks' has 5 rows, but a batch looks up row 7")
    dist.barrier()


def one_rank_is_killed(rank: int, world_size: int) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def one_rank_exits(rank: int, world_size: int) -> None:
    if rank == 1:
        os._exit(3)
    dist.barrier()


def one_rank_never_joins(rank: int, world_size: int) -> None:
    if rank == 0:
        dist.barrier()


def both_raise_second_first(rank: int, world_size: int) -> None:
    if rank == 0:
        with torch.no_grad():
            received = torch.zeros(1)
            dist.recv(received, 1)  # rank 1 raises instead of sending
    raise KeyError(rank)


def returns_a_lambda(rank: int, world_size: int) -> Any:
    return lambda: rank


@dataclass(frozen=True)
class SetLocalRank:
    """Numbers local ranks from a start; refuses one rank."""

    start: int
    refused_rank: int | None = None

    def __call__(self, rank: int) -> None:
        if rank == self.refused_rank:
            raise InputError(f"there is no host for rank {rank}")
        assert not dist.is_initialized()
        assert os.environ["LOCAL_RANK"] == str(rank)
        os.environ["LOCAL_RANK"] = str(self.start + rank)


def local_rank(rank: int, world_size: int) -> int:
    assert dist.is_initialized()
    return int(os.environ["LOCAL_RANK"])


def test_results_come_back_by_rank() -> None:
    results = run_ranks(sum_over_ranks, 2, 10.0, timeout_s=TIMEOUT_S)
    assert [result["rank"] for result in results] == [0, 1]
    for result in results:
        assert result["total"].item() == 30.0
        assert result["threads"] == 1


def test_nothing_is_printed_and_no_process_is_left(tmp_path: Path) -> None:
    script = tmp_path / "main.py"
    script.write_text(
        "from tests.app.launch.test_run_ranks import sum_over_ranks\n"
        "from torchrec_picasso.app.launch.run_ranks import run_ranks\n"
        "if __name__ == '__main__':\n"
        "    run_ranks(sum_over_ranks, 2, 1.0, timeout_s=60.0)\n"
    )
    done = run_python("-W", "ignore", str(script))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize(
    ("fn", "what"),
    [
        (one_rank_raises, "raised InputError: table 'clicks' has 5 rows"),
        (one_rank_is_killed, "died with exit code -9 (SIGKILL)"),
        (one_rank_exits, "died with exit code 3"),
        (both_raise_second_first, "raised KeyError: 1"),
    ],
)
def test_first_failure_is_named(fn: Any, what: str) -> None:
    with pytest.raises(RankError) as caught:
        run_ranks(fn, 2, timeout_s=TIMEOUT_S)
    assert caught.value.rank == 1
    assert caught.value.what.startswith(what)
    assert str(caught.value).startswith(f"rank 1 {what}")
    if fn is one_rank_raises:
        assert "in one_rank_raises" in caught.value.rank_traceback
        assert isinstance(caught.value.__cause__, InputError)


def test_a_stuck_rank_is_named_with_its_stack() -> None:
    run_ranks(sum_over_ranks, 1, 1.0, timeout_s=TIMEOUT_S)  # the fork server is up from here on
    deadline_s = 5.0
    start_s = time.monotonic()
    with pytest.raises(RankError) as caught:
        run_ranks(one_rank_never_joins, 2, timeout_s=deadline_s)
    assert caught.value.rank == 0
    assert "was still running after 5 s; ranks [1] had returned" in caught.value.what
    assert "in one_rank_never_joins" in caught.value.rank_traceback
    assert time.monotonic() - start_s < deadline_s + 10.0


def test_a_result_that_cannot_be_sent_says_what_to_return() -> None:
    with pytest.raises(RankError, match=r"function, cannot be sent back: .* return plain data"):
        run_ranks(returns_a_lambda, 1, timeout_s=TIMEOUT_S)


def test_on_start_runs_on_each_rank_before_its_group() -> None:
    results = run_ranks(local_rank, 2, timeout_s=TIMEOUT_S, on_start=SetLocalRank(10))
    assert results == [10, 11]
    assert run_ranks(local_rank, 2, timeout_s=TIMEOUT_S) == [0, 1]


def test_a_failing_on_start_is_the_failure_of_its_rank() -> None:
    with pytest.raises(RankError, match="raised InputError: there is no host for rank 1") as caught:
        run_ranks(local_rank, 2, timeout_s=TIMEOUT_S, on_start=SetLocalRank(0, refused_rank=1))
    assert caught.value.rank == 1


def seconds_of_an_exchange(rank: int, world_size: int, num_bytes: int) -> float:
    sent = torch.zeros(num_bytes, dtype=torch.uint8)
    dist.barrier()
    start_s = time.perf_counter()
    dist.all_to_all_single(torch.empty_like(sent), sent)
    return time.perf_counter() - start_s


def test_ranks_on_a_slower_loopback() -> None:
    """Each of two ranks sends half of its bytes to the other."""
    num_bytes, rate_mbit = 4_000_000, 40
    try:
        with shaped_loopback(rate_mbit, ranks=2) as enter_namespace:
            settings: dict[str, Any] = {"timeout_s": TIMEOUT_S, "on_start": enter_namespace}
            seconds = run_ranks(seconds_of_an_exchange, 2, num_bytes, **settings)
    except NamespaceError as error:
        pytest.skip(f"no network namespace with tc can be had here: {error}")
    assert max(seconds) > 0.8 * num_bytes / 2 * 8 / (rate_mbit * 1e6)
    with pytest.raises(RankError, match=f"/proc/{enter_namespace.pid}/ns/user"):
        run_ranks(seconds_of_an_exchange, 2, num_bytes, **settings)  # it ended with its context
    with pytest.raises(NamespaceError, match="rate"), shaped_loopback(0, ranks=2):
        pass


def test_calls_that_cannot_be_sent_are_refused() -> None:
    local = "use a function at the top level of a module"
    with pytest.raises(ValueError, match=local):
        run_ranks(local_rank, 1, timeout_s=TIMEOUT_S, on_start=lambda rank: None)
    with pytest.raises(ValueError, match=local):
        run_ranks(lambda rank, world_size: None, 1, timeout_s=TIMEOUT_S)
    with pytest.raises(ValueError, match="world_size is 0; run_ranks needs at least 1 rank"):
        run_ranks(sum_over_ranks, 0, timeout_s=TIMEOUT_S)


def test_ctrl_c_ends_the_ranks(tmp_path: Path) -> None:
    script = tmp_path / "main.py"
    script.write_text(
        "import signal, sys\n"
        "from tests.app.launch.test_run_ranks import say_pid_and_wait\n"
        "from torchrec_picasso.app.launch.run_ranks import run_ranks\n"
        "if __name__ == '__main__':\n"
        # started in the background, a process inherits that Ctrl-C is ignored
        "    signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "    run_ranks(say_pid_and_wait, 2, sys.argv[1], timeout_s=60.0)\n"
    )
    main = subprocess.Popen(
        [sys.executable, str(script), str(tmp_path)],
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
    )
    files = [tmp_path / f"pid_{rank}" for rank in range(2)]
    wait_until(lambda: all(file.exists() for file in files), "the ranks start")
    main.send_signal(signal.SIGINT)
    _, stderr = main.communicate(timeout=TIMEOUT_S)
    assert "KeyboardInterrupt" in stderr
    assert not any(_is_alive(int(file.read_text())) for file in files)


def say_pid_and_wait(rank: int, world_size: int, folder: str) -> None:
    aside = Path(folder, f"aside_{rank}")
    aside.write_text(str(os.getpid()))
    aside.rename(Path(folder, f"pid_{rank}"))
    signal.pause()


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


WORLD_SIZE = 3


def start(path: Path, ranks: range = range(WORLD_SIZE), timeout_s: float = 30) -> list[object]:
    """Starts ranks as threads: how many each finds in its part at the end, or what it raised."""
    parts: dict[int, dist.Store] = {}
    found: list[object] = [None] * WORLD_SIZE

    def join(rank: int) -> None:
        store = dist.FileStore(str(path), -1)
        try:
            parts[rank] = fresh_store(store, rank, WORLD_SIZE, timeout_s)
            parts[rank].add("here", 1)
        except RuntimeError as error:
            found[rank] = str(error)

    threads = [threading.Thread(target=join, args=(rank,)) for rank in reversed(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for rank, part in parts.items():
        found[rank] = part.add("here", 0)
    return found


def test_each_start_has_a_part_of_its_own(tmp_path: Path) -> None:
    starts = [start(tmp_path / "store") for _ in range(4)]
    assert starts == [[WORLD_SIZE] * WORLD_SIZE] * 4


def test_a_start_that_broke_off_leaves_no_trace(tmp_path: Path) -> None:
    """Ranks that said hello and died are not taken for those of the next start."""
    broken = start(tmp_path / "store", range(1, WORLD_SIZE), timeout_s=0.3)
    assert "timeout" in str(broken[1]).lower()
    assert start(tmp_path / "store") == [WORLD_SIZE] * WORLD_SIZE


@pytest.mark.parametrize("present", [1, 2])
def test_ranks_that_do_not_come_are_named(tmp_path: Path, present: int) -> None:
    said = start(tmp_path / "store", range(present), timeout_s=0.3)
    assert said[0] == f"ranks {list(range(present, WORLD_SIZE))} did not join within 0.3 s"
