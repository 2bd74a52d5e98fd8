"""Flags are agreed on by all ranks of a group, whatever else is on the wire; exchanges in flight at
once do not meet, and one that nobody waits for holds up no other; gloo's threads are less urgent
than the one that trains; what is taken for a broken exchange, and what for a rank's own failure."""

import datetime
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from torchrec_picasso.app.launch.run_ranks import run_ranks
from torchrec_picasso.errors import PeerError
from torchrec_picasso.exchange import agreement
from torchrec_picasso.exchange.agreement import Agreement, Flags
from torchrec_picasso.exchange.all_to_all import Ranks, let_training_go_first
from torchrec_picasso.exchange.peers import Peers
from torchrec_picasso.exchange.waiting import Pending

CPU = torch.device("cpu")


def _agree(rank: int, world_size: int) -> list[bool]:
    """Ranks that speak: none, each in turn, all; messages of the group itself are under way."""
    pg = dist.group.WORLD
    found = []
    for speaking in ([], *([each] for each in range(world_size)), list(range(world_size))):
        sent, received = torch.ones(8 * world_size), torch.empty(8 * world_size)
        rows = Ranks(pg).start_all_to_all(received, sent, *[[8] * world_size] * 2, most_sent=_MUCH)
        asked = Agreement(pg, CPU, Flags(homes_written=rank in speaking))
        found.append(Flags.largest(asked.wait()).homes_written)
        assert Flags.largest(asked.wait()) == Flags(homes_written=found[-1]), "once is enough"
        rows.wait()
    return found


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_one_rank_is_enough(world_size: int) -> None:
    expected = [False, *[True] * (world_size + 1)]
    assert run_ranks(_agree, world_size, timeout_s=60) == [expected] * world_size


def _agree_in_halves(rank: int, world_size: int) -> tuple[bool, float]:
    halves = [
        dist.new_group(ranks, timeout=datetime.timedelta(seconds=17)) for ranks in ([0, 3], [1, 2])
    ]
    mine = halves[0 if rank in (0, 3) else 1]
    asked = Agreement(mine, CPU, Flags(homes_written=rank == 3))
    found = Flags.largest(asked.wait()).homes_written
    assert Flags.largest(Agreement(mine, CPU, Flags()).wait()) == Flags()
    own = agreement._groups[mine]._get_backend(CPU)
    return found, own.options._timeout.total_seconds()


def test_groups_agree_for_themselves() -> None:
    """Ranks of a group alone make the group of its flags, which waits no longer than theirs."""
    found = run_ranks(_agree_in_halves, 4, timeout_s=60)
    assert found == [(True, 17.0), (False, 17.0), (False, 17.0), (True, 17.0)]


NUM_EXCHANGES = 300
MOST_IN_FLIGHT = 4
_MUCH = 1 << 30


def _blocks(number: int, world_size: int) -> list[list[int]]:
    """Elements from rank to rank of one exchange, the same on every rank; often none."""
    rng = random.Random(number)
    return [[rng.choice((0, 0, 1, 3, 500)) for _ in range(world_size)] for _ in range(world_size)]


def _sent(number: int, source: int, target: int, numel: int) -> Tensor:
    return torch.arange(numel) + 1000.0 * (target + 10 * (source + 10 * number))


def _start(rank: int, world_size: int, number: int) -> tuple[Pending, Tensor, Tensor]:
    blocks = _blocks(number, world_size)
    send_W, receive_W = blocks[rank], [blocks[source][rank] for source in range(world_size)]
    output = torch.full((sum(receive_W),), -1.0)
    pending = Ranks(dist.group.WORLD).start_all_to_all(
        output,
        torch.cat([_sent(number, rank, t, n) for t, n in enumerate(send_W)]),
        receive_W,
        send_W,
        most_sent=0 if number % 3 else _MUCH,  # both ways, one after the other
    )
    expected = torch.cat([_sent(number, s, rank, n) for s, n in enumerate(receive_W)])
    return pending, output, expected


def _some_are_dropped(rank: int, world_size: int) -> int:
    shared, own = random.Random(7), random.Random(rank)
    in_flight: list[tuple[Pending, Tensor, Tensor]] = []
    checked = 0
    for number in range(NUM_EXCHANGES):
        if own.random() < 0.1:
            time.sleep(0.001)  # ranks drift apart
        in_flight.append(_start(rank, world_size, number))
        if shared.random() < 0.2:
            in_flight.pop()  # nobody will wait for it
        while len(in_flight) > shared.randrange(MOST_IN_FLIGHT):
            pending, output, expected = in_flight.pop(shared.randrange(len(in_flight)))
            pending.wait()
            assert torch.equal(output, expected)
            checked += 1
    return checked


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_dropped_and_overtaken_exchanges_hold_up_no_other(world_size: int) -> None:
    checked = run_ranks(_some_are_dropped, world_size, timeout_s=60)
    assert min(checked) > NUM_EXCHANGES / 2


ON_LINUX = pytest.mark.skipif(sys.platform != "linux", reason="threads are told apart on Linux")


def _nice_of_gloo() -> list[int]:
    return [
        os.getpriority(os.PRIO_PROCESS, int(task.name))
        for task in Path("/proc/self/task").glob("*")
        if (task / "comm").read_text().startswith("gloo")
    ]


def _exchange(rank: int, world_size: int, trainer_nice: int) -> tuple[list[int], list[int], int]:
    pg = dist.group.WORLD
    os.setpriority(os.PRIO_PROCESS, 0, trainer_nice)
    before = _nice_of_gloo()
    received = torch.empty(world_size)
    sizes = [1] * world_size
    Ranks(pg).start_all_to_all(received, torch.ones(world_size), sizes, sizes, most_sent=2).wait()
    assert received.tolist() == [1.0] * world_size
    let_training_go_first()  # once more changes nothing
    return before, _nice_of_gloo(), os.getpriority(os.PRIO_PROCESS, 0)


@ON_LINUX
@pytest.mark.parametrize(("trainer_nice", "expected"), [(0, 5), (3, 8), (19, 19)])
def test_the_thread_that_trains_goes_first(trainer_nice: int, expected: int) -> None:
    if os.getpriority(os.PRIO_PROCESS, 0):
        pytest.skip("the tests themselves run with another priority than 0")
    for before, after, own in run_ranks(_exchange, 2, trainer_nice, timeout_s=60):
        assert set(before) == {0}
        assert set(after) == {expected}
        assert len(after) > len(before)  # the exchange has connections of its own
        assert own == trainer_nice


@ON_LINUX
def test_a_process_without_gloo_is_left_alone() -> None:
    own = os.getpriority(os.PRIO_PROCESS, 0)
    let_training_go_first()
    assert os.getpriority(os.PRIO_PROCESS, 0) == own


class _Alone:
    """A process group of one rank, without a store."""

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 1

    def get_group_store(self) -> Any:
        raise RuntimeError("no store")


def test_one_rank_copies_and_calls_no_collective() -> None:
    alone: Any = _Alone()
    sent_n, received_n = torch.arange(3.0), torch.zeros(3)
    Ranks(alone).start_all_to_all(received_n, sent_n, [3], [3], most_sent=_MUCH).wait()
    Ranks(alone).start_sum(sent_n).wait()
    assert received_n.tolist() == sent_n.tolist() == [0.0, 1.0, 2.0]


class _OwnError(RuntimeError):
    pass


IN_GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:537] Connection closed by peer"


def _raise(error: Exception) -> None:
    with Peers(_Alone()).propagate_errors(lambda: "step 3"):
        raise error


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError(IN_GLOO),
        RuntimeError("[enforce fail at /src/gloo/transport/tcp/pair.cc:446] 184 vs 4"),
        RuntimeError("Application timeout caused pair closure"),
        dist.DistNetworkError("the store is gone"),
    ],
)
def test_a_broken_exchange_is_explained(error: Exception) -> None:
    with pytest.raises(PeerError, match="rank 0 got no answer in step 3") as caught:
        _raise(error)
    assert str(error) in str(caught.value)
    assert caught.value.__cause__ is error


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("the column gloomy has 3 values, igloo 4"),
        RuntimeError("gloo is what this model was trained with"),
        RuntimeError("the feature store said: connection reset by peer"),
        _OwnError(IN_GLOO),
        ValueError(IN_GLOO),
    ],
)
def test_a_models_own_words_stay(error: Exception) -> None:
    with pytest.raises(type(error)) as caught:
        _raise(error)
    assert caught.value is error
