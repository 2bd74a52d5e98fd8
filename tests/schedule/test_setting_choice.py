"""The choice of micro-batches and lookahead: near the fastest, the same on all ranks, exact."""

import dataclasses
from collections.abc import Sequence
from itertools import count, groupby, product
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.setting_trial import CURVES, HINTS, NOISES, PaperClock, settle, simulate
from tests.sharding.jobs import PLAIN, Job, build, result_of
from tests.train_pipeline.runs import Run, batches_of, compare_runs, pipeline_of, plain_steps
from torchrec_picasso.app.launch.run_ranks import run_ranks
from torchrec_picasso.schedule.schedule import Setting
from torchrec_picasso.schedule.setting_choice import (
    NUM_STEPS,
    SettingChoice,
    TimedStep,
    candidates,
    pieces_for,
)

PIECES = (1, 2, 4, 8, 16)


@pytest.mark.parametrize("first", [None, *PIECES])
@pytest.mark.parametrize("fastest", PIECES)
def test_a_trial_begins_as_planned_and_ends_with_the_fastest(
    first: int | None, fastest: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="torchrec_picasso")
    choice, clock = SettingChoice(candidates(None, None), first), PaperClock()
    seen: list[int] = []
    assert choice.current == Setting(first or 2, lookahead=True)

    def step_s(setting: Setting) -> float:
        seen.append(setting.num_micro_batches)
        away = abs(PIECES.index(setting.num_micro_batches) - PIECES.index(fastest))
        return 1 + 0.1 * away + (0 if setting.lookahead else 0.2)

    assert settle(choice, step_s, clock) <= NUM_STEPS
    assert seen[0] == 1  # in flight before the trial
    assert seen[3] == (first or 2)
    assert choice.current == Setting(fastest, lookahead=True)
    assert clock.num_readings <= 13  # a warm-up, 6 settings, 4, 2: a run is read when it is over
    assert f"{choice.current}; the fastest of " in str(choice)
    assert caplog.messages == [f"setting chosen: {choice}"]


def test_a_plan_that_says_nothing_or_what_is_not_allowed_changes_nothing() -> None:
    for first in (None, 3, 16):
        choice = SettingChoice(candidates(None, None, 512), first)
        assert choice.current.num_micro_batches == 2  # whole batches are next
    given = SettingChoice(candidates(4, True), 8)
    assert given.is_settled
    assert given.current.num_micro_batches == 4


def test_what_a_plan_is_priced_for_may_run() -> None:
    for num_samples, most in ((4096, 16), (512, 8), (511, 4), (10, 1)):
        assert pieces_for(num_samples)[-1] == most
        choice = SettingChoice(candidates(None, None, num_samples), most)
        assert choice.current.num_micro_batches == most


def test_between_equals_what_the_plan_says_stays() -> None:
    for first in PIECES:
        choice = SettingChoice(candidates(None, None), first)
        settle(choice, lambda setting: 1.0 - 0.0005 * setting.num_micro_batches)
        assert choice.current == Setting(first, lookahead=True)


def test_lookahead_is_left_out_of_whole_batches_alone_where_it_clearly_costs() -> None:
    for fastest, without, chosen in ((1, 0.99, True), (1, 0.9, False), (4, 0.5, True)):
        choice = SettingChoice(candidates(None, None), fastest)
        settle(
            choice,
            lambda setting, f=fastest, w=without: (
                (1.0 if setting.lookahead else w)
                * (1 + abs(PIECES.index(setting.num_micro_batches) - PIECES.index(f)))
            ),
        )
        assert choice.current == Setting(fastest, chosen)


def test_slow_settings_run_once_and_near_ones_again() -> None:
    times = {1: 2.0, 2: 1.3, 4: 1.0, 8: 1.1, 16: 1.4}
    steps: list[int] = []

    def step_s(setting: Setting) -> float:
        steps.append(setting.num_micro_batches)
        return times[setting.num_micro_batches]

    choice = SettingChoice(candidates(None, True), 2)
    settle(choice, step_s)
    assert choice.current.num_micro_batches == 4
    runs = [k for k, before in zip(steps, [None, *steps]) if k != before]
    # those in flight are whole; then the warm-up and three rounds
    assert runs == [1, 2, 1, 4, 8, 16, 4, 8, 2, 4, 8]


def test_a_disturbance_of_many_steps_does_not_decide() -> None:
    """For as long as a run, steps take half as long again."""
    for begin in range(60):
        choice, steps = SettingChoice(candidates(None, True), 2), iter(range(1000))

        def step_s(setting: Setting, steps: Any = steps, begin: int = begin) -> float:
            is_held_up = begin <= next(steps) < begin + 8
            away = abs(PIECES.index(setting.num_micro_batches) - PIECES.index(4))
            return (1 + 0.25 * away) * (1.5 if is_held_up else 1.0)

        settle(choice, step_s)
        assert choice.current.num_micro_batches == 4, begin


def test_steps_between_others_of_their_setting_count() -> None:
    choice, clock = SettingChoice(candidates(None, True), 1), _CountingClock()
    settle(choice, lambda setting: 1.0 + PIECES.index(setting.num_micro_batches) / 20, clock)
    runs = [(number, len(list(same))) for number, same in groupby(clock.counted)]
    assert runs == [
        *[(1, 11), (2, 3), (4, 3), (8, 3), (16, 3)],  # five of a warm-up of six; five batches each
        *[(1, 4), (2, 4), (4, 4), (8, 4)],  # six
        *[(1, 4), (2, 3)],  # and a batch that ran after the choice
    ]


class _CountingClock(PaperClock):
    """Micro-batches of the steps that count."""

    def __init__(self) -> None:
        super().__init__()
        self.counted: list[int] = []

    def read(self, steps: Sequence[TimedStep], pg: Any) -> list[tuple[float, float]]:
        self.counted += [step.setting.num_micro_batches for step in steps]
        return super().read(steps, pg)


def test_fast_steps_of_the_warm_up_do_not_count() -> None:
    choice, steps = SettingChoice(candidates(None, True), 1), count()

    def step_s(setting: Setting) -> float:
        return 0.1 if next(steps) < 6 else 1.0 + (setting.num_micro_batches == 1)

    settle(choice, step_s)
    assert choice.current.num_micro_batches == 2


def test_a_short_batch_does_not_decide() -> None:
    """Every seventh batch is the last of an epoch, a third of the others' samples, at half a step's
    time; a batch of no sample at all says nothing."""
    for begin, short in product(range(7), (100, 0)):
        choice = SettingChoice(candidates(None, True), 2)
        sizes = [short if (step + begin) % 7 == 0 else 300 for step in range(200)]
        steps = iter(sizes)

        def step_s(setting: Setting, steps: Any = steps) -> float:
            away = abs(PIECES.index(setting.num_micro_batches) - PIECES.index(4))
            return (1 + 0.25 * away) * (1.0 if next(steps) == 300 else 0.5)

        settle(choice, step_s, samples=sizes)
        assert choice.current.num_micro_batches == 4, begin
        assert "4 micro-batches with lookahead: 1000 ms" in str(choice)


def test_a_trial_of_steps_that_do_not_count_has_chosen_nothing() -> None:
    choice, clock, one_rank = SettingChoice(candidates(None, True), 2), PaperClock(), None
    assert choice.chosen is None
    while not choice.is_settled:
        choice.note_step([choice.current] * 3, None, 1, clock, one_rank)  # type: ignore[arg-type]
    assert choice.current == Setting(2, lookahead=True)  # as the plan says
    assert choice.chosen is None
    choice.settle_on(Setting(4, lookahead=True))
    assert choice.chosen == Setting(4, lookahead=True)
    assert SettingChoice(candidates(4, True)).chosen == Setting(4, lookahead=True)


def test_a_slow_warm_up_does_not_decide() -> None:
    for first in PIECES:
        choice = SettingChoice(candidates(None, True), first)
        warm_up = (1 + 2 * 0.75**step for step in range(NUM_STEPS))

        def step_s(setting: Setting, warm_up: Any = warm_up, first: int = first) -> float:
            away = abs(PIECES.index(setting.num_micro_batches) - PIECES.index(first))
            return (1 + 0.1 * away) * next(warm_up)

        assert settle(choice, step_s) <= NUM_STEPS
        assert choice.current.num_micro_batches == first


def test_kernels_that_each_setting_compiles_do_not_decide() -> None:
    choice, compiled = SettingChoice(candidates(None, True)), set[Setting]()

    def step_s(setting: Setting) -> float:
        is_new = setting not in compiled
        compiled.add(setting)
        return 30.0 if is_new else 1.0 + abs(setting.num_micro_batches - 8)

    settle(choice, step_s)
    assert choice.current.num_micro_batches == 8


def test_one_slow_step_does_not_decide() -> None:
    for slow in range(12):
        choice, steps = SettingChoice(candidates(None, True)), iter(range(1000))
        settle(
            choice,
            lambda setting, steps=steps, slow=slow: (
                9.0 if next(steps) == slow else 1.0 if setting.num_micro_batches == 2 else 1.2
            ),
        )
        assert choice.current.num_micro_batches == 2


def test_what_is_given_is_not_tried() -> None:
    assert SettingChoice(candidates(4, False)).is_settled
    given = SettingChoice(candidates(4, None))
    assert given.is_settled
    assert given.current == Setting(4, lookahead=True)
    whole = SettingChoice(candidates(1, None))
    settle(whole, lambda setting: 1.0 if setting.lookahead else 0.5)
    assert whole.current == Setting(1, lookahead=False)


def test_what_an_earlier_run_chose_is_taken_where_it_is_allowed() -> None:
    chosen = Setting(8, lookahead=True)
    choice = SettingChoice(candidates(None, None, 4096), known=chosen)
    assert choice.is_settled
    assert choice.current == chosen
    assert str(choice) == "8 micro-batches with lookahead, as an earlier run chose"
    small = SettingChoice(candidates(None, None, 128), known=chosen)
    assert not small.is_settled
    given = SettingChoice(candidates(2, None))
    given.settle_on(chosen)
    assert given.current == Setting(2, lookahead=True)


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
def test_what_cannot_win_is_left(num_samples: int, is_interleaved: bool, pieces: list[int]) -> None:
    choice, seen = SettingChoice(candidates(None, None, num_samples, is_interleaved)), []
    if not choice.is_settled:
        settle(choice, lambda setting: seen.append(setting) or 1.0 / setting.num_micro_batches)
    assert {setting.num_micro_batches for setting in seen} <= set(pieces)
    assert choice.current.num_micro_batches == pieces[-1]
    assert choice.is_settled
    given = SettingChoice(candidates(8, True, num_samples, is_interleaved))
    assert given.current.num_micro_batches == 8


def test_trials_are_short_and_end_near_the_best() -> None:
    """Curves that were measured; today's figures are in docs/dev/log.md."""
    found = [
        simulate(curve, noise, hint, times=15)
        for curve in CURVES.values()
        for noise in NOISES
        for hint in HINTS
    ]
    assert np.mean([each.steps for each in found]) <= 68
    assert np.mean([each.losses for each in found]) <= 0.012
    assert max(each.steps.max() for each in found) <= NUM_STEPS


def _slow(model: Any) -> torch.optim.Optimizer:
    """The loss is a sum over many samples."""
    return torch.optim.SGD(model.module.over.parameters(), lr=1e-4)


def _automatic(rank: int, world_size: int) -> tuple[Run, Run, str, Setting | None, str]:
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
    assert {1, 2} <= set(tried) <= {1, 2, 4}
    chosen = pipeline.setting
    assert chosen == Setting(pipeline.num_micro_batches, pipeline.lookahead)
    later = pipeline_of(build(job, rank, world_size), optimizer=_slow(model))
    assert later.setting is None
    later.settle_on(chosen)
    later.progress(iter(batches))
    assert later.setting == chosen
    return (
        (result_of(model, []), outputs),
        (result_of(plain, []), expected),
        pipeline.summary(),
        chosen,
        later.summary(),
    )


def test_a_pipeline_that_chooses_trains_exactly_and_alike_on_all_ranks() -> None:
    by_rank = run_ranks(_automatic, 2, timeout_s=100)
    compare_runs(by_rank, 0, 1)
    assert by_rank[0][2:] == by_rank[1][2:]
    _, _, summary, chosen, later = by_rank[0]
    assert "the fastest of" in summary.splitlines()[-1]
    assert later.splitlines()[-1] == f"{chosen}, as an earlier run chose"
