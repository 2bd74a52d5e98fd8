"""The budget of a measurement: kept on slow links, and by all ranks alike."""

from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

from torchrec_picasso.app.launch.run_ranks import run_ranks
from torchrec_picasso.cost import CommCurves, measure
from torchrec_picasso.cost.curves import COLLECTIVES
from torchrec_picasso.cost.measure import num_points
from torchrec_picasso.errors import PicassoError

MAX_BYTES = 64 << 20
NUM_SIZES = 8
LATENCY_S = 1e-3
TIMEOUT_S = 120


class SlowLink:
    """Collectives that take a link's time, on a clock of their own; beyond a kink, 50 times it."""

    def __init__(self, bytes_per_s: float, kink_bytes: float = float("inf")) -> None:
        self.now_s = 0.0
        self._bytes_per_s, self._kink_bytes = bytes_per_s, kink_bytes

    def call(self, name: str, pg: Any, numel: int, device: Any) -> tuple[int, Callable[[], None]]:
        def wait() -> None:
            slow = 50 if 4 * numel >= self._kink_bytes else 1
            self.now_s += slow * (LATENCY_S + 4 * numel / self._bytes_per_s)

        return 4 * numel, wait


def measured_on_link(
    world_size: int, ranks_per_host: int, budget_s: float, link: SlowLink
) -> tuple[CommCurves, float, list[str]]:
    """The curves, the seconds that they took by the link's clock, and the points told."""
    told: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure, "_now_s", lambda: link.now_s)
        patch.setattr(measure, "_prepare", link.call)
        curves = CommCurves.measure(
            dist.group.WORLD,
            ranks_per_host=ranks_per_host,
            budget_s=budget_s,
            seconds_per_point=0.05,
            advance=told.append,
        )
    return curves, link.now_s, told


def several_budgets(rank: int, world_size: int) -> list[tuple[CommCurves, float, list[str]]]:
    speed = 10e6 / (1 + rank)  # the last rank's is the slowest
    budgets = (1e-9, 4.0, 30.0, 3000.0)
    return [measured_on_link(world_size, 1, budget, SlowLink(speed)) for budget in budgets]


def sizes_of(curves: CommCurves) -> int:
    (num_sizes,) = {len(curve.sent_bytes) for curve in curves.collectives.values()}
    return num_sizes


def test_a_slow_link_gets_the_sizes_that_fit_and_all_ranks_agree() -> None:
    ranks = run_ranks(several_budgets, 2, timeout_s=TIMEOUT_S)
    for (curves, _, _), (other, _, _) in zip(*ranks):
        assert curves.collectives == other.collectives
    # 5 MB/s, the slowest rank's: 7 calls of 5 collectives take 9 s with 1 MiB, 35 s with 4
    assert [sizes_of(curves) for curves, _, _ in ranks[1]] == [2, 4, 5, NUM_SIZES]
    for _, seconds, told in ranks[1]:
        assert seconds < 3000
        assert len(told) == num_points(2, MAX_BYTES) == NUM_SIZES * len(COLLECTIVES)
    for curves, _, _ in ranks[1][1:]:  # two sizes of some ms say little of the bandwidth
        last = curves.collectives["all_reduce"]
        assert last.ms_at(1e9) == pytest.approx((LATENCY_S + 1e9 / 5e6) * 1e3, rel=0.02)
    seconds = [seconds for _, seconds, _ in ranks[1]]
    assert seconds[1] <= 4.0
    assert seconds[2] <= 30.0
    assert ranks[1][0][2][0] == "all_to_all, 4 KiB"


def kink(rank: int, world_size: int) -> tuple[CommCurves, float, list[str]]:
    link = SlowLink(10e6, kink_bytes=256 << 10 if rank == 1 else float("inf"))
    return measured_on_link(world_size, 1, 5.0, link)


def test_a_size_that_takes_longer_than_foreseen_is_the_last() -> None:
    (curves, _, _), (other, seconds, _) = run_ranks(kink, 2, timeout_s=TIMEOUT_S)
    assert curves.collectives == other.collectives
    sizes = [len(curves.collectives[name].sent_bytes) for name in COLLECTIVES]
    # the first collective of 256 KiB used all the time that was left: 7 calls of 1.4 s
    assert sizes == [4, 3, 3, 3, 3]
    assert 5.0 < seconds < 15.0


@pytest.mark.parametrize("budget_s", [0.0, -1.0, float("nan")])
def test_no_time_at_all_is_refused(budget_s: float) -> None:
    with pytest.raises(PicassoError, match=r"budget_s is .*, expected more than 0 seconds"):
        CommCurves.measure(None, budget_s=budget_s)  # type: ignore[arg-type]


@pytest.mark.parametrize(("world_size", "points"), [(1, 0), (2, 40), (4, 40)])
def test_number_of_points(world_size: int, points: int) -> None:
    assert num_points(world_size, MAX_BYTES) == points
