"""Local costs: coefficients found again, none negative; a dense part in other batches and cuts. The
budget of a measurement: kept on slow links, and by all ranks alike."""

import dataclasses
import itertools
import json
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from torchrec_picasso.app.launch.run_ranks import run_ranks
from torchrec_picasso.cost import CommCurves, measure
from torchrec_picasso.cost.curves import COLLECTIVES, read
from torchrec_picasso.cost.local import DenseTimes, LocalCosts, LocalWork, PhaseCost
from torchrec_picasso.cost.measure import num_points
from torchrec_picasso.errors import PicassoError

RNG = np.random.default_rng(0)


def _works(num: int) -> list[LocalWork]:
    return [
        LocalWork(
            features=float(RNG.integers(1, 100)),
            lookups=float(n := RNG.integers(1_000, 100_000)),
            rows=float(u := RNG.integers(1, n)),
            lookup_elements=float(n * (d := RNG.integers(4, 128))),
            row_elements=float(u * d),
            buffer_elements=float((n + 2 * u) * d),
            updated=float(RNG.integers(1, u + 1)),
            hashed=float(RNG.integers(0, u + 1)),
        )
        for _ in range(num)
    ]


def test_a_phase_in_three_adds_up() -> None:
    cost = LocalCosts().hot_cold.backward
    work = dataclasses.replace(_works(1)[0], updated=500.0)
    call_ms, lookups_ms, rows_ms = cost.split_ms(work)
    assert call_ms + lookups_ms + rows_ms == pytest.approx(cost.ms(work))
    assert cost.split_ms(dataclasses.replace(work, updated=501.0))[2] > rows_ms
    assert cost.split_ms(LocalWork(packs=2.0))[0] == cost.fixed_ms + 2 * cost.pack_ms


def test_coefficients_are_found_again() -> None:
    true = PhaseCost(
        fixed_ms=1.5,
        feature_us=20,
        lookup_ns=80,
        row_element_ns=3,
        paged_element_ns=2,
        update_ns=700,
        hash_ns=80,
    )
    works = _works(40)
    found = PhaseCost.fit(works, [true.ms(work) for work in works])
    assert dataclasses.asdict(found) == pytest.approx(dataclasses.asdict(true), rel=1e-4, abs=1e-5)


def test_no_coefficient_is_negative() -> None:
    works = _works(12)
    noisy = [float(ms) for ms in RNG.uniform(1, 100, len(works))]
    found = PhaseCost.fit(works, noisy)
    assert min(dataclasses.asdict(found).values()) >= 0


def test_memory_beyond_what_is_kept_costs_extra() -> None:
    cost = PhaseCost(paged_element_ns=1.0)
    kept = (32 << 20) / 4
    assert cost.ms(LocalWork(buffer_elements=kept)) == 0
    assert cost.ms(LocalWork(buffer_elements=kept + 1e6)) == pytest.approx(1.0)


def test_noise_is_not_taken_for_page_faults() -> None:
    """The only probe beyond the kept memory exceeds it by little, and takes a third longer."""
    kept = (32 << 20) / 4
    works = [LocalWork(buffer_elements=kept * share, rows=1e5) for share in (0.5, 0.8, 1.01)]
    found = PhaseCost.fit(works, [10.0, 10.0, 13.0])
    assert found.paged_element_ns == 8.0
    assert 0.9 * 10.0 < found.ms(works[0]) < 1.2 * 10.0
    assert found.ms(LocalWork(buffer_elements=10 * kept, rows=1e5)) < 650


def test_measurements_that_are_none_are_refused() -> None:
    for works, ms in (([], []), (_works(2), [1.0]), (_works(1), [0.0])):
        with pytest.raises(PicassoError, match="expected one time above 0"):
            PhaseCost.fit(works, ms)


MEASURED = DenseTimes(
    forward_ms=40.0,
    backward_ms=80.0,
    parameter_bytes=1000.0,
    batch_size=100,
    in_parts=((4, 30.0, 60.0), (16, 36.0, 100.0)),
)


@pytest.mark.parametrize(
    ("pieces", "forward_ms", "backward_ms"),
    [(1, 40.0, 80.0), (2, 35.0, 70.0), (4, 30.0, 60.0), (8, 33.0, 80.0), (16, 36.0, 100.0)],
)
def test_times_between_cuts_are_linear(pieces: int, forward_ms: float, backward_ms: float) -> None:
    found = MEASURED.cut(pieces)
    assert (found.forward_ms, found.backward_ms) == pytest.approx((forward_ms, backward_ms))
    assert found.parameter_bytes == MEASURED.parameter_bytes


def test_beyond_what_was_measured_times_stay() -> None:
    assert MEASURED.cut(32).total_ms == pytest.approx(136.0)
    given = DenseTimes.from_total(30.0)
    assert given.cut(8).total_ms == given.at(7).total_ms == pytest.approx(30.0)
    assert given.backward_ms == pytest.approx(2 * given.forward_ms)


def test_another_batch_scales_every_cut() -> None:
    half = MEASURED.at(50).cut(4)
    assert (half.forward_ms, half.backward_ms) == pytest.approx((15.0, 30.0))
    assert MEASURED.at(100) is MEASURED


def test_it_survives_json() -> None:
    document = json.loads(json.dumps(dataclasses.asdict(MEASURED)))
    assert read(DenseTimes, document, "dense") == MEASURED
    del document["in_parts"]  # as earlier releases wrote it
    assert read(DenseTimes, document, "dense").in_parts == ()


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
    labels: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure, "_now_s", lambda: link.now_s)
        patch.setattr(measure, "_prepare", link.call)
        patch.setattr(measure, "_LATE_SHARE", 0.0)  # nobody waits on a clock of its own
        curves = CommCurves.measure(
            dist.group.WORLD,
            ranks_per_host=ranks_per_host,
            budget_s=budget_s,
            seconds_per_point=0.05,
            advance=labels.append,
        )
    return curves, link.now_s, labels


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
    # 5 MB/s, the slowest rank's: 28 calls of all collectives take 6 s with 1 MiB, 24 s with 4
    assert [sizes_of(curves) for curves, _, _ in ranks[1]] == [2, 4, 5, NUM_SIZES]
    for _, seconds, labels in ranks[1]:
        assert seconds < 3000
        assert len(labels) == num_points(2, MAX_BYTES) == NUM_SIZES * len(COLLECTIVES)
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
    # the first collective of 256 KiB used all the time that was left: 5 calls of 1.4 s
    assert sizes == [4, 3, 3, 3, 3]
    assert 5.0 < seconds < 15.0
    assert curves.wire_core_ns is not None  # a small part of the time is always left for it


class LossyLink(SlowLink):
    """Some of the first calls of each collective lose a message of some sizes, until a timeout."""

    def __init__(self, num_lost: int, lost_s: Mapping[int, float]) -> None:
        super().__init__(10e6)
        self.num_lost = dict.fromkeys(itertools.product(COLLECTIVES, lost_s), num_lost)
        self._lost_s = lost_s

    def call(self, name: str, pg: Any, numel: int, device: Any) -> tuple[int, Callable[[], None]]:
        num_bytes, wait = super().call(name, pg, numel, device)

        def lose() -> None:
            wait()
            if self.num_lost.get((name, num_bytes)):
                self.num_lost[name, num_bytes] -= 1
                self.now_s += self._lost_s[num_bytes]

        return num_bytes, lose


def lose_messages(rank: int, world_size: int) -> list[tuple[CommCurves, int]]:
    links = [LossyLink(num_lost, {256 << 10: 0.2}) for num_lost in (5, 100)]
    curves = [measured_on_link(world_size, 1, 3000.0, link)[0] for link in links]
    return [(each, link.num_lost["all_to_all", 256 << 10]) for each, link in zip(curves, links)]


def test_a_size_that_took_longer_than_others_let_expect_is_measured_again() -> None:
    for (clean, _), (lossy, left) in run_ranks(lose_messages, 2, timeout_s=TIMEOUT_S):
        expected_ms, larger_ms = ((LATENCY_S + size / 10e6) * 1e3 for size in (256 << 10, 1 << 20))
        for name in COLLECTIVES:  # five calls are one point
            assert clean.collectives[name].ms_at(256 << 10) == pytest.approx(expected_ms)
            assert lossy.collectives[name].ms_at(256 << 10) == pytest.approx(larger_ms)
        assert left == 100 - (1 + 4) * 5


def disturb_a_small_size(rank: int, world_size: int) -> CommCurves:
    link = LossyLink(20, {4 << 10: 2e-3})
    return measured_on_link(world_size, 1, 5.0, link)[0]


def test_a_small_size_is_measured_again_though_no_time_is_left() -> None:
    for curves in run_ranks(disturb_a_small_size, 2, timeout_s=TIMEOUT_S):
        for name in COLLECTIVES:
            expected_ms = (LATENCY_S + (4 << 10) / 10e6) * 1e3
            assert curves.collectives[name].ms_at(4 << 10) == pytest.approx(expected_ms)


def disturb_neighbours(rank: int, world_size: int) -> CommCurves:
    link = LossyLink(5, {64 << 10: 0.04, 256 << 10: 0.2})
    return measured_on_link(world_size, 1, 3000.0, link)[0]


def test_a_size_that_a_larger_disturbed_one_justified_is_measured_again() -> None:
    for curves in run_ranks(disturb_neighbours, 2, timeout_s=TIMEOUT_S):
        for name in COLLECTIVES:
            for num_bytes in (64 << 10, 256 << 10):
                expected_ms = (LATENCY_S + num_bytes / 10e6) * 1e3
                assert curves.collectives[name].ms_at(num_bytes) == pytest.approx(expected_ms)


def oversleep(rank: int, world_size: int) -> CommCurves:
    """Measures two sizes on ranks that a sleep returns to 50 ms too late."""
    sleep = time.sleep
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "sleep", lambda seconds: sleep(seconds + 0.05))
        return CommCurves.measure(dist.group.WORLD, ranks_per_host=1, budget_s=1e-9)


def test_a_late_rank_that_sleeps_too_long_is_not_measured() -> None:
    for curves in run_ranks(oversleep, 2, timeout_s=TIMEOUT_S):
        for curve in curves.collectives.values():
            assert max(curve.ms) < 25.0  # a row exchange is the mean of two calls


@pytest.mark.parametrize("budget_s", [0.0, -1.0, float("nan")])
def test_no_time_at_all_is_refused(budget_s: float) -> None:
    with pytest.raises(PicassoError, match=r"budget_s is .*, expected more than 0 seconds"):
        CommCurves.measure(None, budget_s=budget_s)  # type: ignore[arg-type]


@pytest.mark.parametrize(("world_size", "points"), [(1, 0), (2, 40), (4, 40)])
def test_number_of_points(world_size: int, points: int) -> None:
    assert num_points(world_size, MAX_BYTES) == points
