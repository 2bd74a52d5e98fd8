"""CPU share that an exchange takes from a core at work, by the priority of gloo's thread.

    python -m benchmarks.gloo_threads
    python -m benchmarks.gloo_threads --rate-mbit 100 --nice 0 5 -o gloo_threads.json

Two emulated hosts of one core each. A turn starts an exchange of rows, sorts numbers for some
milliseconds, and waits for the exchange. Shown are medians of the slower rank: the sorting alone,
the whole turn, the CPU time of the process beside that of the thread that sorts, and the exchange
with nothing else to do. Settings take turns. Setting a thread back to nice 0 needs root, as the
hosts do.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.cluster import run_on_hosts, usable_rate
from torchrec_picasso.app.cli.outputs import write_result
from torchrec_picasso.exchange.all_to_all import Ranks

_SORTED, _TURNS, _ROUNDS = 120_000, 20, 4
_MUCH = 1 << 30  # a bound for which ranks send messages to each other
_TIMEOUT_S = 900.0


@dataclass(frozen=True, kw_only=True)
class Question:
    """Settings of the measurement.

    Args:
        rate_mbit: Rate of each host's link, Mbit/s; ``None`` = loopback.
        nice: Nice values of gloo's thread; the thread that sorts has 0.
        floats: Sent to the other host, per exchange.
    """

    rate_mbit: float | None = 1000.0
    nice: tuple[int, ...] = (0, 5, 10, 19)
    floats: tuple[int, ...] = (1, 1_000, 25_000, 100_000, 300_000)


@dataclass(frozen=True, kw_only=True)
class Turns:
    """Milliseconds of a turn, of the slower rank.

    Args:
        nice: Nice value of gloo's thread.
        floats: Sent.
        sorting_ms: Without an exchange.
        both_ms: With one.
        beside_ms: CPU time of other threads in a turn with one.
        exchange_ms: Without sorting.
    """

    nice: int
    floats: int
    sorting_ms: float
    both_ms: float
    beside_ms: float
    exchange_ms: float


def measure(question: Question) -> list[Turns]:
    """Measures on two hosts."""
    by_rank = run_on_hosts(_on_rank, 2, question.rate_mbit, question, timeout_s=_TIMEOUT_S)
    return [max(ranks, key=lambda turns: turns.both_ms) for ranks in zip(*by_rank)]


def _on_rank(rank: int, world_size: int, question: Question) -> list[Turns]:
    _turns(1)  # the first exchange connects, and makes gloo's thread nicer
    times: dict[tuple[int, int], list[tuple[float, float, float, float]]] = {}
    for turn in range(_ROUNDS):
        for nice in question.nice if turn % 2 == 0 else question.nice[::-1]:
            for floats in question.floats:
                _set_nice(nice)
                times.setdefault((nice, floats), []).append(_turns(floats))
    return [
        Turns(
            nice=nice,
            floats=floats,
            **dict(zip(("sorting_ms", "both_ms", "beside_ms", "exchange_ms"), _medians(turns))),
        )
        for (nice, floats), turns in times.items()
    ]


def _turns(floats: int) -> tuple[float, float, float, float]:
    pg = dist.group.WORLD
    assert pg is not None
    ranks = Ranks(pg)
    numbers, sent, received = torch.rand(_SORTED), torch.zeros(2 * floats), torch.zeros(2 * floats)

    def exchange(work: Callable[[], object]) -> None:
        pending = ranks.start_all_to_all(received, sent, [floats] * 2, [floats] * 2, _MUCH)
        work()
        pending.wait()

    sorting_ms, _ = _time_ms(lambda: numbers.sort())
    both_ms, beside_ms = _time_ms(lambda: exchange(lambda: numbers.sort()))
    exchange_ms, _ = _time_ms(lambda: exchange(lambda: None))
    return sorting_ms, both_ms, beside_ms, exchange_ms


def _time_ms(work: Callable[[], object]) -> tuple[float, float]:
    """Wall time of a turn, and CPU time of other threads of this process in it."""
    dist.barrier()
    start_s, thread_s, process_s = time.perf_counter(), time.thread_time(), time.process_time()
    for _ in range(_TURNS):
        work()
    wall_s = time.perf_counter() - start_s
    beside_s = time.process_time() - process_s - (time.thread_time() - thread_s)
    return wall_s * 1e3 / _TURNS, beside_s * 1e3 / _TURNS


def _medians(turns: Sequence[Sequence[float]]) -> list[float]:
    return [round(statistics.median(column), 3) for column in zip(*turns)]


def _set_nice(nice: int) -> None:
    for task in Path("/proc/self/task").glob("*"):
        if (task / "comm").read_text().startswith("gloo"):
            os.setpriority(os.PRIO_PROCESS, int(task.name), nice)


def main(argv: Sequence[str] | None = None) -> None:
    """Prints a line per setting."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    usual = Question()
    parser.add_argument("--rate-mbit", type=float, default=usual.rate_mbit, help="0 = loopback")
    parser.add_argument("--nice", type=int, nargs="+", default=usual.nice, metavar="N")
    parser.add_argument("--floats", type=int, nargs="+", default=usual.floats, metavar="N")
    parser.add_argument("-o", "--out", metavar="FILE", help="write JSON")
    args = parser.parse_args(argv)
    question = Question(
        rate_mbit=usable_rate(args.rate_mbit or None),
        nice=tuple(args.nice),
        floats=tuple(args.floats),
    )
    found = measure(question)
    print("ms a turn    floats  sorting  with exchange  beside it  exchange alone")
    for result in found:
        print(
            f"nice {result.nice:<4} {result.floats:>9} {result.sorting_ms:8.2f} "
            f"{result.both_ms:14.2f} {result.beside_ms:10.2f} {result.exchange_ms:15.2f}"
        )
    if args.out:
        write_result({"question": asdict(question), "found": list(map(asdict, found))}, args.out)


if __name__ == "__main__":
    main(sys.argv[1:])
