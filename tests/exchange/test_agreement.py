"""Flags are agreed on by all ranks of a group, whatever else is on the wire."""

import datetime

import pytest
import torch
import torch.distributed as dist

from torchrec_picasso.app.launch.run_ranks import run_ranks
from torchrec_picasso.exchange import agreement
from torchrec_picasso.exchange.agreement import Agreement, Flags
from torchrec_picasso.exchange.all_to_all import Ranks

CPU = torch.device("cpu")


def _agree(rank: int, world_size: int) -> list[bool]:
    """Who speaks: nobody, each rank in turn, all; messages of the group itself are under way."""
    pg = dist.group.WORLD
    found = []
    for speaking in ([], *([each] for each in range(world_size)), list(range(world_size))):
        sent, received = torch.ones(8 * world_size), torch.empty(8 * world_size)
        rows = Ranks(pg).start_all_to_all(
            received, sent, *[[8] * world_size] * 2, most_sent=1 << 30
        )
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
