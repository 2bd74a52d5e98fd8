"""A rank that raises ends all with its own message; one that hangs, or is killed, is named, and who
waits."""

import datetime
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torchrec.datasets.utils import Batch

from tests.sharding.jobs import ODD, PLAIN, Job, build
from tests.train_pipeline import runs
from torchrec_picasso import PeerError
from torchrec_picasso.app.launch.run_ranks import run_ranks
from torchrec_picasso.errors import InputError, PicassoError
from torchrec_picasso.exchange.peers import Peers

HEARD = Job(placement={"*": 2, "one_row": 1}, tables=ODD)
HEARD_BESIDE_STOCK = Job(placement={"*": 2, "b": "table_wise"}, tables=PLAIN)
ALONE = (3, 1)
"""Hosts and ranks on each; where a host has several, rows travel by host."""
GROUP_TIMEOUT_S = 5.0
FAULTY = 1
BROKEN_STEP = 4


class BrokenError(Exception):
    """Error of a faulty rank."""


def break_it() -> None:
    raise BrokenError("the user's own words")


def hang() -> None:
    time.sleep(2 * GROUP_TIMEOUT_S)
    raise BrokenError("nobody waits any more")


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def forget_graphs() -> None:
    torch.set_grad_enabled(False)


def with_fault(batches: list[Batch], act: Callable[[], None]) -> Iterator[Batch]:
    yield from batches[:BROKEN_STEP]
    act()


def put_into_forward(model: Any, act: Callable[[], None]) -> Callable[[], None]:
    """Gives what makes the next forward act."""
    whole_forward, armed = model.module.forward, []

    def forward(batch: Batch) -> Any:
        if armed:
            act()
        return whole_forward(batch)

    model.module.forward = forward
    return lambda: armed.append(True)


def fail_on_one_rank(
    rank: int,
    world_size: int,
    top: str,
    job: Job,
    where: str,
    act: Callable[[], None],
    stays_s: float = 0.0,
    is_ours: bool = True,
) -> tuple[str, str, float]:
    """Kind and text of what a rank raises, and after how many seconds.

    Then the rank keeps its connections for ``stays_s``, as a program does that catches the error
    and takes the next step.
    """
    timeout = datetime.timedelta(seconds=GROUP_TIMEOUT_S)
    dist.barrier()  # so that joining takes none of the timeout
    dist.destroy_process_group()  # one with a timeout of its own
    if rank == FAULTY and act is die and (child := os.fork()):  # it is the rank that dies
        _, status = os.waitpid(child, 0)
        return "died", signal.Signals(os.WTERMSIG(status)).name, 0.0
    store = dist.FileStore(str(Path(top, "store")), world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)
    model = build(job, rank, world_size)
    pipeline = (
        runs.pipeline_of(model, num_micro_batches=1) if is_ours else runs.make_driver(None, model)
    )
    arm = put_into_forward(model, act)
    batches = runs.batches_of(job, rank, range(9))
    if is_ours and job.tables is ODD:  # a failure that all got over must not be heard of again
        bad = runs.batches_of(job, rank, range(1))
        bad[0].sparse_features._values = torch.full_like(bad[0].sparse_features.values(), 10**6)
        with pytest.raises(InputError):
            pipeline.progress(iter(bad))
    stream = iter(batches)
    if rank == FAULTY and where == "data":
        stream = with_fault(batches, act)
    start = time.monotonic()
    try:
        for step in range(9):
            if rank == FAULTY and where == "forward" and step == BROKEN_STEP:
                arm()
            start = time.monotonic()
            pipeline.progress(stream)
    except Exception as error:
        raised = type(error).__name__, str(error), time.monotonic() - start
    else:
        raised = "nothing", "", 0.0
    if rank == FAULTY and stays_s:
        if is_ours:  # the program's loop goes on
            with pytest.raises(PicassoError, match="the step before raised"):
                pipeline.progress(stream)
        time.sleep(stays_s)
    dist.destroy_process_group()  # as the end of the process would
    return raised


def fail(top: Path, job: Job, hosts: tuple[int, int], *how: Any) -> list[tuple[str, str, float]]:
    """Returns what each rank raises."""
    num_hosts, num_places = hosts
    job = replace(job, by_host=("*",) if num_places > 1 else (), num_places=num_places)
    world_size = num_hosts * num_places
    return run_ranks(fail_on_one_rank, world_size, str(top), job, *how, timeout_s=60)


@pytest.mark.parametrize(
    ("job", "hosts", "where"),
    [
        (HEARD, ALONE, "forward"),
        (HEARD, ALONE, "data"),
        (HEARD, (2, 2), "forward"),
        (HEARD, (2, 4), "forward"),
        (HEARD, (4, 2), "data"),
        (HEARD_BESIDE_STOCK, ALONE, "forward"),
    ],
    ids=["rows", "data", "2 x 2", "2 x 4", "data of 4 x 2", "mixed"],
)
def test_a_rank_that_raises_is_heard_by_all(
    tmp_path: Path, job: Job, hosts: tuple[int, int], where: str
) -> None:
    raised = fail(tmp_path, job, hosts, where, break_it)
    at = {"forward": "step 4, forward 0", "data": "step 2, next batch"}[where]
    for rank, (kind, text, _) in enumerate(raised):
        if rank == FAULTY:
            assert (kind, text) == ("BrokenError", "the user's own words")
        else:
            expected = f"rank {FAULTY} failed in {at}: BrokenError: the user's own words"
            assert (kind, text) == (PeerError.__name__, expected)


@pytest.mark.parametrize("is_ours", [True, False], ids=["ours", "stock"])
def test_peers_of_a_rank_that_lives_on_wait_for_the_timeout(tmp_path: Path, is_ours: bool) -> None:
    """Equally long under TorchRec's pipeline, whose error does not say why."""
    raised = fail(tmp_path, HEARD, ALONE, "forward", break_it, 3 * GROUP_TIMEOUT_S, is_ours)
    words = "the user's own words"
    for rank, (kind, text, after_s) in enumerate(raised):
        if rank == FAULTY:
            assert (kind, text) == ("BrokenError", words)
            continue
        assert GROUP_TIMEOUT_S - 1 < after_s < 2.5 * GROUP_TIMEOUT_S
        assert kind == ("PeerError" if is_ours else "RuntimeError")
        assert (words in text) == is_ours


def test_a_loss_without_a_graph_on_one_rank_is_heard_by_all(tmp_path: Path) -> None:
    raised = fail(tmp_path, HEARD, ALONE, "forward", forget_graphs)
    kinds = ["RuntimeError" if rank == FAULTY else "PeerError" for rank in range(len(raised))]
    assert [kind for kind, _, _ in raised] == kinds
    for _, text, _ in raised:
        assert "element 0 of tensors does not require grad" in text


@pytest.mark.parametrize(
    ("hosts", "act"),
    [(ALONE, hang), ((2, 4), hang), ((2, 4), die)],
    ids=["rows", "2 x 4", "killed"],
)
def test_a_rank_that_hangs_or_is_killed_is_named_within_the_timeout(
    tmp_path: Path, hosts: tuple[int, int], act: Callable[[], None]
) -> None:
    raised = fail(tmp_path, HEARD, hosts, "forward", act)
    assert act is hang or raised[FAULTY][:2] == ("died", "SIGKILL")
    for rank, (kind, text, after_s) in enumerate(raised):
        if rank == FAULTY:
            continue
        assert kind == PeerError.__name__
        assert text.startswith(f"rank {rank} got no answer in step 4, ")
        listed = re.search(r"; ranks? ([\d, ]+) said nothing: .*hangs or was ended$", text)
        silent = {int(other) for other in listed[1].split(",")} if listed else set()
        waited = {int(other) for other in re.findall(r"; rank (\d+) waited in step 4, ", text)}
        # ranks that a killed one cut off at once do not wait until all others have given up
        assert FAULTY in silent if act is die else silent == {FAULTY}
        assert silent | waited | {rank} == set(range(len(raised)))
        assert after_s < 2 * GROUP_TIMEOUT_S


def test_a_pipelines_entry_is_not_that_of_an_earlier_one() -> None:
    store = dist.HashStore()
    pg: Any = SimpleNamespace(rank=lambda: 0, size=lambda: 2, get_group_store=lambda: store)
    for words in ("first", "second"):
        with pytest.raises(BrokenError), Peers(pg).propagate_errors(lambda: "step 0"):
            raise BrokenError(words)
    assert b"BrokenError: second" in store.get("picasso/failed/0")


@pytest.mark.parametrize(
    ("silent", "message"),
    [
        ((), "a link between them is down, or they are not in the same step"),
        ((2,), "rank 2 said nothing: it hangs or was ended"),
        ((1, 3), "ranks 1, 3 said nothing: at least one of them hangs or was ended"),
    ],
)
def test_no_rank_that_may_only_wait_is_said_to_hang(silent: tuple[int, ...], message: str) -> None:
    store = dist.HashStore()
    for rank in {1, 2, 3}.difference(silent):
        store.set(f"picasso/failed/{rank}", '["step 4, update", false]')
    pg: Any = SimpleNamespace(rank=lambda: 0, size=lambda: 4, get_group_store=lambda: store)
    peers = Peers(pg)
    with pytest.raises(PeerError) as caught, peers.propagate_errors(lambda: "step 4, update"):
        raise RuntimeError("Connection closed by peer")
    assert str(caught.value).endswith(f"; {message}")
