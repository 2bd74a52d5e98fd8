"""The choice of micro-batches and lookahead: near the fastest, the same on all ranks, exact."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from tests.sharding.jobs import PLAIN, Job, build, result_of
from tests.train_pipeline.runs import Run, assert_same_runs, batches_of, pipeline_of, plain_steps
from torchrec_picasso.errors import CompatError
from torchrec_picasso.launch.run_ranks import run_ranks
from torchrec_picasso.schedule.schedule import Setting
from torchrec_picasso.schedule.setting_choice import SettingChoice, candidates, pieces_for
from torchrec_picasso.schedule.setting_trial import NUM_STEPS, smoothed_s, typical_s
from torchrec_picasso.schedule.step_clock import StepClock

CPU = torch.device("cpu")
PIECES = (1, 2, 4, 8, 16)


class _OneRank:
    def size(self) -> int:
        return 1


class _Clock:
    """Stamps are seconds."""

    def __init__(self) -> None:
        self.num_readings = 0

    def seconds(self, spans: Sequence[tuple[float, float]]) -> list[float]:
        self.num_readings += 1
        return [end - start for start, end in spans]


def _settle(
    choice: SettingChoice, step_s: Callable[[Setting], float], clock: _Clock | None = None
) -> int:
    """Trains until the choice is settled; gives the number of steps."""
    pg: Any = _OneRank()
    clock = clock or _Clock()
    in_flight = [choice.current] * 3
    for step in range(1, 1000):
        choice.note_step(in_flight, (0.0, step_s(in_flight[0])), clock, pg, CPU)
        if choice.is_settled:
            return step
        in_flight = [*in_flight[1:], choice.current]
    raise AssertionError("never settled")


@pytest.mark.parametrize("fastest", PIECES)
def test_the_fastest_is_chosen(fastest: int) -> None:
    choice, clock = SettingChoice(candidates(None, None)), _Clock()

    def step_s(setting: Setting) -> float:
        away = abs(PIECES.index(setting.num_micro_batches) - PIECES.index(fastest))
        return 1 + 0.1 * away + (0 if setting.lookahead else 0.2)

    assert _settle(choice, step_s, clock) <= NUM_STEPS
    assert choice.current == Setting(fastest, lookahead=True)
    assert clock.num_readings <= 9  # a turn is read when it is over
    assert f"{choice.current}; the fastest of 1 micro-batch with lookahead: " in str(choice)
    assert f"{fastest} micro-batch" in str(choice)


@pytest.mark.parametrize("first", PIECES)
@pytest.mark.parametrize("fastest", PIECES)
def test_a_trial_begins_with_what_the_plan_says_and_ends_with_the_fastest(
    first: int, fastest: int
) -> None:
    choice, seen = SettingChoice(candidates(None, None)), []
    choice.begin_with(first)
    assert choice.current == Setting(first, lookahead=True)

    def step_s(setting: Setting) -> float:
        seen.append(setting.num_micro_batches)
        away = abs(PIECES.index(setting.num_micro_batches) - PIECES.index(fastest))
        return 1 + 0.1 * away + (0 if setting.lookahead else 0.2)

    assert _settle(choice, step_s) <= NUM_STEPS
    assert seen[0] == first
    assert choice.current.num_micro_batches == fastest


def test_a_plan_that_says_nothing_or_what_is_not_allowed_changes_nothing() -> None:
    for first in (None, 3, 16):
        choice = SettingChoice(candidates(None, None))
        choice.begin_with(first)
        choice.narrow(512, is_interleaved=True)
        assert choice.current.num_micro_batches == 1
    given = SettingChoice(candidates(4, True))
    given.begin_with(8)
    assert given.is_settled
    assert given.current.num_micro_batches == 4


def test_what_a_plan_is_priced_for_may_run() -> None:
    for num_samples, most in ((4096, 16), (512, 8), (511, 4), (10, 1)):
        assert pieces_for(num_samples)[-1] == most
        choice = SettingChoice(candidates(None, None))
        choice.begin_with(most)
        choice.narrow(num_samples, is_interleaved=True)
        assert choice.current.num_micro_batches == most


def test_of_equals_the_plainest_is_chosen() -> None:
    choice = SettingChoice(candidates(None, None))
    _settle(choice, lambda setting: 1.0 - 0.00005 * setting.num_micro_batches)
    assert choice.current == Setting(1, lookahead=True)


def test_lookahead_is_left_out_only_where_it_clearly_costs() -> None:
    for without, chosen in ((0.99, True), (0.9, False)):
        choice = SettingChoice(candidates(None, None))
        _settle(choice, lambda setting, s=without: 1.0 if setting.lookahead else s)
        assert choice.current.lookahead is chosen


def test_one_slow_step_does_not_decide() -> None:
    for slow in range(12):
        choice, steps = SettingChoice(candidates(None, True)), iter(range(1000))
        _settle(
            choice,
            lambda setting, steps=steps, slow=slow: (
                9.0 if next(steps) == slow else 1.0 if setting.num_micro_batches == 2 else 1.2
            ),
        )
        assert choice.current.num_micro_batches == 2


def test_what_is_given_is_not_tried() -> None:
    assert SettingChoice(candidates(4, False)).is_settled
    looks = SettingChoice(candidates(4, None))
    _settle(looks, lambda setting: 1.0 if setting.lookahead else 0.5)
    assert looks.current == Setting(4, lookahead=False)
    assert looks.is_given
    assert not SettingChoice(candidates(None, True)).is_given


def test_a_reason_for_whole_batches_leaves_those_or_is_raised() -> None:
    choice = SettingChoice(candidates(None, True))
    assert choice.to_check == 4
    choice.restrict("BatchNorm")
    assert choice.is_settled
    assert choice.current.num_micro_batches == choice.to_check == 1
    assert "no more than 1 because BatchNorm" in str(choice)
    with pytest.raises(CompatError, match="BatchNorm"):
        SettingChoice(candidates(4, True)).restrict("BatchNorm")
    SettingChoice(candidates(4, True)).restrict(None)


def test_a_reason_that_is_found_late_keeps_what_is_known_about_lookahead() -> None:
    choice = SettingChoice(candidates(None, None))
    _settle(choice, lambda setting: 1.0 / setting.num_micro_batches)
    assert choice.current == Setting(16, lookahead=True)
    assert choice.to_check == 16
    choice.restrict("clicked")
    assert choice.is_settled
    assert choice.current == Setting(1, lookahead=True)


@pytest.mark.parametrize(
    ("num_samples", "is_interleaved", "pieces"),
    [
        (4096, True, [1, 2, 4, 8, 16]),
        (512, True, [1, 2, 4, 8]),
        (511, True, [1, 2, 4]),
        (10, True, [1]),
        (4096, False, [1]),
    ],
)
def test_what_cannot_win_is_not_tried(
    num_samples: int, is_interleaved: bool, pieces: list[int]
) -> None:
    choice, seen = SettingChoice(candidates(None, None)), []
    choice.narrow(num_samples, is_interleaved)
    if not choice.is_settled:
        _settle(choice, lambda setting: seen.append(setting) or 1.0 / setting.num_micro_batches)
    assert {setting.num_micro_batches for setting in seen} <= set(pieces)
    assert choice.current.num_micro_batches == pieces[-1]
    assert choice.is_settled
    given = SettingChoice(candidates(8, True))
    given.narrow(num_samples, is_interleaved)
    assert given.current.num_micro_batches == 8


# -- noise -----------------------------------------------------------------------------------------


def _times_of(draw: np.random.Generator) -> dict[Setting, float]:
    """Step times of some machine: exposed communication that K hides, the cost of each micro-batch,
    what no formula knows; lookahead mostly helps."""
    exposed = draw.choice([draw.uniform(0, 0.1), draw.uniform(0, 1.5), draw.uniform(0, 8)])
    piece = draw.choice([draw.uniform(0, 0.005), draw.uniform(0, 0.06)])
    gain = draw.choice([draw.uniform(1.0, 1.3), draw.uniform(0.95, 1.02)], p=[0.9, 0.1])
    times = {}
    for k in PIECES:
        time_s = (1 + exposed / k + piece * (k - 1)) * (1 + draw.normal(0, 0.01))
        times[Setting(k, True)], times[Setting(k, False)] = time_s, time_s * gain
    return times


def _regret(draw: np.random.Generator, times: Mapping[Setting, float]) -> tuple[float, int]:
    """How much slower the choice is than the best, and the steps that it took."""

    def step_s(setting: Setting) -> float:
        held_up = 1.3 if draw.random() < 0.05 else 1.0
        return times[setting] * held_up * float(np.exp(draw.normal(0, 0.05)))

    choice = SettingChoice(candidates(None, None))
    steps = _settle(choice, step_s)
    return times[choice.current] / min(times.values()) - 1, steps


def test_with_five_percent_noise_the_choice_is_near_the_best() -> None:
    draw = np.random.default_rng(0)
    found = [_regret(draw, _times_of(draw)) for _ in range(400)]
    regrets = np.array([regret for regret, _ in found])
    assert np.mean(regrets <= 0.03) >= 0.95
    assert regrets.mean() < 0.01
    assert max(steps for _, steps in found) <= NUM_STEPS


def test_times_are_drawn_towards_one_valley() -> None:
    assert typical_s([1.0, 1.1, 5.0]) == pytest.approx(1.05)
    valley = {k: [1 + 1 / k + 0.01 * k] for k in PIECES}
    smoothed = smoothed_s(valley)
    assert smoothed == pytest.approx({k: times[0] for k, times in valley.items()})
    odd = dict(valley) | {4: [1.5 * valley[4][0]]}
    assert valley[4][0] < smoothed_s(odd)[4] < 0.9 * odd[4][0]


def test_on_the_cpu_stamps_are_seconds() -> None:
    clock = StepClock(CPU)
    start, end = clock.stamp(), clock.stamp()
    assert 0 <= clock.seconds([(start, end)])[0] < 1
    assert clock.seconds([]) == []


# -- training --------------------------------------------------------------------------------------


def _slow(model: Any) -> torch.optim.Optimizer:
    """The loss is a sum over many samples."""
    return torch.optim.SGD(model.module.over.parameters(), lr=1e-4)


def _automatic(rank: int, world_size: int) -> tuple[Run, Run, Setting, str, bool]:
    """With a batch that is large enough for four micro-batches, and a plan priced for two."""
    job = dataclasses.replace(Job(placement={"*": 2}, tables=PLAIN), batch_sizes=(256,))
    batches = batches_of(job, rank, range(NUM_STEPS + 4))
    plain = build(job, rank, world_size)
    expected = plain_steps(plain, batches, _slow(plain))
    model = build(job, rank, world_size)
    for placed in model.module.ebc.module_sharding_plan.values():
        placed.cache_params.num_micro_batches = 2
    pipeline = pipeline_of(model, optimizer=_slow(model))
    iterator, tried = iter(batches), []
    outputs = []
    for _ in batches:
        outputs.append(pipeline.progress(iterator))
        tried.append(pipeline.num_micro_batches)
    assert tried[0] == 2
    assert set(tried) == {1, 2, 4}
    chosen = Setting(pipeline.num_micro_batches, pipeline.lookahead)
    return (
        (result_of(model, []), outputs),
        (result_of(plain, []), expected),
        chosen,
        pipeline.summary(),
        pipeline.is_settled,
    )


def test_a_pipeline_that_chooses_trains_exactly_and_alike_on_all_ranks() -> None:
    by_rank = run_ranks(_automatic, 2, timeout_s=100)
    assert_same_runs([of[0] for of in by_rank], [of[1] for of in by_rank])
    assert by_rank[0][2] == by_rank[1][2]
    assert by_rank[0][3] == by_rank[1][3]
    assert by_rank[0][4]
    assert "the fastest of" in by_rank[0][3].splitlines()[-1]
