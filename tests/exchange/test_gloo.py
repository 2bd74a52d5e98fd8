"""gloo's threads are less urgent than the one that trains, once something has been exchanged."""

import os
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from torchrec_picasso.app.launch.run_ranks import run_ranks
from torchrec_picasso.exchange.all_to_all import Ranks, let_training_go_first

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="threads are told apart on Linux")


def _nice_of_gloo() -> list[int]:
    return [
        os.getpriority(os.PRIO_PROCESS, int(task.name))
        for task in Path("/proc/self/task").glob("*")
        if (task / "comm").read_text().startswith("gloo")
    ]


def _exchange(rank: int, world_size: int, trainer_nice: int) -> tuple[list[int], list[int], int]:
    pg = dist.group.WORLD
    assert pg is not None
    os.setpriority(os.PRIO_PROCESS, 0, trainer_nice)
    before = _nice_of_gloo()
    received = torch.empty(world_size)
    sizes = [1] * world_size
    Ranks(pg).start_all_to_all(received, torch.ones(world_size), sizes, sizes, most_sent=2).wait()
    assert received.tolist() == [1.0] * world_size
    let_training_go_first()  # once more changes nothing
    return before, _nice_of_gloo(), os.getpriority(os.PRIO_PROCESS, 0)


@pytest.mark.parametrize(("trainer_nice", "expected"), [(0, 5), (3, 8), (19, 19)])
def test_the_thread_that_trains_goes_first(trainer_nice: int, expected: int) -> None:
    if os.getpriority(os.PRIO_PROCESS, 0):
        pytest.skip("the tests themselves run with another priority than 0")
    for before, after, own in run_ranks(_exchange, 2, trainer_nice, timeout_s=60):
        assert set(before) == {0}
        assert set(after) == {expected}
        assert len(after) > len(before)  # the exchange has connections of its own
        assert own == trainer_nice


def test_a_process_without_gloo_is_left_alone() -> None:
    own = os.getpriority(os.PRIO_PROCESS, 0)
    let_training_go_first()
    assert os.getpriority(os.PRIO_PROCESS, 0) == own
