"""Exchanges in flight at once do not meet, and one that nobody waits for holds up no other."""

import random
import time

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from torchrec_picasso.app.launch.run_ranks import run_ranks
from torchrec_picasso.exchange.all_to_all import Ranks
from torchrec_picasso.exchange.waiting import Pending

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
